"""Reports on a guarded run: a live snapshot, a process that has ended, the outcome of the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowtide.guard.cause import Cause
from lowtide.guard.forecast import Growth
from lowtide.guard.memory import Reading
from lowtide.probe.beat import Beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One process of the run.

    Attributes:
        number: its number, from 0.
        exit: exit code, negative for a signal.
        cause: why it ended.
        asked: why it was asked to stop; empty if it was not.
        seconds: time from start to end.
        start_seconds: time from its start to its first step or safe point; 0 if it reported none.
        load_seconds: the part of ``start_seconds`` that restored the state.
        save_seconds: time that all its checkpoints took.
        waited_seconds: back-off before its start.
        steps, points, saves: number of steps, safe points and checkpoints that it reported.
        peak_bytes: highest memory that counted against the cap.
        unique_bytes, resident_bytes, device_bytes: highest reading of each.
        growth_bytes_per_second: growth of its memory when it ended; None if growth was not certain.
        error: the Python error that ended it, or ``rank N`` if that rank was lost; None if neither was reported.
    """

    number: int
    exit: int
    cause: Cause
    asked: str
    seconds: float
    start_seconds: float
    load_seconds: float
    save_seconds: float
    waited_seconds: float
    steps: int
    points: int
    saves: int
    peak_bytes: int
    unique_bytes: int
    resident_bytes: int
    device_bytes: int
    growth_bytes_per_second: float | None
    error: str | None

    @property
    def overhead_seconds(self) -> float:
        """Cost of recycling: back-off, saves, and start-up including the load. The first start-up is the script's own."""
        return self.waited_seconds + self.save_seconds + (self.start_seconds if self.number else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOutcome:
    """Outcome of the whole run.

    Attributes:
        generations: its processes, in order.
        exit_code: the guard's own exit code.
        text: why the run ended, in a sentence.
        cap_bytes: the memory cap.
        fence: how the cap was enforced: ``cgroup``, ``rlimit``, ``watch`` or ``none``.
        fraction: share of the work that was done, by the script's own account; 0 if it reported none.
    """

    generations: tuple[Generation, ...]
    exit_code: int
    text: str
    cap_bytes: int
    fence: str
    fraction: float

    @property
    def seconds(self) -> float:
        """Time of all generations and of the waits between them."""
        return sum(g.seconds + g.waited_seconds for g in self.generations)

    @property
    def overhead_seconds(self) -> float:
        """Cost of recycling over all generations."""
        return sum(g.overhead_seconds for g in self.generations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A snapshot of the run.

    Attributes:
        generation: number of the current generation, from 0.
        seconds: time since its start.
        reading: its memory.
        cap_bytes: memory that it may hold.
        growth: growth of its memory; None if it is too early to tell.
        left_seconds: time until the cap is reached; None if growth is not certain.
        beat: the report of its process that is furthest ahead.
        steps_per_second: rate since its first step; counts safe points if it marked no steps.
        asked: why it was asked to stop; empty if it was not.
        done: the generations before it.
    """

    generation: int
    seconds: float
    reading: Reading
    cap_bytes: int
    growth: Growth | None
    left_seconds: float | None
    beat: Beat
    steps_per_second: float
    asked: str
    done: tuple[Generation, ...]

    @property
    def whole_seconds(self) -> float | None:
        """Forecast of the whole run's time, restarts included; None if the script does not report its progress."""
        if not self.beat.fraction:
            return None
        return (self.seconds + sum(g.seconds + g.waited_seconds for g in self.done)) / self.beat.fraction


class GuardListener(Protocol):
    """Receives the events of a guarded run."""

    def looked(self, live: Live) -> None:
        """The guard has taken a reading."""

    def said(self, text: str) -> None:
        """Something happened that users want to know, described in ``text``."""

    def ended(self, generation: Generation) -> None:
        """A process has ended."""
