"""Why a guarded process ended, as far as its exit, the kernel's counters and the guard's own actions prove."""

from __future__ import annotations

import enum
import re
import signal
from dataclasses import dataclass

from lowtide.probe.beat import STOPPED


class Cause(enum.Enum):
    """Why a process ended."""

    FINISHED = "finished"
    RECYCLED = "recycled"
    STOPPED = "stopped"
    OOM_KILLER = "out-of-memory killer"
    CAP = "over the cap"
    MEMORY_ERROR = "out-of-memory error"
    PATIENCE = "did not stop in time"
    OUTSIDE = "killed from outside"
    RANK = "a rank was killed"
    CRASH = "crash"
    ERROR = "error"
    UNKNOWN = "unknown"

    @property
    def of_memory(self) -> bool:
        """Whether a fresh process may help."""
        return self in {Cause.RECYCLED, Cause.OOM_KILLER, Cause.CAP, Cause.MEMORY_ERROR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
        code: exit code, negative for a signal.
        ours: the cause, if the guard itself killed it.
        passed_on: signal that a person sent to the guard, which passed it on; 0 for none.
        kills_within: number of processes that the kernel killed in its cgroup meanwhile; None if there is no counter.
        kills_machine: number of processes that the kernel killed on the whole machine meanwhile; None if it does not tell.
        named: whether the kernel's log names one of its processes as killed; None if the log cannot be read.
        saved: whether it reported that it has saved its state and stops.
        memory_error: whether an uncaught out-of-memory error ended it.
        error: the Python error that ended it; empty if none was reported.
        counted_alone: whether `kills_within` counts only its own processes.
        at_cap: whether the kernel found it at the guard's limit and could not make room.
        rank_lost: rank that ended without a report; -1 for none.
    """

    code: int
    ours: Cause | None = None
    passed_on: int = 0
    kills_within: int | None = None
    kills_machine: int | None = None
    named: bool | None = None
    saved: bool = False
    memory_error: bool = False
    error: str = ""
    counted_alone: bool = True
    at_cap: bool = False
    rank_lost: int = -1


_PERSONS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_BUGS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}


def why(ending: Ending) -> Cause:
    """The cause of an ending.

    The kernel does not say who sent SIGKILL. If an out-of-memory counter rose for this process, the out-of-memory killer did.
    If the counters were read and did not rise, someone outside did. Without counters the cause is unknown. The machine-wide
    counter does not say which process was killed, so if it alone rose, the cause is unknown too.
    """
    if ending.ours is not None:
        return ending.ours
    number = -ending.code if ending.code < 0 else ending.code - 128 if 128 < ending.code < 160 else 0
    if ending.code == 0:
        return Cause.FINISHED
    if ending.code == STOPPED and ending.saved:
        return Cause.STOPPED if ending.passed_on else Cause.RECYCLED
    if ending.passed_on:
        return Cause.STOPPED
    if _killed(ending, by=number):
        return Cause.CAP if ending.at_cap else Cause.OOM_KILLER
    if ending.memory_error:
        return Cause.MEMORY_ERROR
    if ending.rank_lost >= 0:
        return Cause.RANK
    if number == signal.SIGKILL:
        return _unsigned(ending)
    if number in _PERSONS:
        return Cause.OUTSIDE
    if number in _BUGS:
        return Cause.CRASH
    return Cause.ERROR


_WORKER_LOST = re.compile(r"[Ww]orker|[Pp]rocess pool|[Cc]hild|[Kk]illed|[Ss]ignal|[Bb]roken ?[Pp]ipe|EOFError|[Cc]onnection")
"""Matches errors of a program that has lost one of its processes."""


def _killed(ending: Ending, *, by: int) -> bool:
    """Whether the out-of-memory killer killed it, or killed one of its processes so that it failed."""
    if by == signal.SIGKILL:
        return bool(ending.kills_within) or bool(ending.named)
    counted = (bool(ending.kills_within) and ending.counted_alone) or bool(ending.named)
    return counted and (not ending.error or _WORKER_LOST.search(ending.error) is not None)


def _unsigned(ending: Ending) -> Cause:
    if ending.kills_machine == 0 or ending.named is False:
        return Cause.OUTSIDE
    return Cause.UNKNOWN
