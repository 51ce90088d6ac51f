"""What a run under a budget came to: plain figures, for the summary and the JSON file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final, overload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step as it was measured.

    Attributes:
        policy: ``plain`` (nothing to do), ``planned`` or ``online``.
        peak_bytes: highest point of the device's tensors within the step.
        recompute_seconds: what the operators that ran again took (host time).
        offload_seconds: what writing to the second board and reading from it took (host time).
        rescued_ops: operators that were tried again after something was let go.
        overrun: whether the limit had to be lifted to get through, and was crossed.
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


@final
@dataclass(slots=True)
class StepTally:
    """What a policy did in one step."""

    recomputed_ops: int = 0
    recompute_seconds: float = 0.0
    offloaded_bytes: int = 0
    offload_seconds: float = 0.0
    fetched_ahead: int = 0
    rescues: int = 0
    overrun: bool = False


POLICIES: Final = ("plain", "planned", "online")
"""How a step may have run; of its units' the last of these is told."""
_COLUMNS: Final = {
    "seconds": "d", "peak_bytes": "q", "policy": "B", "recomputed_ops": "q", "recompute_seconds": "d", "offloaded_bytes": "q",
    "offload_seconds": "d", "rescued_ops": "q", "overrun": "B",
}  # fmt: skip


@final
class Steps(Sequence[StepFigures]):
    """Figures of steps in columns: a run may have millions, and nothing of Lowtide's may grow with it by much."""

    def __init__(self) -> None:
        """None yet."""
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}

    def append(self, step: StepFigures) -> None:
        """The next step's; its index is its place."""
        for name, column in self._columns.items():
            value = getattr(step, name)
            column.append(POLICIES.index(value) if name == "policy" else value)

    def __len__(self) -> int:
        """How many."""
        return len(self._columns["seconds"])

    @overload
    def __getitem__(self, at: int) -> StepFigures: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StepFigures, ...]: ...
    def __getitem__(self, at: int | slice) -> StepFigures | tuple[StepFigures, ...]:
        """One step's, or those of several."""
        places = range(len(self))[at]
        return self._figures(places) if isinstance(places, int) else tuple(map(self._figures, places))

    def _figures(self, at: int) -> StepFigures:
        found: dict[str, Any] = {name: column[at] for name, column in self._columns.items()}
        found |= {"policy": POLICIES[found["policy"]], "overrun": bool(found["overrun"])}
        return StepFigures(index=at, **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What the plan in force says of a step; None where no plan was found."""

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
            "lowest_peak_bytes": self.lowest_peak_bytes,
            "solve_seconds": self.solve_seconds,
            "bound": {"peak_bytes": self.bound_peak_bytes, "extra_seconds": self.bound_extra_seconds},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverFigures:
    """What became of one lever (:mod:`lowtide.base.lever_catalogue`).

    Attributes:
        used: whether it changed how anything ran.
        text: what it did, or why it did not.
    """

    name: str
    used: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A whole run.

    Attributes:
        budget_bytes: the budget; 0 where there was none, or where a share never came to be known.
        asked: whether a budget was asked for.
        of_first: whether it is a share of the first step's peak, which therefore ran without it.
        excused: how many steps at the beginning ran before everything that holds the budget was in force: the first one of a
            share, and those before a lever was pulled.
        units: forwards with their backwards in the last step: with gradient accumulation there are several, and the plan is
            of one.
        share: what was asked for of the plain peak above what is resident; 0 where it was no share.
        share_step: the step whose plain peak the share is of, where it was set anew by a larger one.
        unreached: what the script does that the interception does not reach.
        unmet: modules to be kept (``--keep``) of which none was called.
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
    share_step: int = 0
    unreached: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()

    @property
    def in_force(self) -> bool:
        """Whether a budget that was asked for could be held at all."""
        return bool(self.budget_bytes) or not self.asked

    @property
    def bound(self) -> tuple[StepFigures, ...]:
        """Steps that count: those that ran with the budget, and all that holds it, in force."""
        return self.steps[max(self.excused, int(self.of_first)) :]

    @property
    def over(self) -> tuple[StepFigures, ...]:
        """Steps that count and crossed the budget."""
        return tuple(s for s in self.bound if self.budget_bytes and s.peak_bytes > self.budget_bytes)

    @property
    def held(self) -> bool:
        """Whether the budget that was asked for was in force, if a step was seen, and no step that counts crossed it."""
        return not self.over and (self.in_force or not self.steps)

    @property
    def peak_bytes(self) -> int:
        """Highest point of all steps."""
        return max((s.peak_bytes for s in self.steps), default=0)

    def to_json(self, exit_code: int | None) -> dict[str, Any]:
        """The JSON file of ``lowtide run``.

        Args:
            exit_code: that the process ends with; None while the script runs.
        """
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
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
            "exit_code": exit_code,
        }
