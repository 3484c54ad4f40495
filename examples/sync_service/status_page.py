# SPDX-License-Identifier: Apache-2.0
"""A sync server and four small peers on this machine, to look at the status page.

    python examples/sync_service/status_page.py                              # serves until Ctrl-C
    python examples/sync_service/status_page.py --screenshot page.png        # needs chromium; ends by itself

The peers train the same small model to tell the next character of Python's own source, each on its part of it. In two
rounds a peer's values are spoilt, so that the server rejects them, and one peer is evicted in the end. The whole takes
less than a minute.
"""

import argparse
import inspect
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

from megatron_ext.sync_service.channel.connection import ConnectionConfig
from megatron_ext.sync_service.peer.client import ClientConfig, Report, SyncClient, Values

PEERS = ("paris", "quito", "tokyo", "uppsala")
SPOILT = {("tokyo", 9), ("tokyo", 14)}
CONTEXT, WIDTH, STEPS, BATCH = 8, 128, 25, 64
SERVER, PAGE = "127.0.0.1:50061", "http://127.0.0.1:50062/"


def new_values(seed: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a network with one hidden layer, over ASCII."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    return {"embedding": draw(128, 16), "hidden": draw(WIDTH, 16 * CONTEXT), "head": draw(128, WIDTH)}


def trained(values: Values, text: torch.Tensor, draws: torch.Generator, pause: float) -> tuple[Values, float]:
    """Return the values after an interval of Adam's steps, and its mean loss."""
    model = {name: value.clone().requires_grad_() for name, value in values.items()}
    optimizer = torch.optim.Adam(model.values(), lr=2e-3)
    total = 0.0
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draws)
        seen = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])
        hidden = torch.relu(model["embedding"][seen].flatten(1) @ model["hidden"].T)
        loss = torch.nn.functional.cross_entropy(hidden @ model["head"].T, text[starts + CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        time.sleep(pause)
    return {name: value.detach() for name, value in model.items()}, total / STEPS


def run_peer(name: str, rounds: int) -> None:
    """Take part in that many rounds."""
    torch.set_num_threads(1)
    index = PEERS.index(name)
    draws = torch.Generator().manual_seed(index)
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, tempfile, shutil, subprocess))
    text = torch.tensor([min(ord(letter), 127) for letter in source])
    part = text[index * len(text) // len(PEERS) : (index + 1) * len(text) // len(PEERS)]
    config = ClientConfig(
        connection=ConnectionConfig(server=SERVER), run="characters", peer=name, index=index, agreed={"steps": "25"}
    )
    start = new_values(index)
    with SyncClient(config, start) as client:
        values: Values = client.start(start)
        while client.round < rounds:
            values, loss = trained(values, part, draws, pause=0.004 * (1 + index))
            if (name, client.round + 1) in SPOILT:
                values["hidden"].fill_(torch.nan)
            values = client.sync(values, Report(loss=loss, steps=STEPS)).values
        # Stays a member, like a job that is in the middle of its next interval.


def wait_for_page() -> None:
    """Return when the server answers."""
    for _ in range(300):
        try:
            urllib.request.urlopen(PAGE, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server has not started")


def take_screenshot(path: Path, width: int, height: int) -> None:
    """Save what Chromium shows."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("--screenshot needs chromium (Debian package chromium)")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--hide-scrollbars", f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        subprocess.run([chromium, *options, f"--screenshot={path}", PAGE], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="rounds to make (default: 16)")
    parser.add_argument("--screenshot", type=Path, help="file for a picture of the page (PNG)")
    parser.add_argument("--width", type=int, default=1280, help="of the picture, in pixels")
    parser.add_argument("--height", type=int, default=1320, help="of the picture, in pixels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = ["--run", "characters", "--peers", str(len(PEERS)), "--quorum", "3", "--grace-seconds", "20"]
        flags = ["--bind", SERVER, "--dir", folder, "--status-port", PAGE.rstrip("/").rpartition(":")[2], *run]
        command = [sys.executable, "-m", "megatron_ext.cli.main", "server"]
        server = subprocess.Popen([*command, "start", *flags, "--outer-optimizer", "sgd"], stderr=subprocess.DEVNULL)
        try:
            wait_for_page()
            print(f"the status page: {PAGE}", flush=True)
            context = multiprocessing.get_context("spawn")
            peers = [context.Process(target=run_peer, args=(name, args.rounds)) for name in PEERS]
            for peer in peers:
                peer.start()
            for peer in peers:
                peer.join()
            reason = "its node is needed for something else"
            subprocess.run([*command, "evict", PEERS[1], "--reason", reason, "--server", SERVER], check=True)
            if args.screenshot is not None:
                take_screenshot(args.screenshot, args.width, args.height)
            else:
                server.wait()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
