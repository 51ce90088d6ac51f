"""The high-water mark of a step: the operator that reaches it, and what every byte is at that moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Trace
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.simulate import play
from lowtide.recording.file_format import PHASES, Role
from lowtide.recording.recorded_step import ROLES, Block, RecordedStep


def peak_of(trace: Trace) -> int:
    """Peak bytes of a trace without a plan, as ``planning/unit/simulate`` plays it."""
    return play(Problem(trace=trace, base_bytes=trace.base_bytes), {}).peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """The high-water mark of a step.

    Attributes:
        bytes: live bytes at that moment.
        by_role: bytes per role; they sum to ``bytes``.
        top: the largest blocks that are live then, largest first.
        asked_bytes: size of the request that failed, if the step ran out of memory; else 0.
    """

    step: int
    phase: str
    op: str
    module: str
    source: str
    bytes: int
    by_role: dict[str, int]
    top: tuple[dict[str, Any], ...]
    asked_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The ``peak`` object of the JSON file."""
        return {
            "step": self.step, "phase": self.phase, "op": self.op, "module": self.module, "source": self.source,
            "bytes": self.bytes, "by_role": self.by_role, "top": list(self.top), "asked_bytes": self.asked_bytes,
        }


def by_role(roles: NDArray[np.int64]) -> dict[str, int]:
    """Bytes by the names of the roles that have any, from a row of :attr:`RecordedStep.before` or ``at_peak``."""
    return {role.name.lower(): int(roles[role]) for role in ROLES if roles[role]}


def peak_report(step: RecordedStep) -> PeakReport | None:
    """The high-water mark of a step, or its last out-of-memory failure if there was one; None without operators."""
    if not len(step.ops):
        return None
    denied = np.flatnonzero(step.denied)
    return _moment(step, int(denied[-1]) if len(denied) else step.peak_op, denied=bool(len(denied)))


def last_moment(step: RecordedStep) -> PeakReport | None:
    """The peak inside a step's last operator: where a killed process was when it ended. None without operators."""
    return _moment(step, len(step.ops) - 1, denied=False) if len(step.ops) else None


def _moment(step: RecordedStep, k: int, *, denied: bool) -> PeakReport:
    entry = step.entries[step.ops[k]]
    roles = step.before[k] if denied else step.at_peak[k]
    return PeakReport(
        step=step.row.step,
        phase=str(PHASES[entry["phase"]]),
        op=step.names[entry["a"]],
        module=step.names[entry["b"]],
        source=step.names[entry["c"]],
        bytes=int(roles.sum()),
        by_role=by_role(roles),
        top=tuple(_top_row(b, b.role_at(int(step.ops[k]))) for b in step.top(k)),
        asked_bytes=int(entry["size"]) if denied else 0,
    )


def _top_row(block: Block, role: Role) -> dict[str, Any]:
    return {"bytes": block.bytes, "role": role.name.lower(), "name": block.title, "module": block.module,
            "source": block.source, "held_by": block.holder or (block.held[-1] if block.held else "")}
