"""Runs one command, restarted in fresh processes, until it has finished or a restart cannot help."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, final

from lowtide.base.errors import UsageError
from lowtide.guard.cause import Cause, Ending, why
from lowtide.guard.fence import (
    DataLimit,
    Fence,
    Watching,
    cgroup,
    machine_kills,
    named_by_kernel,
    room,
)
from lowtide.guard.forecast import Forecast, Growth
from lowtide.guard.memory import Reading
from lowtide.guard.outcome import Generation, GuardListener, GuardOutcome, Live
from lowtide.guard.process import LEAVE_SECONDS, Guarded, adopting
from lowtide.guard.rule import RecycleWhen, Rule
from lowtide.probe.beat import STOPPED, Beat

LOOK_SECONDS: Final = 0.1
"""Interval between two readings of the memory."""
SPARE_SECONDS: Final = 1.0
"""A stop is requested this long before the forecast says that it is needed."""
BACK_OFF_SECONDS: Final = (1.0, 60.0)
"""Wait before a restart after a failure: the first, and the longest; doubled with each failure in between."""
Enforce = Literal["auto", "cgroup", "rlimit", "watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """Settings of the guard.

    Attributes:
        command: the program and its arguments.
        cap_bytes: memory that the process tree may hold; None: all that the machine has, and nothing is killed.
        rule: when the process is recycled.
        enforce: how the cap is enforced.
        patience_seconds: time the process gets to stop when a person requests it, before it is ended.
        restarts: how many times in a row it is restarted after running out of memory without a new checkpoint.
        done_file: file whose presence says that all work is done (`RecycleWhen.EXIT`).
        done_code: exit code that says so (`RecycleWhen.EXIT`).
    """

    command: Sequence[str]
    cap_bytes: int | None = None
    rule: Rule = field(default_factory=Rule)
    enforce: Enforce = "auto"
    patience_seconds: float = 60.0
    restarts: int = 3
    done_file: Path | None = None
    done_code: int | None = None


def fence_of(settings: GuardSettings, generation: int) -> Fence:
    """The fence that holds a generation to the cap.

    Raises:
        UsageError: if a cgroup is required, but this machine does not let us make one.
    """
    if settings.cap_bytes is None:
        return Watching()
    if settings.enforce == "rlimit":
        return DataLimit(settings.cap_bytes)
    if settings.enforce in {"auto", "cgroup"}:
        found = cgroup(settings.cap_bytes, f"lowtide-{os.getpid()}-{generation}")
        if found is not None:
            return found
        if settings.enforce == "cgroup":
            raise UsageError("--enforce cgroup: cannot create a cgroup on this machine; use --enforce watch or rlimit")
    return Watching()


@final
class RunKeeper:
    """Runs a command until it has finished or a restart cannot help."""

    def __init__(self, settings: GuardSettings, listeners: Sequence[GuardListener] = ()) -> None:
        """Start nothing yet."""
        self._settings, self._listeners = settings, list(listeners)
        self._cap = settings.cap_bytes or room()
        self._done: list[Generation] = []
        self._signals: list[int] = []
        self._fraction = 0.0
        self._kind = "none"

    def run(self) -> GuardOutcome:
        """Run the command, with as many restarts as it takes.

        Raises:
            UsageError: if the cap cannot be enforced as asked.
        """
        if self._settings.done_file is not None and self._settings.done_file.exists():
            return self._outcome(0, f"already done: {self._settings.done_file} exists")
        with adopting(), self._listening():
            failures, idle = 0, 0
            while True:
                wait = 0.0 if not failures else min(BACK_OFF_SECONDS[0] * 2 ** (failures - 1), BACK_OFF_SECONDS[1])
                if wait:
                    self._say(f"restarting in {wait:.0f} s")
                    self._sleep(wait)
                    if self._signals:
                        return self._outcome(128 + self._signals[0], "stopped between two processes")
                found = self._generation(wait)
                self._done.append(found)
                self._tell("ended", found)
                verdict = self._after(found)
                if verdict is None and self._signals:
                    verdict = (128 + self._signals[0], "stopped")
                if verdict is not None:
                    return self._outcome(*verdict)
                failed = found.cause.of_memory and found.cause is not Cause.RECYCLED
                failures = 0 if not failed else 1 if found.saves else failures + 1
                idle = idle + 1 if found.cause is Cause.RECYCLED and found.asked and found.points == 1 else 0
                if failures > self._settings.restarts:
                    told = f"{found.cause.value}, {failures} times in a row without a new checkpoint: {_remedy(found)}"
                    return self._outcome(1, told)
                if idle > self._settings.restarts:
                    return self._outcome(1, "a fresh process is near the cap at its first safe point: raise --memory")

    def _after(self, found: Generation) -> tuple[int, str] | None:
        """The exit code and the reason if the run is over; None if it continues."""
        s = self._settings
        if s.rule.kind is RecycleWhen.EXIT:
            if _shell(found.exit) == s.done_code or (s.done_file is not None and s.done_file.exists()):
                return 0, "all done"
            if not found.exit or found.exit == STOPPED:
                return None
        if found.cause is Cause.FINISHED:
            return 0, "finished"
        if found.cause in {Cause.STOPPED, Cause.PATIENCE}:
            before = self._done[-2].cause if len(self._done) > 1 else None
            saved = found.cause is Cause.STOPPED and found.exit == STOPPED and found.saves
            if saved or (not found.points and before is Cause.RECYCLED):  # nothing was done since the last save
                return STOPPED, "saved and stopped"
            return 128 + self._signals[0], found.cause.value
        if s.rule.kind is RecycleWhen.NEVER or not found.cause.of_memory:
            return _shell(found.exit), found.cause.value + (f": {found.error}" if found.error else "")
        return None

    def _outcome(self, code: int, text: str) -> GuardOutcome:
        return GuardOutcome(
            generations=tuple(self._done), exit_code=code, text=text, cap_bytes=self._cap, fence=self._kind,
            fraction=self._fraction,
        )  # fmt: skip

    # --- one process --------------------------------------------------------------------------------------------------

    def _generation(self, waited: float) -> Generation:
        number = len(self._done)
        fence = fence_of(self._settings, number)
        self._kind = "none" if self._settings.cap_bytes is None else fence.kind
        kills, machine = fence.kills(), machine_kills()
        try:
            with Guarded(
                self._settings.command, generation=number, rule=self._settings.rule.text, fence=fence,
                patience_seconds=self._settings.patience_seconds,
            ) as process:  # fmt: skip
                watched = _Watched(process, fence, self._cap)
                code = self._watch(watched)
                beats = process.beats()
                self._fraction = max([self._fraction, *(b.fraction for b in beats.values())])
                errors = process.errors(beats)
                stopped = any(b.stopped for b in beats.values())  # launchers, pipes and shells return their own exit codes
                ending = Ending(
                    code=STOPPED if stopped else code,
                    saved=stopped,
                    ours=watched.ours,
                    passed_on=self._signals[0] if self._signals else 0,
                    kills_within=_risen(fence.kills(), kills),
                    at_cap=fence.reached(),
                    kills_machine=_risen(machine_kills(), machine),
                    named=named_by_kernel(watched.pids, process.began) if code else None,
                    memory_error=any(e["memory"] for e in errors),
                    error=errors[0]["error"] if errors else "",
                    counted_alone=fence.alone,
                    rank_lost=process.rank_lost(beats) if code else -1,
                )
                return watched.generation(number, ending, waited, beats, errors)
        finally:
            fence.remove()

    def _watch(self, watched: _Watched) -> int:
        """Watch the process until it ends; returns its exit code."""
        asked_at = 0.0
        handled = 0
        while (code := watched.process.poll()) is None:
            watched.look()
            live = watched.live(tuple(self._done))
            self._tell("looked", live)
            if not watched.asked and self._settings.rule.kind is not RecycleWhen.NEVER:
                reason = watched.reason(live, self._settings.rule.watermark)
                if reason and watched.process.ask():
                    watched.asked = reason
                    self._say(f"asked to stop at its next safe point: {reason}")
            if self._settings.cap_bytes is not None and watched.crossed():
                self._say("over the cap: killed")
            if len(self._signals) > handled:
                self._passed(watched, self._signals[handled], times=handled + 1)
                asked_at = asked_at or time.monotonic()
                handled += 1
            elif asked_at:
                watched.hurry(time.monotonic() - asked_at, self._settings.patience_seconds)
            self._sleep(LOOK_SECONDS)
        return code

    def _passed(self, watched: _Watched, number: int, *, times: int) -> None:
        """Handle a signal from a person.

        The first requests a save and a stop, or is passed on if no process listens; the second sends SIGTERM; the third kills.
        """
        name = signal.Signals(number).name
        if times > 2:
            watched.ours = Cause.PATIENCE
            self._say(f"{name} a third time: killed")
            watched.process.kill()
        elif times > 1:
            watched.process.pass_on(signal.SIGTERM)
            self._say(f"{name} again: sent SIGTERM (a third signal kills it)")
        elif watched.process.ask():
            watched.asked = watched.asked or name
            self._say(f"{name}: it saves and stops at its next safe point (a second signal sends SIGTERM)")
        else:
            watched.process.pass_on(number)
            self._say(f"{name} forwarded")

    # --- signals ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        heard = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        numbers = [n for n in heard if signal.getsignal(n) is not signal.SIG_IGN]  # a signal that nohup ignores stays ignored
        before = [signal.signal(number, self._signalled) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def _sleep(self, seconds: float) -> None:
        """Sleep; a signal ends it early."""
        end, had = time.monotonic() + seconds, len(self._signals)
        while (left := end - time.monotonic()) > 0 and len(self._signals) == had:
            time.sleep(min(left, LOOK_SECONDS))

    def _say(self, text: str) -> None:
        self._tell("said", text)

    def _tell(self, what: str, value: Any) -> None:
        """Notify all listeners. One that fails (a closed terminal, a full disk) is removed, and the run continues."""
        for listener in list(self._listeners):
            try:
                getattr(listener, what)(value)
            except Exception as error:
                self._listeners.remove(listener)
                self._say(f"{type(listener).__name__.lower()} failed and is dropped: {type(error).__name__}: {error}")


@final
class _Watched:
    """One process while it is watched: its readings, peaks and forecast."""

    def __init__(self, process: Guarded, fence: Fence, cap: int) -> None:
        self.process, self._fence, self._cap = process, fence, cap
        self._forecast = Forecast()
        self._growth: Growth | None = None
        self._reading = Reading(process.began, 0, 0, 0, 0, 0, 0.0)
        self._peaks = [0, 0, 0, 0]
        self.pids: set[int] = set()
        self._beat = Beat()
        self.asked = ""
        self.ours: Cause | None = None
        self._hurried = False

    def look(self) -> None:
        """Read its memory and its reports, and update the forecast."""
        r = self._reading = self.process.tree.read(self._fence)
        sizes = (r.bytes, r.unique_bytes, r.resident_bytes, r.device_bytes)
        self._peaks = [max(a, b) for a, b in zip(self._peaks, sizes, strict=True)]
        beats = self.process.beats()
        self.pids.update(self.process.tree.found)
        self.process.rank_lost(beats)
        self._beat = _furthest(beats)
        began = self._beat.first_point or self._beat.first_step  # memory before that is start-up
        if began or not beats:
            self._forecast.add(r.seconds, r.bytes)
        self._growth = self._forecast.growth()

    def live(self, done: tuple[Generation, ...]) -> Live:
        """A snapshot of the last readings."""
        b, now = self._beat, self._reading.seconds
        marks = (b.steps, b.first_step, b.last_step) if b.steps else (b.points, b.first_point, b.last_point)
        rate = (marks[0] - 1) / (marks[2] - marks[1]) if marks[2] > marks[1] else 0.0
        return Live(
            generation=len(done),
            seconds=now - self.process.began,
            reading=self._reading,
            cap_bytes=self._cap,
            growth=self._growth,
            left_seconds=None if self._growth is None else self._growth.seconds_to(self._cap),
            beat=b,
            steps_per_second=rate,
            asked=self.asked,
            done=done,
        )

    def reason(self, live: Live, watermark: float) -> str:
        """Why it should stop at its next safe point; empty if it need not."""
        if live.reading.bytes >= watermark * self._cap and self._exactly() >= watermark * self._cap:
            return f"memory is at {live.reading.bytes / self._cap:.0%} of the cap"
        needed = SPARE_SECONDS + 2 * (self._beat.longest_gap + self._beat.longest_save)
        if live.left_seconds is not None and self._beat.points > 1 and live.left_seconds <= needed:
            return f"the cap will be reached in {live.left_seconds:.1f} s"
        return ""

    def _exactly(self) -> int:
        """Bytes that count against the cap, measured by walking every page."""
        return self.process.tree.read(self._fence, exactly=True).bytes

    def crossed(self) -> bool:
        """Kill it if it exceeds a cap that only the guard enforces; returns whether it did."""
        if self._fence.kind != "watch" or self._reading.bytes <= self._cap or self.ours is not None:
            return False
        if self._exactly() <= self._cap:
            return False
        self.ours = Cause.CAP
        self.process.kill()
        return True

    def hurry(self, seconds: float, patience: float) -> None:
        """End it if it takes longer than ``patience`` to stop for a person: SIGTERM first, SIGKILL `LEAVE_SECONDS` later."""
        if seconds > patience + LEAVE_SECONDS:
            self.ours = Cause.PATIENCE
            self.process.kill()
        elif seconds > patience and not self._hurried:
            self._hurried = True
            self.process.pass_on(signal.SIGTERM)

    def generation(
        self, number: int, ending: Ending, waited: float, beats: dict[int, Beat], errors: list[dict[str, Any]]
    ) -> Generation:
        """The record of this process, once it has ended."""
        told = _furthest(beats)
        now = time.monotonic()
        firsts = [t for t in (told.first_step, told.first_point) if t]
        return Generation(
            number=number,
            exit=ending.code,
            cause=why(ending),
            asked=self.asked,
            seconds=now - self.process.began,
            start_seconds=min(firsts) - self.process.began if firsts else 0.0,
            load_seconds=told.load_seconds,
            save_seconds=told.save_seconds,
            waited_seconds=waited,
            steps=int(told.steps),
            points=int(told.points),
            saves=int(told.saves),
            peak_bytes=self._peaks[0],
            unique_bytes=self._peaks[1],
            resident_bytes=self._peaks[2],
            device_bytes=self._peaks[3],
            growth_bytes_per_second=None if self._growth is None or self._growth.low <= 0 else self._growth.rate,
            error=f"rank {ending.rank_lost}" if ending.rank_lost >= 0 else errors[0]["error"] if errors else None,
        )


def _furthest(beats: dict[int, Beat]) -> Beat:
    return max(beats.values(), key=lambda b: (b.points, b.steps), default=Beat())


def _risen(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _remedy(found: Generation) -> str:
    """Advice for a failure that a fresh process did not fix."""
    if not (found.steps or found.points):
        return "it needs more than the cap to start: raise --memory"
    return "raise --memory, or save more often"


def _shell(code: int) -> int:
    """An exit code as a shell reports it: 128 + N for signal N."""
    return code if code >= 0 else 128 - code
