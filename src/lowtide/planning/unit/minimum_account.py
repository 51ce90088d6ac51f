"""Says what the minimum of a unit consists of: the event that sets it, and every byte that no plan can have away then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from lowtide.base.trace import Need, Op, Phase, Site
from lowtide.planning.unit.bound import Forced, asked_bytes, forced_spans
from lowtide.planning.unit.problem import Problem

LARGEST: Final = 5
"""How many values are named."""
RESIDENT: Final = "parameters, buffers and optimizer states"
BEFORE: Final = "other memory from before the forward"
GRADIENTS: Final = "gradients"
READ: Final = "read by the operator"
MADE: Final = "outputs and workspace of the operator"
ASKED: Final = "the value that backward asks for"
OUTSIDE: Final = "made outside any operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValue:
    """A value that is live at the minimum.

    Attributes:
        bytes: its size.
        made_by: where it was made; None if it existed before the unit.
        part: the part of the account to which it belongs.
    """

    bytes: int
    made_by: Site | None
    part: str

    def to_json(self) -> dict[str, Any]:
        """One of ``largest`` in the JSON file."""
        return {"bytes": self.bytes, "made_by": None if self.made_by is None else str(self.made_by), "part": self.part}


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumAccount:
    """What is in memory at the event that sets a unit's minimum, whatever is recomputed and offloaded.

    Attributes:
        operator: the ATen operator that runs then, or whose value backward asks for; empty for a unit without events.
        module: path of its module; empty outside any.
        phase: the phase that the event is in.
        parts: bytes by part, largest first; they add up to the minimum.
        largest: the largest values among them, made within the unit.
    """

    operator: str
    module: str
    phase: Phase
    parts: tuple[tuple[str, int], ...]
    largest: tuple[NamedValue, ...] = ()

    @property
    def bytes(self) -> int:
        """The minimum."""
        return sum(size for _, size in self.parts)

    def module_of(self, part: str) -> str:
        """Path of the module that made the largest named value of a part; empty if none did."""
        return next((x.made_by.module for x in self.largest if x.part == part and x.made_by is not None), "")

    def moved(self, shift_bytes: int) -> MinimumAccount:
        """The same for a unit that has so many bytes more of parameters, buffers and optimizer states."""
        return replace(self, parts=_sorted({**dict(self.parts), RESIDENT: dict(self.parts).get(RESIDENT, 0) + shift_bytes}))

    def __str__(self) -> str:
        """Where it is, for people: ``aten.mm.default in layers.3 (backward)``."""
        return f"{self.operator}{self.module and f' in {self.module}'} ({self.phase.value})"

    def to_json(self) -> dict[str, Any]:
        """The ``at`` object of a bound in the JSON file."""
        return {
            "operator": self.operator,
            "module": self.module,
            "phase": self.phase.value,
            "parts": [{"what": what, "bytes": size} for what, size in self.parts],
            "largest": [x.to_json() for x in self.largest],
        }


def account_of(problem: Problem, at: int) -> MinimumAccount:
    """What the minimum of a problem consists of; ``at`` is the event that proves it (``Bound.peak_event``)."""
    trace = problem.trace
    if at < 0:
        return MinimumAccount(operator="", module="", phase=Phase.DATA, parts=_base(problem))
    event = trace.events[at]
    reads = set(event.reads) | {old for old, _ in event.overwrites} if isinstance(event, Op) else set()
    parts = {**dict(_base(problem)), OUTSIDE: 0}
    values = []
    for v, buffer in enumerate(trace.buffers):
        spans = forced_spans(problem, v) if buffer.counted else ()
        why = next((why for first, last, why in spans if first <= at <= last), None)
        if why is None:
            continue
        part = READ if v in reads else _part(problem, v, why)
        parts[part] = parts.get(part, 0) + buffer.bytes
        made_by = problem.maker(v).site if buffer.born >= 0 else None
        values.append(NamedValue(bytes=buffer.bytes, made_by=made_by, part=part))
    inside, asked = int(problem.rise[at]), asked_bytes(problem, at)
    parts[MADE if inside >= asked else ASKED] = max(inside, asked)
    parts[OUTSIDE if trace.other_bytes[at] > 0 else BEFORE] += trace.other_bytes[at]
    site = event.site if isinstance(event, Op) else _site_of(problem, at)
    return MinimumAccount(
        operator="" if site is None else site.op,
        module="" if site is None else site.module,
        phase=event.phase if isinstance(event, Op) else Phase.BACKWARD,
        parts=_sorted(parts),
        largest=tuple(sorted(values, key=lambda x: -x.bytes)[:LARGEST]),
    )


def _base(problem: Problem) -> tuple[tuple[str, int], ...]:
    resident = min(problem.trace.resident_bytes, problem.base_bytes)
    return (RESIDENT, resident), (BEFORE, problem.base_bytes - resident)


def _site_of(problem: Problem, event: int) -> Site | None:
    """The operator that made the value that backward asks for; None if it existed before the unit."""
    need = problem.trace.events[event]
    assert isinstance(need, Need)
    return problem.maker(need.value).site if problem.trace.buffers[need.value].born >= 0 else None


def _part(problem: Problem, value: int, why: Forced) -> str:
    """The part of a value that the event's operator does not read; what backward made and the script keeps is a gradient."""
    buffer = problem.trace.buffers[value]
    kept = why is Forced.SCRIPT and buffer.born >= 0 and buffer.held_until >= len(problem.trace.events) - 1
    return GRADIENTS if kept and problem.maker(value).phase is Phase.BACKWARD else why.value


def _sorted(parts: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((what, size) for what, size in parts.items() if size), key=lambda x: -x[1]))
