"""What a run has learnt of its units: their recordings, how high they rise, and what outlives steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from lowtide.runtime.units.peak_model import PeakModel
from lowtide.runtime.units.persistent_state import PersistentState
from lowtide.runtime.units.plan_cache import PlanCache
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.unit import Unit


@final
@dataclass(frozen=True, slots=True)
class Knowledge:
    """One per runtime; whoever chooses how a unit runs reads it, whoever reviews one that ended writes it.

    Attributes:
        recordings: of each kind of unit.
        peaks: how high units rise, by the sizes of their calls.
        persistent: the script's models and optimizers.
    """

    recordings: PlanCache = field(default_factory=PlanCache)
    peaks: PeakModel = field(default_factory=PeakModel)
    persistent: PersistentState = field(default_factory=PersistentState)

    def certain_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """How much higher than the recorded unit another one lies for certain: by what became optimizer state since."""
        grown = sum(size for state, size in self.persistent.states().items() if state not in entry.states)
        return min(unit.base_bytes - entry.trace.base_bytes, grown - entry.left.bytes)

    def likely_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """How much higher than the recorded unit's the peak of another one lies: what may go within it is not counted."""
        made_anew = max(0, entry.gradient_bytes - unit.gradient_bytes)
        return min(entry.shift(unit), self.certain_shift(entry, unit) + made_anew)
