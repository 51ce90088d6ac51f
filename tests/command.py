"""Calling ``lowtide`` as a user does, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import lowtide
from patience import PATIENCE

PACKAGE = str(Path(lowtide.__file__).parent)
TIMEOUT = PATIENCE

Done = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    """The user's environment: nothing preloaded."""
    return {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LOWTIDE_TASK", "LOWTIDE_ACTIVE")}


def lowtide_in(folder: Path, *arguments: str, **variables: str) -> Done:
    """``lowtide`` with arguments, in a folder."""
    return call(folder, "-m", "lowtide", *arguments, **variables)


def call(folder: Path, *arguments: str, **variables: str) -> Done:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def script_in(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


def hears_interrupts() -> None:
    """Restore default signal handling: shells start background jobs ignoring SIGINT, nohup ignores SIGHUP, and children
    inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


