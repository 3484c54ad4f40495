# SPDX-License-Identifier: Apache-2.0
"""Run a pretraining script under `python -m megatron_ext` with an instrument attached; started by torchrun.

The instrument is the same for every run of the quickstart. Without it, the command would be

    torchrun ... -m megatron_ext examples/pretrain_gpt.py <Megatron's options>
"""

import argparse
from pathlib import Path

from recorder import Recorder
from with_parent import end_with_parent

from megatron_ext.__main__ import main as run_patched


def main() -> None:
    """Attach the instrument, run the script, write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", required=True, type=Path, help="folder for one JSON file per rank")
    parser.add_argument("--workers", required=True, type=int, help="workers between which traffic is counted")
    parser.add_argument("--backend", required=True, help="as for python -m megatron_ext")
    parser.add_argument("script", help="the pretraining script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args()
    # torchrun ends its ranks in order unless it is killed itself.
    end_with_parent()
    recorder = Recorder(workers=options.workers)
    recorder.attach()
    run_patched(["--backend", options.backend, options.script, *options.arguments])
    recorder.write(options.record)


if __name__ == "__main__":
    main()
