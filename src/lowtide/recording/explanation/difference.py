"""What changed from one recording to another, as one frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lowtide.recording.explanation.explanation import Explanation
from lowtide.recording.peak_report import by_role
from lowtide.recording.recorded_step import RecordedStep, highest

_TOP: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteChange:
    """Bytes in each of two recordings."""

    before_bytes: int
    after_bytes: int

    @property
    def bytes(self) -> int:
        """How many more bytes the second recording has."""
        return self.after_bytes - self.before_bytes

    def to_json(self) -> dict[str, int]:
        """Both figures."""
        return {"before_bytes": self.before_bytes, "after_bytes": self.after_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changed from one recording to another.

    Attributes:
        before: the command of the first recording.
        after: the command of the second.
        peak: the highest peak of any step.
        by_role: bytes per role at the peak, if operators were kept.
        phases: the highest point in each phase, over all steps.
        top: what takes more or fewer bytes at the peak, by role, module and name; the largest change comes first.
    """

    before: str
    after: str
    peak: ByteChange
    by_role: Mapping[str, ByteChange]
    phases: Mapping[str, ByteChange]
    top: Mapping[str, ByteChange]

    def to_json(self) -> dict[str, Any]:
        """What ``lowtide diff --json`` writes."""
        return {
            "scripts": {"before": self.before, "after": self.after},
            "peak": self.peak.to_json(),
            "by_role": {name: change.to_json() for name, change in self.by_role.items()},
            "phases": {name: change.to_json() for name, change in self.phases.items()},
            "top": [{"what": what, **change.to_json()} for what, change in self.top.items()],
        }


def difference(before: Explanation, after: Explanation) -> Difference:
    """Compares two recordings at their peaks and phase by phase."""
    steps = highest(before.steps), highest(after.steps)
    top = _changes(*map(_blocks, steps))
    changed = sorted((what for what in top if top[what].bytes), key=lambda what: -abs(top[what].bytes))
    return Difference(
        before=_command(before),
        after=_command(after),
        peak=ByteChange(before_bytes=_peak(before), after_bytes=_peak(after)),
        by_role=_changes(*map(_roles, steps)),
        phases=_changes(_phases(before), _phases(after)),
        top={what: top[what] for what in changed[:_TOP]},
    )


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, ByteChange]:
    names: Iterable[str] = dict.fromkeys([*before, *after])
    return {name: ByteChange(before_bytes=before.get(name, 0), after_bytes=after.get(name, 0)) for name in names}


def _command(side: Explanation) -> str:
    return " ".join([str(side.meta.get("script") or "?"), *map(str, side.meta.get("arguments") or ())])


def _peak(side: Explanation) -> int:
    return max((row.peak_bytes for row in side.rows or side.recording.steps), default=0)


def _phases(side: Explanation) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in side.rows or side.recording.steps:
        for phase in row.phases:
            found[phase.name] = max(found.get(phase.name, 0), phase.peak_bytes)
    return found


def _roles(step: RecordedStep | None) -> dict[str, int]:
    if step is None:
        return {}
    return by_role(step.at_peak[step.peak_op])


def _blocks(step: RecordedStep | None) -> dict[str, int]:
    found: dict[str, int] = {}
    if step is None:
        return found
    entry = int(step.ops[step.peak_op])
    for b in step.blocks:
        if b.counted and b.born <= entry < b.died:
            role = b.role_at(entry).name.lower().replace("_", " ")
            key = " ".join(x for x in (role, b.module, b.name or b.op.removesuffix(".default")) if x)
            found[key] = found.get(key, 0) + b.bytes
    return found
