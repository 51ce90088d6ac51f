"""Checks, starts and ends the processes of commands. Standard library only."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from lowtide.base.errors import UsageError

_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason; call it in the child before the exec.

    See ``PR_SET_PDEATHSIG`` in ``man 2 prctl``. Does nothing on systems other than Linux.
    """
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_command(command: Sequence[str]) -> None:
    """Check that a command exists.

    Raises:
        UsageError: if it does not, or if none is given.
    """
    if not command:
        raise UsageError("no command was given: write it after `--`, as in `lowtide leak -- python train.py`")
    if shutil.which(command[0]) is None:
        raise UsageError(f"no such command: {command[0]}")


def python(script: str, *, module: bool, arguments: Sequence[str]) -> list[str]:
    """The command that runs a script with this interpreter and its options."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # the interpreter's own -X, -W, -O
    return [sys.executable, *flags, *(["-m"] if module else []), script, *arguments]


def end_on_sigterm() -> None:
    """Make SIGTERM end this process as an error would: its ``with`` blocks are left, which ends what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
