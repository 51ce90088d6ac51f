"""Does a step fit at a size that was not run: plainly, by a plan, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.solver.solve import Answer, Solver
from lowtide.studies.size.predict import Model
from lowtide.studies.size.prediction import Prediction, Sizes

SECONDS = 8.0
"""How long a plan is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """An answer.

    Attributes:
        prediction: of the plain step.
        memory_bytes: what there is; None where it was not asked.
        plain: whether the plain step fits; None within the doubt, or where it was not asked.
        plan: a plan by which the warm step fits, with room for the doubt; None where none is needed or found.
        floor_bytes: below which no plan of recompute gets the warm step; None where it was not asked for.
        why_no_plan: where a plan could not be looked for.
    """

    prediction: Prediction
    memory_bytes: int | None
    plain: bool | None
    plan: Answer | None
    floor_bytes: int | None
    why_no_plan: str = ""

    @property
    def fits(self) -> bool:
        """For certain: plainly or by the plan."""
        return bool(self.plain) or self.plan is not None


def fit(model: Model, sizes: Sizes, memory_bytes: int | None) -> Fit:
    """The answer for some sizes and some memory."""
    prediction = model.at(sizes)
    plain = None if memory_bytes is None else prediction.fits(memory_bytes)
    if memory_bytes is None or plain:
        return Fit(prediction=prediction, memory_bytes=memory_bytes, plain=plain, plan=None, floor_bytes=None)
    graph = model.graph_at(sizes)
    if graph is None:
        return Fit(prediction=prediction, memory_bytes=memory_bytes, plain=plain, plan=None, floor_bytes=None,
                   why_no_plan="the recordings do not run the same operators at all sizes")
    solver = Solver(graph)
    # The graph's own account of the plain step and the fitted peak differ by what no block explains.
    beside = max(0, prediction.at_most_bytes - solver.given.peak_bytes)
    answer = solver.at(max(memory_bytes - beside, 1), seconds=SECONDS)
    return Fit(
        prediction=prediction,
        memory_bytes=memory_bytes,
        plain=plain,
        plan=answer if answer.status.has_plan else None,
        floor_bytes=answer.peak_bound.bytes + beside,
    )
