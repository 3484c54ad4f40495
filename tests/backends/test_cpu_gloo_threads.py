# SPDX-License-Identifier: Apache-2.0
"""A rank's exit does not race with gloo's worker threads."""

import os
import subprocess
import sys
import textwrap
import time

from tests.support.distributed import REPOSITORY, SINGLE_THREADED, run_ranks


def reduce_with_a_slow_worker(tensor):
    """Return when `tensor` is reduced over two ranks; on rank 0 the worker that did it is busy meanwhile, and after."""
    import hashlib

    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), src=0)
        dist.all_reduce(tensor)
        return
    reduced = dist.all_reduce(tensor, async_op=True).get_future()
    # Runs on the worker, which still holds the tensor: without the interpreter's lock, for some tenths of a second.
    reduced.then(lambda _: hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000))
    # Only now can the peer join, so the worker cannot have been through before it had this to do.
    dist.send(torch.ones(1), dst=1)
    reduced.wait()


def holders_before_and_after_rest():
    """Return how many hold a reduced tensor: right after the collective, and when the workers came to rest."""
    import torch
    import torch.distributed as dist

    from megatron_ext.backends.cpu import gloo_threads

    dist.init_process_group("gloo")
    tensor = torch.ones(8)
    reduce_with_a_slow_worker(tensor)
    after_collective = tensor._use_count()
    gloo_threads.rest()
    return after_collective, tensor._use_count()


def test_workers_have_let_go_of_every_tensor_when_they_rest():
    after_collective, after_rest = run_ranks(holders_before_and_after_rest, 2)[0]
    assert after_collective > 1, "the worker was not behind: the test shows nothing"
    assert after_rest == 1


def test_a_worker_that_waits_for_a_peer_is_at_rest():
    assert run_ranks(rest_while_a_peer_is_late, 2)[0] < 5.0


def rest_while_a_peer_is_late():
    """Return the seconds that a rank rested with a collective in flight which its peer had not joined."""
    import torch
    import torch.distributed as dist

    from megatron_ext.backends.cpu import gloo_threads

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), src=0)
        dist.all_reduce(torch.ones(1))
        return 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)
    started = time.monotonic()
    gloo_threads.rest()
    rested = time.monotonic() - started
    dist.send(torch.ones(1), dst=1)
    work.wait()
    return rested


def holders_at_the_end(store):
    """Return what two processes say at their very end about the holders of a tensor that they reduced last."""
    script = """
        import atexit
        import sys
        import torch
        import torch.distributed as dist
        from megatron_ext import patch_megatron
        from tests.backends.test_cpu_gloo_threads import reduce_with_a_slow_worker

        tensor = torch.ones(8)
        # Before patch_megatron, so after everything that it registers.
        atexit.register(lambda: print(f"{tensor._use_count()} at the end"))
        patch_megatron("cpu")
        dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
        reduce_with_a_slow_worker(tensor)
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), f"file://{store}", str(rank)],
            env={**os.environ, **SINGLE_THREADED},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    return [printed.splitlines()[-1] for printed, _ in ends]


def test_a_process_ends_only_when_its_workers_rest(tmp_path):
    assert holders_at_the_end(tmp_path / "store") == ["1 at the end"] * 2


def test_a_process_that_gave_the_backend_up_does_not_look_for_workers():
    script = """
        from megatron_ext.backends.cpu import gloo_threads

        gloo_threads.arm()
        gloo_threads.disarm()
        gloo_threads._workers = lambda: print("looked") or []
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
