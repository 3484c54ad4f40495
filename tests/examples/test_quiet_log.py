# SPDX-License-Identifier: Apache-2.0
"""What the filter of training logs leaves out, and what it never may."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributed import REPOSITORY

FILTER = [sys.executable, "-I", str(REPOSITORY / "scripts/lib/quiet_log.py")]
NOISE = """\
W1128 09:41:37.188000 20956 torch/utils/cpp_extension.py:178] No CUDA runtime is found, using CUDA_HOME='/usr/local'
/lib/megatron/core/models/backends.py:34: UserWarning: Apex is not installed. Falling back to Torch Norm
  warnings.warn("Apex is not installed. Falling back to Torch Norm")
------------------------ arguments ------------------------
  adam_beta1 ...................................... 0.9
  some_new_kind_of_argument ....................... error
-------------------- end of arguments ---------------------
> initialized tensor model parallel with size 1

Number of parameters in transformer block in billions:  0.00
Theoretical memory footprints: weight and optimizer=4.38 MB, activation=0.68 MB, total=5.06 MB
W1128 15:17:03.879000 14429 torch/distributed/run.py:874]\x20
W1128 15:17:03.879000 14429 torch/distributed/run.py:874] *****************************************
Evaluating on 32 samples
Evaluating iter 1/2
usage: pretrain_gpt.py [-h]
                       [--tensor-model-parallel-size TENSOR_MODEL_PARALLEL_SIZE]
"""
TOLD = """\
> megatron_ext: no CUDA device was found, training runs on CPU with gloo
 [2026-11-28 09:41:42] iteration        1/      20 | lm loss: 5.5 |
megatron-ext: error: --seq-length: 3 is too short
Traceback (most recent call last):
  File "/lib/megatron/training/training.py", line 3, in pretrain
    raise ValueError("  warnings.warn(")
ValueError: the model has no layers
some line \xff that nobody has foreseen
/lib/x.py:3: UserWarning without its colon
  at the end
"""


def filtered(text: bytes, log: str, output: int = subprocess.PIPE) -> tuple[bytes, str]:
    """Return what the filter shows of a log, and what it says itself."""
    done = subprocess.run([*FILTER, log], input=text, stdout=output, stderr=subprocess.PIPE, check=True)
    return done.stdout, done.stderr.decode()


def test_a_log_is_shown_without_the_noise_and_kept_with_it(tmp_path: Path) -> None:
    noise, told = (text.encode("latin-1") for text in (NOISE, TOLD))
    for text in (noise + told, told + noise):
        log = tmp_path / "node0.log"
        assert filtered(text, str(log)) == (told, "")
        assert log.read_bytes() == text
        log.unlink()


def test_what_follows_noise_on_the_next_run_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "node0.log"
    filtered(b"one\n", str(log))
    assert filtered(b"two without an end", str(log)) == (b"two without an end", "")
    assert log.read_bytes() == b"one\ntwo without an end"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_or_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    text = TOLD.encode("latin-1")
    shown, said = filtered(text, "/dev/full")
    assert shown == text and said.count("No space left on device; nothing more is written there") == 1
    log = tmp_path / "node0.log"
    with open("/dev/full", "wb") as full:
        _, said = filtered(text, str(log), full.fileno())
    assert log.read_bytes() == text and "standard output: No space left on device" in said


SENTENCE = "megatron-ext: error: --sync-service-index is 9, and there are 4 peers; give 0 to 3\n"
ELASTIC = """\
W1128 15:15:33.1 11 torch/distributed/elastic/multiprocessing/api.py:1014] Sending process 12 closing signal SIGTERM
E1128 15:15:33.2 11 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 2) local_rank: 0 (pid: 11)
"""
TORCHRUN = """\
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/lib/torch/distributed/launcher/api.py", line 317, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
/examples/pretrain_gpt.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 2 (pid: 11)
============================================================
"""
OF_ITSELF = [*TORCHRUN.splitlines(keepends=True)[:5], "torch.distributed.DistNetworkError: EADDRINUSE\n"]


def test_the_sentence_that_says_why_a_training_ends_is_the_last_line(tmp_path: Path) -> None:
    def shown(*texts: str) -> str:
        log = tmp_path / "node0.log"
        found, said = filtered("".join(texts).encode(), str(log))
        assert log.read_bytes().decode() == "".join(texts) and said == ""
        log.unlink()
        return found.decode()

    assert shown("before\n", SENTENCE, ELASTIC, TORCHRUN) == "before\n" + SENTENCE
    assert shown(SENTENCE, SENTENCE, ELASTIC, TORCHRUN, "after\n") == SENTENCE * 2 + "after\n"
    # Nothing else is taken for torchrun's, and without a sentence it is all that there is.
    traceback = TOLD[TOLD.index("Traceback") : TOLD.index("some line")]
    assert shown(SENTENCE, traceback, TORCHRUN) == SENTENCE + traceback
    assert shown(SENTENCE, *OF_ITSELF, "after\n") == SENTENCE + "".join(OF_ITSELF) + "after\n"
    assert shown(ELASTIC, TORCHRUN) == ELASTIC + TORCHRUN
    assert shown(SENTENCE, *TORCHRUN.splitlines(keepends=True)[:4]).startswith(SENTENCE + "Traceback")
