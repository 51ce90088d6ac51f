"""A state of a unit's search: decisions and the outcome of playing them, by the compiled player where there is one."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Op
from lowtide.planning.unit.native import NativeOutcome, PlayError
from lowtide.planning.unit.problem import Away, Key, Problem
from lowtide.planning.unit.simulate import UnitTimeline, play


@final
class State:
    """Decisions and the outcome of playing them.

    Only figures are known at once. The timeline, which a plan needs, is played by ``simulate`` when it is asked for.
    """

    def __init__(
        self, problem: Problem, outcome: UnitTimeline | NativeOutcome, decisions: dict[Key, Away] | None = None
    ) -> None:
        """Hold the outcome of decisions; a native outcome knows them."""
        self.problem = problem
        self.outcome = outcome
        self._decisions = decisions

    @classmethod
    def of(cls, problem: Problem, decisions: dict[Key, Away]) -> State:
        """Play decisions.

        Raises:
            StructureError: if the runtime cannot carry out the decisions.
        """
        outcome = problem.native.play(decisions) if problem.native is not None else None
        return cls(problem, outcome if outcome is not None else play(problem, decisions), decisions)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy plays the decisions again."""
        return (State.of, (self.problem, self.decisions))

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the unit."""
        return self.outcome.peak_bytes

    @property
    def extra_seconds(self) -> float:
        """Seconds of recomputation and transfers in addition to the plain run."""
        return self.outcome.extra_seconds

    @property
    def peak_bytes_at(self) -> NDArray[np.int64]:
        """Per event, peak bytes within it, replays included."""
        try:
            return self.outcome.peak_bytes_at
        except PlayError:
            return self.timeline.peak_bytes_at

    @property
    def cost(self) -> tuple[float, int]:
        """Sort key, smaller is better: extra seconds, then peak bytes."""
        return (self.extra_seconds, self.peak_bytes)

    @cached_property
    def decisions(self) -> dict[Key, Away]:
        """The decisions, by value and gap."""
        if self._decisions is None:
            assert isinstance(self.outcome, NativeOutcome)
            return self.outcome.decisions
        return self._decisions

    @cached_property
    def timeline(self) -> UnitTimeline:
        """What happens at every event."""
        return self.outcome if isinstance(self.outcome, UnitTimeline) else play(self.problem, self.decisions)

    def spent_seconds(self, value: int) -> float:
        """Seconds of the operators that compute a value again."""
        return self._spent[value]

    @cached_property
    def _spent(self) -> list[float]:
        if isinstance(self.outcome, NativeOutcome):
            with contextlib.suppress(PlayError):
                found: list[float] = self.outcome.spent_seconds.tolist()
                return found
        spent = [0.0] * len(self.problem.trace.buffers)
        for remake in self.timeline.remakes:
            for e in remake.ops:
                op = self.problem.trace.events[e]
                assert isinstance(op, Op)
                for v in (*op.writes, *(new for _, new in op.overwrites)):
                    spent[v] += self.problem.again_seconds(op)
        return spent
