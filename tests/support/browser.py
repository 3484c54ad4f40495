# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, where the machine has one."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="looks at a page in Chromium, which is not on this machine (Debian package chromium)"
)


def rendered(address: str, profile: Path, *, milliseconds: int = 1000) -> str:
    """Return what Chromium has made of a page after so long a time of its own, as HTML."""
    return _chromium(address, profile, "--dump-dom", f"--virtual-time-budget={milliseconds}")


def _chromium(address: str, profile: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        *options,
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
