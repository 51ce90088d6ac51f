"""Figures of a run under a budget, as plain values for the summary and the JSON file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final, overload

from lowtide.planning.unit.minimum_account import MinimumAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Measurements of one step.

    Attributes:
        policy: ``plain`` (nothing to do), ``planned`` or ``online``.
        peak_bytes: high-water mark of the device's tensors within the step.
        recompute_seconds: host time spent on recomputing operators.
        offload_seconds: host time spent on writing to the offload tier and reading from it.
        rescued_ops: retries of operators that had not fitted, after an eviction or without the limit; an operator may count
            several times.
        overrun: whether an operator fitted only after the limit was lifted, and so crossed it.
        budget_bytes: the budget that it is judged by; 0 for the run's.
    """

    index: int
    seconds: float
    peak_bytes: int
    policy: str
    recomputed_ops: int
    recompute_seconds: float
    offloaded_bytes: int
    offload_seconds: float
    rescued_ops: int
    overrun: bool
    budget_bytes: int = 0

    def exceeds(self, budget_bytes: int) -> int:
        """Bytes by which its peak exceeds its own budget, or the run's ``budget_bytes``; 0 if it does not."""
        budget = self.budget_bytes or budget_bytes
        return max(0, self.peak_bytes - budget) if budget else 0


@final
@dataclass(slots=True)
class StepTally:
    """Counts of what a policy did in one step."""

    recomputed_ops: int = 0
    recompute_seconds: float = 0.0
    offloaded_bytes: int = 0
    offload_seconds: float = 0.0
    fetched_ahead: int = 0
    rescues: int = 0
    overrun: bool = False


POLICIES: Final = ("plain", "planned", "online")
"""How a step may run. A step with several units reports the last of these that one of its units had."""
_COLUMNS: Final = {
    "seconds": "d", "peak_bytes": "q", "policy": "B", "recomputed_ops": "q", "recompute_seconds": "d", "offloaded_bytes": "q",
    "offload_seconds": "d", "rescued_ops": "q", "overrun": "B",
    "budget_bytes": "q",
}  # fmt: skip


@final
class Steps(Sequence[StepFigures]):
    """Figures of steps, stored in columns: a run may have millions of steps, and Lowtide's memory must barely grow with it."""

    def __init__(self) -> None:
        """Begin without steps."""
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}

    def append(self, step: StepFigures) -> None:
        """Append the next step; its index is its position."""
        for name, column in self._columns.items():
            value = getattr(step, name)
            column.append(POLICIES.index(value) if name == "policy" else value)

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._columns["seconds"])

    @overload
    def __getitem__(self, at: int) -> StepFigures: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StepFigures, ...]: ...
    def __getitem__(self, at: int | slice) -> StepFigures | tuple[StepFigures, ...]:
        """The figures of one step, or of a slice of steps."""
        places = range(len(self))[at]
        return self._figures(places) if isinstance(places, int) else tuple(map(self._figures, places))

    def _figures(self, at: int) -> StepFigures:
        found: dict[str, Any] = {name: column[at] for name, column in self._columns.items()}
        found |= {"policy": POLICIES[found["policy"]], "overrun": bool(found["overrun"])}
        return StepFigures(index=at, **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What the plan in force predicts for a step; predictions are None if no plan was found.

    ``minimum`` says what the bound on the peak consists of; None if no forward and its backward set that.
    ``measured_extra_seconds`` is what the plan's recomputing and offloading took in a step that was timed; None if none was.
    """

    predicted_peak_bytes: int | None
    baseline_peak_bytes: int
    resident_bytes: int
    predicted_step_seconds: float | None
    baseline_step_seconds: float
    extra_seconds: float | None
    bound_peak_bytes: int
    bound_extra_seconds: float
    lowest_peak_bytes: int
    status: str
    solve_seconds: float
    minimum: MinimumAccount | None = None
    measured_extra_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The ``plan`` object of the JSON file."""
        return {
            "status": self.status,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "resident_bytes": self.resident_bytes,
            "predicted_step_seconds": self.predicted_step_seconds,
            "baseline_step_seconds": self.baseline_step_seconds,
            "extra_seconds": self.extra_seconds,
            "measured_extra_seconds": self.measured_extra_seconds,
            "lowest_peak_bytes": self.lowest_peak_bytes,
            "solve_seconds": self.solve_seconds,
            "bound": {
                "peak_bytes": self.bound_peak_bytes,
                "extra_seconds": self.bound_extra_seconds,
                "at": None if self.minimum is None else self.minimum.to_json(),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A budget beside the one in force, and the extra seconds of a step that its plan is predicted to take."""

    budget_bytes: int
    extra_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverFigures:
    """Result of one memory optimization (:mod:`lowtide.base.lever_catalogue`).

    Attributes:
        used: whether it changed how anything ran.
        text: what it did, or why it did nothing.
    """

    name: str
    used: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Figures of a whole run.

    Attributes:
        budget_bytes: the budget; 0 without one, or if a share never became known in bytes.
        asked: whether a budget was asked for.
        of_first: whether the budget's bytes follow from the first step, so that the first step ran without it.
        excused: number of steps at the beginning that ran before a memory optimization that the budget needs was engaged. The
            first step of a share is not among them; :attr:`bound` leaves out both.
        units: units (forwards with their backwards) in the last step. With gradient accumulation there are several, and the
            plan is for one.
        share: the share of the baseline peak above resident bytes that was asked for; 0 if the budget is not a share.
        origin: what the bytes are if they follow from a step, in words; otherwise empty.
        unreached: what the script does that the interception does not reach, in words.
        unmet: names given to ``--keep`` of which no module was called.
        neighbours: what other budgets would cost, if they were asked for.
        setup_peak_bytes: highest point before the first step, which no plan lowers and :attr:`held` does not judge.
        units_of_earlier_runs: units that followed plans of recordings that earlier runs of the script had made.
    """

    budget_bytes: int
    steps: tuple[StepFigures, ...]
    plan: PlanFigures | None
    exact: bool
    levers: tuple[LeverFigures, ...] = ()
    asked: bool = False
    of_first: bool = False
    excused: int = 0
    units: int = 1
    share: float = 0.0
    origin: str = ""
    unreached: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    setup_peak_bytes: int = 0
    units_of_earlier_runs: int = 0

    @property
    def in_force(self) -> bool:
        """Whether a budget that was asked for became known in bytes, so that it could be held at all."""
        return bool(self.budget_bytes) or not self.asked

    @property
    def bound(self) -> tuple[StepFigures, ...]:
        """Steps that count: those that ran with the budget, and everything that it needs, in force."""
        return self.steps[max(self.excused, int(self.of_first)) :]

    @property
    def over(self) -> tuple[StepFigures, ...]:
        """Steps that count and exceeded the budget."""
        return tuple(s for s in self.bound if s.exceeds(self.budget_bytes))

    @property
    def held(self) -> bool:
        """Whether no step that counts exceeded the budget, and the budget was in force (unless no step was seen)."""
        return not self.over and (self.in_force or not self.steps)

    @property
    def peak_bytes(self) -> int:
        """Highest peak of all steps."""
        return max((s.peak_bytes for s in self.steps), default=0)

    def to_json(self, exit_code: int | None) -> dict[str, Any]:
        """The JSON file of ``lowtide run``.

        Args:
            exit_code: the process's exit code; None while the script runs.
        """
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "setup_peak_bytes": self.setup_peak_bytes,
            "units_of_earlier_runs": self.units_of_earlier_runs,
            "steps": [
                {
                    "index": s.index,
                    "seconds": s.seconds,
                    "peak_bytes": s.peak_bytes,
                    "policy": s.policy,
                    "recomputed_ops": s.recomputed_ops,
                    "recompute_seconds": s.recompute_seconds,
                    "offloaded_bytes": s.offloaded_bytes,
                    "offload_seconds": s.offload_seconds,
                    "rescued_ops": s.rescued_ops,
                    "overrun": s.overrun,
                    "budget_bytes": s.budget_bytes or self.budget_bytes,
                }
                for s in self.steps
            ],
            "plan": None if self.plan is None else self.plan.to_json(),
            "in_force": self.in_force,
            "held": self.held,
            "excused_steps": max(self.excused, int(self.of_first)),
            "over": [s.index for s in self.over],
            "unreached": list(self.unreached),
            "levers": [{"name": x.name, "used": x.used, "text": x.text} for x in self.levers],
            "neighbours": [{"budget_bytes": x.budget_bytes, "extra_seconds": x.extra_seconds} for x in self.neighbours],
            "exit_code": exit_code,
        }
