# SPDX-License-Identifier: Apache-2.0
"""Starting the scripts of examples/ as a user would, and reading what they start."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.support.distributed import REPOSITORY
from tests.support.processes import marked_processes
from tests.support.waiting import until

JOB_MARK = "MEGATRON_EXT_TEST_JOB"
"""In the environment of everything that a script starts: finds ranks, which have sessions of their own."""
RECORD_ARGUMENTS = """printf '%s\\n' "$@" >"$RECORDED_ARGUMENTS"; echo "${CUDA_DEVICE_MAX_CONNECTIONS:-unset}" """

TRAIN_UNTIL_TOLD = """exec python - <<'END'
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
print("training", flush=True)
signal.pause()
END
"""
"""A stand-in for torchrun: says that it trains, and that it was told to end."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running launch script. Leaving the context ends it, and the training that it started."""

    process: subprocess.Popen[bytes]
    output: Path
    job: str

    def finish(self, timeout: float = 280.0) -> tuple[int, str]:
        """Wait for the end; return the exit code and everything that was written."""
        return finish_together([self], timeout)[0]

    def end_alone(self) -> tuple[int, str]:
        """Wait until it trains, end the script and nothing else by SIGTERM, and wait for all that it has started.

        Returns:
            The exit code, negative for a signal, and everything that was written.
        """
        until(lambda: "training" in self.output.read_text() or self.process.poll() is not None, "training")
        self.process.terminate()
        code, _ = self.finish(30.0)
        until(lambda: not marked_processes(JOB_MARK, self.job), "the end of all that the script has started", 20.0)
        return code, self.output.read_text()

    def dump_stacks(self) -> None:
        """Let every Python process of the job write its threads' stacks to the output; it ends by that."""
        for found in marked_processes(JOB_MARK, self.job):
            if "python" in found.command.split(" ", 1)[0]:
                os.kill(found.pid, signal.SIGABRT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # torchrun's processes have sessions of their own: it ends them when it is asked to end.
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            finally:
                with suppress(ProcessLookupError):  # all have ended
                    os.killpg(self.process.pid, signal.SIGKILL)


def finish_together(scripts: Sequence[Started], timeout: float = 280.0) -> list[tuple[int, str]]:
    """Wait for the end of all scripts; return the exit code and the output of each.

    Raises:
        AssertionError: one was still running after `timeout` seconds; with every output and the stacks of all.
    """
    deadline = time.monotonic() + timeout
    while any(script.process.poll() is None for script in scripts):
        if time.monotonic() > deadline:
            codes = [script.process.poll() for script in scripts]
            for script in scripts:
                script.dump_stacks()
            time.sleep(2.0)
            outputs = "\n--- the next script ---\n".join(script.output.read_text()[-20_000:] for script in scripts)
            raise AssertionError(f"after {timeout:g} s the exit codes are {codes} (None: still running)\n{outputs}")
        time.sleep(0.05)
    return [(script.process.returncode, script.output.read_text()) for script in scripts]


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A folder to work in, with commands of its own that come first on the PATH."""

    folder: Path

    def command(self, name: str, body: str) -> None:
        """Put a shell script on the PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def start(self, script: Path, arguments: Sequence[str] = (), **environment: str) -> Started:
        """Start a launch script with the tests' Python on the PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        search_path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        job = uuid.uuid4().hex
        marked = {JOB_MARK: job, "PYTHONFAULTHANDLER": "1"}
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="output-")
        with open(descriptor, "w") as output:
            process = subprocess.Popen(
                [str(script), *arguments],
                cwd=self.folder,
                env={**kept, "PATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1", **marked, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Started(process=process, output=Path(name), job=job)

    def run(self, script: Path, arguments: Sequence[str] = (), **environment: str) -> tuple[int, str]:
        """Run a launch script; return its exit code and everything that it wrote."""
        with self.start(script, arguments, **environment) as started:
            return started.finish()

    def outputs(self) -> list[str]:
        """Return the first two arguments of every script: where checkpoints and TensorBoard files go."""
        return [str(self.folder / "checkpoints"), str(self.folder / "tensorboard")]


def split_at_script(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split torchrun's command line into its own options and the training script's arguments."""
    position = words.index(str(REPOSITORY / "examples/pretrain_gpt.py"))
    options = words[:position]
    return dict(zip(options[::2], options[1::2], strict=True)), words[position + 1 :]


def validated(arguments: list[str], world_size: int) -> Any:
    """Return a GPU run's command line, parsed and validated in a rank as the training script does it."""
    import torch
    from megatron.training import arguments as megatron_arguments

    from megatron_ext import patch_megatron

    if not torch.cuda.is_available():
        megatron_arguments.get_device_arch_version = lambda: 9
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *arguments]
    patch_megatron("cuda")
    return megatron_arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
