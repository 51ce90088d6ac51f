"""The speed of the machine decides how long a test takes, and not its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Answer = TypeVar("Answer")
PATIENCE = 900
"""Time limit in seconds for anything that takes a few on an idle machine."""


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def in_time(ask: Callable[[float], Answer], holds: Callable[[Answer], object], *, first: float) -> Answer:
    """The first answer that holds, asked with twice the time limit each time; the last one if none does."""
    seconds = first
    while not holds(answer := ask(seconds)) and seconds < PATIENCE / 4:
        seconds *= 2
    return answer
