"""Where the budget's bytes come from: a size, a device's free memory, or a recorded step and the plans for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from lowtide.base.messages import tell
from lowtide.base.units import Auto, BudgetShare, FromStep, Minimum, Rescue, Size, Slowdown, format_bytes
from lowtide.planning.unit.solve import Front
from lowtide.runtime.budget import SLACK_BYTES, Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.device import accelerator
from lowtide.runtime.device.available_memory import available_bytes, return_freed_memory, return_freed_memory_for_now
from lowtide.runtime.run_figures import StepFigures
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.recorded_unit import TOLERANCE_SHARE, RecordedUnit
from lowtide.runtime.units.unit import Unit

AUTO_MARGIN: Final = 0.05
"""Share of an accelerator's free memory that ``auto`` leaves unused, for fragmentation."""
MINIMUM_MARGIN: Final = 0.02
"""A budget of the minimum is the lowest peak that plans reach, and this share of it more: steps differ a little."""
LOOKS_SECONDS: Final = 0.5
"""Without a budget, how often the memory there is looked at; a look takes some tenths of a millisecond."""
FALLS: Final = 0.02
"""A budget that follows from plans is lowered only if it falls by more than this share: every budget needs its own plan."""
RECENT: Final = 4
"""A recording whose unit was not met in so many steps does not count for a slowdown: the first one is often not met again."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """The plan that the user asked for, of one recording.

    Attributes:
        front: the plans that it was chosen from.
        peak_bytes: its peak on the recording's base.
        shifted_bytes: the same where the latest such unit began.
        step: the step of that unit.
    """

    front: Front
    peak_bytes: int
    shifted_bytes: int
    step: int


@final
class BudgetSource:
    """Sets the budget's bytes as soon as they are known."""

    def __init__(self, asked: Size | None, budget: Budget, interception: Interception, knowledge: Knowledge) -> None:
        """Set nothing yet."""
        self._asked, self._budget, self._interception, self._knowledge = asked, budget, interception, knowledge
        self._peak_bytes = self._available_bytes = self._crossed_bytes = 0
        self._planned: dict[RecordedUnit, _Planned] = {}
        self._raised_step = self._told_bytes = 0
        self._guessed = False
        budget.is_sought = isinstance(asked, Minimum | Slowdown)
        self._returns = False
        self._room_bytes = 0
        self._looked_seconds = 0.0

    @property
    def only_rescues(self) -> bool:
        """Whether there is no budget: operators that run out of memory are retried, nothing else."""
        return self._asked is None or isinstance(self._asked, Rescue)

    def limit_of_units(self) -> int:
        """Bytes that a unit may reach without being intercepted; 0 if every unit is to be intercepted."""
        if not isinstance(self._asked, Rescue):
            return self._budget.bytes
        now = time.monotonic()
        if now > self._looked_seconds + LOOKS_SECONDS:  # other programs, and the script itself, may have taken memory
            self._looked_seconds = now
            self._limit_to_what_is_there()
            self._room_bytes = self._budget.limit_bytes
            if accelerator.is_there():  # the device's own allocator refuses what does not fit
                self._budget.lift()
        return self._room_bytes

    def rescue_begins(self, *, fits: bool) -> None:
        """A unit begins without a budget; ``fits``: whether it is predicted to fit into memory.

        Otherwise, what is evicted must leave the process, not only the tensors, while the unit runs; and its limit is what is
        there now, as the process may have grown otherwise.
        """
        if not isinstance(self._asked, Rescue) or accelerator.is_there():
            return
        if fits is self._returns:
            self._returns = not fits
            return_freed_memory_for_now(returned=not fits)
        if not fits:
            self._limit_to_what_is_there()

    @property
    def share(self) -> float:
        """The share that the user asked for; 0 if it was not a share."""
        return self._asked.fraction if isinstance(self._asked, BudgetShare) else 0.0

    def begin(self) -> None:
        """The run begins: set the budget, or until a share is known, limit the run to the memory there is."""
        if isinstance(self._asked, int):
            self._put(self._asked)
        elif self._most_bytes:
            self._available_bytes = self._most_bytes
            self._put(self._most_bytes)
        elif isinstance(self._asked, Auto):
            self._budget.put(_free_on_device())
        elif isinstance(self._asked, Rescue):
            self.limit_of_units()
        elif isinstance(self._asked, FromStep):  # the first step has no budget, but it is limited to the memory there is
            self._limit_to_what_is_there()

    @property
    def _most_bytes(self) -> int:
        """What the user gave a slowdown at most; 0 without."""
        return self._asked.most_bytes if isinstance(self._asked, Slowdown) else 0

    @property
    def may_rise(self) -> bool:
        """Whether a budget that is too low is raised, not refused: it follows from plans, and is below the most allowed."""
        return self._budget.is_sought and not 0 < self._most_bytes <= self._budget.bytes

    def _put(self, size: int) -> None:
        self._budget.put(size)
        return_freed_memory(size)

    def device_found(self) -> None:
        """Memory is counted on another device from now on: read the budget or the limit off that device."""
        if isinstance(self._asked, Auto):
            self._budget.put(_free_on_device())
        elif isinstance(self._asked, Rescue):
            self._looked_seconds = 0.0
            self.limit_of_units()
        elif isinstance(self._asked, FromStep) and not self._budget.bytes:
            self._limit_to_what_is_there()

    def _limit_to_what_is_there(self) -> None:
        meter = self._interception.meter
        self._available_bytes = meter.live() + available_bytes(meter.device)
        self._budget.limit_to(self._available_bytes)

    @property
    def origin(self) -> str:
        """What the bytes are, for the summary; empty if the user gave them."""
        if isinstance(self._asked, BudgetShare):
            return f"{self._asked.fraction:.0%} of what step {self._raised_step} adds to the resident bytes"
        if isinstance(self._asked, Minimum):
            return f"the lowest peak of the plans found, and {MINIMUM_MARGIN:.0%}"
        if isinstance(self._asked, Slowdown):
            most = f", at most {format_bytes(self._asked.most_bytes)}" if self._asked.most_bytes else ""
            return f"the least that plans need for {self._asked.fraction:.0%} more time, as predicted{most}"
        return ""

    def resolve(self, unit: Unit, steps: Sequence[StepFigures], between_bytes: int) -> None:
        """Turn what the user asked for into bytes once a step was recorded, and again whenever a larger one becomes known.

        Args:
            unit: the unit that begins.
            steps: the finished steps.
            between_bytes: highest point outside units.
        """
        if not isinstance(self._asked, FromStep):
            return
        recordings = self._knowledge.recordings
        entry = recordings.nearest(unit.kind, unit.base_bytes) or next(iter(recordings), None)
        if entry is None:
            return
        if isinstance(self._asked, BudgetShare):
            peak = self._knowledge.baseline_peak(entry, unit)
        else:
            peak = max(self._planned_peak(entry, unit, len(steps)), self._crossing(steps))
        peak = max(peak, between_bytes)
        revised = isinstance(self._asked, Slowdown) or (isinstance(self._asked, Minimum) and unit.kind.plain_checkpoints)
        revised, self._guessed = revised or self._guessed, entry.is_untried  # of an earlier run, perhaps of another script
        falls = revised and peak < self._peak_bytes * (1 - FALLS)  # operators were timed again, or other ones run
        if self._budget.bytes and peak <= self._peak_bytes and len(steps) != 1 and not falls:
            return
        larger = bool(self._budget.bytes) and peak > self._peak_bytes * (1 + TOLERANCE_SHARE)
        self._peak_bytes = peak if falls else max(peak, self._peak_bytes)
        asked = self._bytes_of(self._peak_bytes)
        there = self._available_bytes  # as measured before the first step: the process may keep what it has freed since
        self._put(min(asked, there))
        name = _name(self._asked)
        if asked > max(there, self._told_bytes):
            limit = "may be taken" if self._most_bytes else "are available"
            tell(f"lowtide: {name} is {format_bytes(asked)}, but only {format_bytes(there)} {limit}")
            self._told_bytes = asked
        if larger and len(steps) > 1:
            self._raised_step = len(steps)
            now, of = format_bytes(self._budget.bytes), ""
            if isinstance(self._asked, BudgetShare):
                of = f", whose baseline peak is {format_bytes(self._peak_bytes)}"
            tell(f"lowtide: {name} is {now} from step {len(steps)} on{of}")

    def _planned_peak(self, entry: RecordedUnit, unit: Unit, steps: int) -> int:
        """The highest peak, over all recordings, of the plans that the user asked for.

        It is searched for once per recording; for a slowdown, again when the recording's operators were timed again, and only
        recordings count whose units were met in the last steps.

        Args:
            entry: the recording of the unit that begins.
            unit: that unit.
            steps: number of finished steps.
        """
        slowdown = self._asked if isinstance(self._asked, Slowdown) else None
        before, self._planned = self._planned, {}
        for recorded in self._knowledge.recordings:
            known, front = before.get(recorded), recorded.front
            if known is None or (slowdown is not None and known.front is not front):
                seconds = None
                if slowdown is not None:
                    seconds = slowdown.fraction * recorded.baseline_seconds + recorded.saved_seconds
                found = front.lowest_peak() if seconds is None else front.least_within(seconds)
                known = _Planned(front, found, found, steps)
            if recorded is entry:
                known = replace(known, shifted_bytes=known.peak_bytes + recorded.shift(unit), step=steps)
            self._planned[recorded] = known
        counted = (p for p in self._planned.values() if slowdown is None or steps - p.step <= RECENT)
        return max((planned.shifted_bytes for planned in counted), default=0)

    def _crossing(self, steps: Sequence[StepFigures]) -> int:
        """The highest peak of steps that crossed the budget, which was too little for them; 0 if none did."""
        last = steps[-1].peak_bytes if len(steps) > 1 else 0
        if 0 < self._budget.bytes < last:
            self._crossed_bytes = max(self._crossed_bytes, last)
        return self._crossed_bytes

    def _bytes_of(self, peak_bytes: int) -> int:
        """The budget, in bytes, that follows from a peak: the plain one for a share, otherwise a plan's."""
        if isinstance(self._asked, BudgetShare):
            resident = self._knowledge.persistent.bytes()
            return int(resident + self._asked.fraction * max(0, peak_bytes - resident))
        margin = MINIMUM_MARGIN if isinstance(self._asked, Minimum) else 0.0
        return int(peak_bytes * (1 + margin)) + 2 * SLACK_BYTES


def _name(asked: FromStep) -> str:
    """What the user asked for, as messages name it."""
    if isinstance(asked, BudgetShare):
        return f"{asked.fraction:.0%}"
    return "the minimum" if isinstance(asked, Minimum) else f"the budget for a slowdown of {asked.fraction:.0%}"


def _free_on_device() -> int:
    found = accelerator.current()
    return int(found.free_bytes() * (1 - AUTO_MARGIN)) + found.allocated_bytes()
