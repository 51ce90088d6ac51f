"""Decides whether a step fits into memory at a size that was not run: plainly, by a plan, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.solver.solve import Answer, Solver
from lowtide.studies.size.predict import Model
from lowtide.studies.size.prediction import Prediction, Sizes

SECONDS = 8.0
"""Seconds for which a plan is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a step fits.

    Attributes:
        prediction: the prediction for the plain step.
        memory_bytes: the memory available; None if it was not given.
        plain: whether the plain step fits; None if that is within the doubt, or if no memory was given.
        plan: a plan with which the warm step fits, with room for the doubt; None if none is needed or found.
        floor_bytes: minimum that no recompute plan of the warm step goes below; None if no plan was searched.
        why_no_plan: why no plan could be searched; empty otherwise.
    """

    prediction: Prediction
    memory_bytes: int | None
    plain: bool | None
    plan: Answer | None
    floor_bytes: int | None
    why_no_plan: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step certainly fits, plainly or by the plan."""
        return bool(self.plain) or self.plan is not None


def fit(model: Model, sizes: Sizes, memory_bytes: int | None) -> Fit:
    """Decide whether a step fits.

    Args:
        model: the model of the script's step.
        sizes: the sizes of the step.
        memory_bytes: the memory available; None only predicts the plain step.
    """
    prediction = model.at(sizes)
    plain = None if memory_bytes is None else prediction.fits(memory_bytes)
    if memory_bytes is None or plain:
        return Fit(prediction=prediction, memory_bytes=memory_bytes, plain=plain, plan=None, floor_bytes=None)
    graph = model.graph_at(sizes)
    if graph is None:
        return Fit(prediction=prediction, memory_bytes=memory_bytes, plain=plain, plan=None, floor_bytes=None,
                   why_no_plan="the recordings do not run the same operators at all sizes")
    solver = Solver(graph)
    # The plain peak of the graph lacks the bytes that belong to no block; the fitted peak includes them.
    beside = max(0, prediction.at_most_bytes - solver.given.peak_bytes)
    answer = solver.at(max(memory_bytes - beside, 1), seconds=SECONDS)
    return Fit(
        prediction=prediction,
        memory_bytes=memory_bytes,
        plain=plain,
        plan=answer if answer.status.has_plan else None,
        floor_bytes=answer.peak_bound.bytes + beside,
    )
