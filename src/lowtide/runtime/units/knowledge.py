"""What a run has learnt about its units: recordings, rises above the base, and state that outlives steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from lowtide.runtime.units.peak_model import PeakModel
from lowtide.runtime.units.persistent_state import PersistentState
from lowtide.runtime.units.plan_cache import PlanCache
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.resizing import SizeGrowth
from lowtide.runtime.units.script_checkpoints import ScriptCheckpoints
from lowtide.runtime.units.unit import Unit


@final
@dataclass(frozen=True, slots=True)
class Knowledge:
    """One per runtime; :mod:`.plan_choice` reads it to choose how a unit runs, :mod:`.unit_review` updates it afterwards.

    Attributes:
        recordings: the recordings of each kind of unit.
        peaks: how far units rise above their base, by the sizes of their calls.
        growth: how units compare with others whose plans they follow although their sizes differ.
        persistent: the script's models and optimizers.
        checkpoints: which units run with the script's own checkpoints plain.
    """

    checkpoints: ScriptCheckpoints
    recordings: PlanCache
    peaks: PeakModel = field(default_factory=PeakModel)
    growth: SizeGrowth = field(default_factory=SizeGrowth)
    persistent: PersistentState = field(default_factory=PersistentState)

    def meet_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that is about to update a parameter.

        States that it has before its first update (Adagrad's, or those of a checkpoint) already existed when units were
        recorded.
        """
        if optimizer in self.persistent.optimizers:
            return
        before = self.persistent.states().keys()
        self.persistent.optimizers.add(optimizer)
        found = {state: size for state, size in self.persistent.states().items() if state not in before}
        for entry in self.recordings if found else ():
            entry.states.update(found)

    def certain_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """Bytes by which a unit certainly lies higher than the recorded one: optimizer state allocated since then.

        What graphs of earlier units held at the recording is subtracted. The result is at most the difference of the bases.
        """
        grown = entry.grown_bytes(self.persistent.states())
        return min(unit.base_bytes - entry.trace.base_bytes, grown - entry.left.bytes)

    def baseline_peak(self, entry: RecordedUnit, unit: Unit) -> int:
        """The peak, in bytes, that a unit like the recorded one would have without Lowtide where another one begins."""
        written = self.checkpoints.written(unit.kind) if unit.kind.plain_checkpoints else None
        if written is not None:
            return written.baseline_peak + self.likely_shift(written, unit)
        return entry.baseline_peak + self.likely_shift(entry, unit)

    def likely_shift(self, entry: RecordedUnit, unit: Unit) -> int:
        """Bytes by which a unit's peak probably exceeds the recorded one's, without what the unit may free before its peak."""
        made_anew = max(0, entry.gradient_bytes - unit.gradient_bytes)
        return min(entry.shift(unit), self.certain_shift(entry, unit) + made_anew)
