# SPDX-License-Identifier: Apache-2.0
"""Train a mixture of experts with a sync server and four SPES peers; examples/spes/quickstart.sh starts it."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))  # the other quickstart's stages
sys.path.insert(0, str(ROOT / "examples" / "spes" / "lib"))

from entry import claim, exit_status  # noqa: E402  # found through the path above
from jobs import Job  # noqa: E402  # likewise
from plan import DEFAULT_ITERATIONS, VICTIM, Plan, Schedule, environment  # noqa: E402  # likewise
from results import Peer, Rounds, plot, summarize, table  # noqa: E402  # likewise
from stages import StageError, run_stage  # noqa: E402  # likewise

MARKER = ".megatron-ext-spes-quickstart"
"""In the output folder: says that it is ours, so that old results in it may be removed."""

START_SECONDS = 120.0
DOWN_SECONDS = 2.0
"""How long the server stays away."""
POLL_SECONDS = 0.05
TOLD_ITERATIONS = 50


def main() -> int:
    """Run the quickstart; return 1 when something failed, 2 for bad options, 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--iterations", type=int, default=DEFAULT_ITERATIONS)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "spes" / "quickstart")
    options = parser.parse_args()
    return exit_status(lambda: run(plan_from(options)))


def plan_from(options: argparse.Namespace) -> Plan:
    """Check the options.

    Raises:
        ValueError: one cannot be used.
    """
    output = options.output.resolve()
    schedule = Schedule(iterations=options.iterations)
    claim(output, MARKER)
    return Plan(output=output, schedule=schedule)


def run(plan: Plan) -> int:
    """Prepare, train, and write the results."""
    start = time.monotonic()
    remove_old_results(plan.output)
    print("The corpus: the source code of Python's standard library, one token per byte", flush=True)
    run_stage(plan.prepare_data(), plan.log("corpus"))
    began = time.monotonic()
    with Story.begin(plan) as story:
        story.play()
    rounds = Rounds.read(plan.journal)
    summary = {
        **summarize(story.peers, rounds, plan.ownership, plan.schedule.interval),
        "events": story.events,
        "weights_digests": digests(plan),
        "settings": {"iterations": plan.schedule.iterations, "interval": plan.schedule.interval},
        "commands": {"server": plan.server(story.address), "peer": plan.peer(0, story.address)},
        "seconds": {"corpus": began - start, "training": time.monotonic() - began},
    }
    (plan.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot(summary, story.events, plan.output / "quickstart.png")
    print(f"\nResults after {time.monotonic() - start:.0f} s\n\n{table(summary)}\n")
    for event in story.events:
        print(event["text"])
    print(f"\nlogs, summary.json, quickstart.png and the server's journal are in {plan.output}; see docs/spes.md\n")
    return refuse(summary)


def remove_old_results(output: Path) -> None:
    """Remove what an earlier quickstart wrote, except the corpus."""
    for name in ("server", "checkpoints", "records", "index-cache"):
        shutil.rmtree(output / name, ignore_errors=True)
    for file in (*output.glob("*.log"), output / "summary.json", output / "quickstart.png"):
        file.unlink(missing_ok=True)


def digests(plan: Plan) -> list[str]:
    """Return the SHA-256 of every peer's weights at the end, as the instrument in it has seen them."""
    files = [plan.records(peer) / "rank0.json" for peer in range(plan.peers)]
    return [json.loads(file.read_text(encoding="utf-8"))["weights_digest"] for file in files]


def refuse(summary: dict[str, Any]) -> int:
    """Say whether all peers ended with the same bits; return 1 if they did not."""
    found = summary["weights_digests"]
    if len(set(found)) > 1:
        print(f"quickstart: error: the peers ended with different weights: {', '.join(found)}", file=sys.stderr)
        return 1
    print(f"All {len(found)} peers ended with the same bits: SHA-256 {found[0]}")
    return 0


@dataclass(kw_only=True)
class Story:
    """The server, the peers, and what happens to them."""

    plan: Plan
    server: Job
    jobs: list[Job]
    """Of the peers."""
    peers: list[Peer]
    """What their logs tell."""
    address: str = ""
    """Of the server."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened: `iteration`, `what` in two words, `text` in sentences."""

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan) -> Iterator["Story"]:
        """Prepare, and leave no process at the end of the block."""
        names = [f"node{peer}" for peer in range(plan.peers)]
        story = cls(
            plan=plan,
            server=Job("the server", plan.log("server")),
            jobs=[Job(f"peer {name}", plan.log(name), environment()) for name in names],
            peers=[Peer(name=name) for name in names],
        )
        try:
            yield story
        finally:
            for job in (*story.jobs, story.server):
                job.stop()

    def play(self) -> None:
        """Train to the end; a peer and the server are killed during the run.

        Raises:
            StageError: a process failed without being killed.
        """
        plan, schedule = self.plan, self.plan.schedule
        self._start_server("127.0.0.1:0")
        print(
            f"A server at {self.address} and {plan.peers} peers: {schedule.iterations} iterations, a round every "
            f"{schedule.interval}",
            flush=True,
        )
        for peer, job in enumerate(self.jobs):
            job.start(plan.peer(peer, self.address))
        while self.peers[VICTIM].iteration < schedule.kill:
            self._look()
        self._kill_peer()
        while not Rounds.read(plan.journal).uploaded(schedule.server_round):
            self._look()
        self._kill_server()
        while any(job.runs for job in self.jobs):
            self._look()
        self._look()
        self._tell_of_the_server()

    def _start_server(self, address: str) -> None:
        self.server.start(self.plan.server(address))
        end = time.monotonic() + START_SECONDS
        while True:
            self.server.check()
            for line in self.server.lines():
                if "listening at " in line:
                    self.address = line.split("listening at ")[1].split(",")[0].strip()
                    return
            if time.monotonic() > end:
                raise StageError(f"the server has not started within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        """Read what the logs say, and see that all is well; takes a moment."""
        before = min(peer.iteration for peer in self.peers)
        for peer, job in zip(self.peers, self.jobs, strict=True):
            for line in job.lines():
                peer.read_line(line)
        now = min(peer.iteration for peer in self.peers)
        if now // TOLD_ITERATIONS > before // TOLD_ITERATIONS:
            losses = "  ".join(f"{peer.name} {peer.losses[now]:.3f}" for peer in self.peers)
            print(f"    iteration {now:>4}/{self.plan.schedule.iterations}   training losses: {losses}", flush=True)
        for job in (self.server, *self.jobs):
            job.check()
        time.sleep(POLL_SECONDS)

    def _kill_peer(self) -> None:
        job, peer, schedule = self.jobs[VICTIM], self.peers[VICTIM], self.plan.schedule
        job.kill()
        for line in job.lines():
            peer.read_line(line)
        reached = peer.iteration
        if reached // schedule.interval != schedule.checkpoint // schedule.interval:
            raise StageError(f"{peer.name} was killed too late, after iteration {reached}; the machine was too busy")
        print(f"    {peer.name} is killed after iteration {reached} and started again with --load", flush=True)
        began = time.monotonic()
        job.start(self.plan.peer(VICTIM, self.address, resume=True))
        while peer.iteration == reached:
            self._look()
        self.events.append(
            {
                "iteration": reached,
                "what": f"{peer.name} killed",
                "text": f"{peer.name} was killed after iteration {reached} and resumed from its checkpoint of "
                f"iteration {schedule.checkpoint},\n    in the middle of an interval. It did {len(peer.repeated)} "
                f"iterations twice, and was past them {time.monotonic() - began:.0f} s later.",
            }
        )

    def _kill_server(self) -> None:
        number = self.plan.schedule.server_round
        self.server.kill()
        there = Rounds.read(self.plan.journal).uploaded(number)
        iteration = number * self.plan.schedule.interval
        print(f"    the server is killed in round {number} (iteration {iteration}), and started again", flush=True)
        began = time.monotonic()
        time.sleep(DOWN_SECONDS)
        self._start_server(self.address)
        self.events.append(
            {
                "iteration": iteration,
                "what": "server killed",
                "round": number,
                "text": f"The server was killed in round {number}, when it had the contributions of "
                f"{', '.join(there)}; it was back after {time.monotonic() - began:.0f} s.",
            }
        )

    def _tell_of_the_server(self) -> None:
        """Say what the journal knows of the round in which the server died."""
        event = self.events[-1]
        rounds = Rounds.read(self.plan.journal)
        number = event["round"]
        counted = len(rounds.committed[number]["contributors"])
        event["text"] += f"\n    {counted} peers counted in that round."
        usual = median(up for peer in self.peers for up, _ in peer.traffic.values())
        again = [peer for peer in self.peers if peer.traffic[number][0] > usual]
        if again:
            names, most = ", ".join(peer.name for peer in again), max(peer.traffic[number][0] for peer in again)
            event["text"] += f" {names} had to upload again:\n    {most:.2f} MB in place of {usual:.2f}."


if __name__ == "__main__":
    sys.exit(main())
