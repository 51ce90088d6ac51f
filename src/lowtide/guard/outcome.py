"""What is told of a guarded run: a look at it, a process that has ended, the whole."""

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
        number: from 0.
        exit: exit code; negative: the signal.
        cause: why it ended.
        asked: why it was asked to stop; empty where it was not.
        seconds: from start to end.
        start_seconds: from its start to its first step or safe point; 0 where it told none.
        load_seconds: of putting the state back, within these.
        save_seconds: of all its checkpoints.
        waited_seconds: back-off before it.
        steps, points, saves: told by it.
        peak_bytes: highest of what counts against the cap.
        unique_bytes, resident_bytes, device_bytes: highest.
        growth_bytes_per_second: when it ended; None where it did not grow for certain.
        error: the error that ended it, where it was a Python program.
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
        """Start-up, load and save: what recycling costs. The first start is the script's own."""
        return self.waited_seconds + self.save_seconds + (self.start_seconds if self.number else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOutcome:
    """How the run went.

    Attributes:
        generations: its processes.
        exit_code: the guard's own.
        text: why it ended, in a sentence.
        cap_bytes: what it was held to.
        fence: by what: ``cgroup``, ``rlimit``, ``watch`` or ``none``.
        fraction: of the work that was done, by the script's own account; 0 where it did not say.
    """

    generations: tuple[Generation, ...]
    exit_code: int
    text: str
    cap_bytes: int
    fence: str
    fraction: float

    @property
    def seconds(self) -> float:
        """Of all generations and what was waited between them."""
        return sum(g.seconds + g.waited_seconds for g in self.generations)

    @property
    def overhead_seconds(self) -> float:
        """Of recycling."""
        return sum(g.overhead_seconds for g in self.generations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A look at the run.

    Attributes:
        generation: which process this is.
        seconds: since its start.
        reading: its memory.
        cap_bytes: what it may hold.
        growth: of its memory; None where it is too early.
        left_seconds: until the cap is reached; None where it does not grow for certain.
        beat: what it told; of the furthest of its processes.
        steps_per_second: since its first step; safe points where it marked no steps.
        asked: why it was asked to stop; empty where it was not.
        done: generations before it.
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
        """Forecast of the whole run, restarts included, where the script says how far it is."""
        if not self.beat.fraction:
            return None
        return (self.seconds + sum(g.seconds + g.waited_seconds for g in self.done)) / self.beat.fraction


class GuardListener(Protocol):
    """Told of what happens."""

    def looked(self, live: Live) -> None:
        """The guard looked at the process."""

    def said(self, text: str) -> None:
        """Something happened that people want to know."""

    def ended(self, generation: Generation) -> None:
        """A process has ended."""
