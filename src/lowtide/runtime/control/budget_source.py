"""Where the budget's bytes come from: a size, a device's free memory, or a share of what a step adds."""

from __future__ import annotations

from typing import Final, final

from lowtide.base.messages import tell
from lowtide.base.units import Auto, BudgetShare, Rescue, Size, format_bytes
from lowtide.runtime.budget import Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.device import accelerator
from lowtide.runtime.device.available_memory import available_bytes, return_freed_memory, return_freed_memory_for_now
from lowtide.runtime.units.knowledge import Knowledge
from lowtide.runtime.units.recorded_unit import TOLERANCE_SHARE
from lowtide.runtime.units.unit import Unit

AUTO_MARGIN: Final = 0.05
"""Share of an accelerator's free memory that ``auto`` leaves unused, for fragmentation."""


@final
class BudgetSource:
    """Sets the budget's bytes as soon as they are known.

    Attributes:
        share_step: the step at which the share was last recomputed because a larger plain peak was found; 0 for never.
    """

    def __init__(self, asked: Size | None, budget: Budget, interception: Interception, knowledge: Knowledge) -> None:
        """Set nothing yet."""
        self._asked, self._budget, self._interception, self._knowledge = asked, budget, interception, knowledge
        self._peak_bytes = self._available_bytes = 0
        self.share_step = 0
        self._returns = False

    @property
    def only_rescues(self) -> bool:
        """Whether there is no budget: operators that run out of memory are retried, nothing else."""
        return self._asked is None or isinstance(self._asked, Rescue)

    def limit_of_units(self) -> int:
        """Bytes that a unit may reach without being intercepted; 0 if every unit is to be intercepted."""
        if not isinstance(self._asked, Rescue):
            return self._budget.bytes
        meter = self._interception.meter
        return self._budget.limit_bytes or meter.live() + available_bytes(meter.device)

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
            self._budget.put(self._asked)
            return_freed_memory(self._asked)
        elif isinstance(self._asked, Auto):
            self._budget.put(_free_on_device())
        elif isinstance(self._asked, (BudgetShare, Rescue)):  # no budget, or none yet, but a limit: the memory there is
            self._limit_to_what_is_there()

    def device_found(self) -> None:
        """Memory is counted on another device from now on: read the budget or the limit off that device."""
        if isinstance(self._asked, Auto):
            self._budget.put(_free_on_device())
        elif isinstance(self._asked, Rescue):  # a device's own allocator refuses what does not fit
            self._budget.lift()
        elif isinstance(self._asked, BudgetShare) and not self._budget.bytes:
            self._limit_to_what_is_there()

    def _limit_to_what_is_there(self) -> None:
        meter = self._interception.meter
        self._available_bytes = meter.live() + available_bytes(meter.device)
        self._budget.limit_to(self._available_bytes)

    def resolve(self, unit: Unit, steps: int, between_bytes: int) -> None:
        """Turn a share into bytes once a plain peak is known, and again whenever a larger one becomes known.

        Args:
            unit: the unit that begins.
            steps: number of finished steps.
            between_bytes: highest point outside units.
        """
        if not isinstance(self._asked, BudgetShare):
            return
        recordings = self._knowledge.recordings
        entry = recordings.nearest(unit.kind, unit.base_bytes) or next(iter(recordings), None)
        if entry is None:
            return
        resident = self._knowledge.persistent.bytes()
        peak = max(entry.problem.plain_peak + self._knowledge.likely_shift(entry, unit), between_bytes)
        if self._budget.bytes and peak <= self._peak_bytes and steps != 1:
            return
        larger = bool(self._budget.bytes) and peak > self._peak_bytes * (1 + TOLERANCE_SHARE)
        self._peak_bytes = max(peak, self._peak_bytes)
        asked = int(resident + self._asked.fraction * max(0, self._peak_bytes - resident))
        there = self._available_bytes  # as measured before the first step: the process may keep what it has freed since
        self._budget.put(min(asked, there))
        return_freed_memory(self._budget.bytes)
        share = f"{self._asked.fraction:.0%}"
        if asked > there:
            tell(f"lowtide: {share} is {format_bytes(asked)}, but only {format_bytes(there)} are available")
        if larger and steps > 1:
            self.share_step = steps
            now, plain = format_bytes(self._budget.bytes), format_bytes(self._peak_bytes)
            tell(f"lowtide: {share} is {now} from step {steps} on, whose baseline peak is {plain}")


def _free_on_device() -> int:
    found = accelerator.current()
    return int(found.free_bytes() * (1 - AUTO_MARGIN)) + found.allocated_bytes()
