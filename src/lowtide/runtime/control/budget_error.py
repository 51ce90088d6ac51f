"""A plan's figures for a unit, and the error that says why a budget is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lowtide.base.errors import BudgetError
from lowtide.base.units import format_bytes
from lowtide.planning.status import Status
from lowtide.planning.unit.solve import Solution
from lowtide.runtime.run_figures import PlanFigures
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.resizing import Resizing

ROOM: Final = 1.1
"""A refusal suggests this multiple of the lowest plan's peak: libraries' workspaces and the script's own allocations vary."""


def figures_of(
    entry: RecordedUnit, solution: Solution, *,
    shift_bytes: int, baseline_bytes: int, certain_bytes: int, resident_bytes: int,
) -> PlanFigures:
    """The figures of a solution for a unit on another base.

    Args:
        entry: the recorded unit.
        solution: the solution of its problem.
        shift_bytes: upper bound on how many bytes higher than the recorded unit this unit lies.
        baseline_bytes: the peak without Lowtide. It leaves out bytes that may be freed before the peak (a result of the
            previous step), so that the figures reported for the plain run are not too high.
        certain_bytes: a lower bound on how much higher the unit lies: optimizer states allocated since the recording, less
            what graphs of earlier units held then (a leftover of the previous step may be freed within the unit).
        resident_bytes: bytes of parameters, buffers and optimizer states.
    """
    state, seconds, saved = solution.state, entry.problem.seconds, entry.saved_seconds
    measured = entry.timings.seconds(state)
    return PlanFigures(
        predicted_peak_bytes=None if state is None else state.peak_bytes + shift_bytes,
        baseline_peak_bytes=baseline_bytes,
        resident_bytes=resident_bytes,
        predicted_step_seconds=None if state is None else seconds + state.extra_seconds,
        baseline_step_seconds=entry.baseline_seconds,
        extra_seconds=None if state is None else state.extra_seconds - saved,
        bound_peak_bytes=solution.bound.peak_bytes + certain_bytes,
        bound_extra_seconds=solution.bound_seconds - saved,
        lowest_peak_bytes=min(baseline_bytes, solution.lowest_bytes + shift_bytes),
        status=solution.status.value,
        solve_seconds=solution.solve_seconds,
        minimum=entry.front.minimum.moved(certain_bytes),
        measured_extra_seconds=None if measured is None else measured - saved,
    )


def resized(figures: PlanFigures, resizing: Resizing, base_bytes: int) -> PlanFigures:
    """The figures of a unit that follows the plan of one of other sizes: estimates, of which nothing is proven.

    Args:
        figures: those of the recorded unit.
        resizing: the relation between the two.
        base_bytes: where this unit begins.
    """

    def peak(recorded: int) -> int:
        return base_bytes + resizing.rise(recorded - base_bytes)

    predicted = None if figures.predicted_peak_bytes is None else peak(figures.predicted_peak_bytes)
    lowest = min(figures.lowest_peak_bytes, peak(figures.lowest_peak_bytes))
    return replace(
        figures,
        predicted_peak_bytes=predicted,
        baseline_peak_bytes=peak(figures.baseline_peak_bytes),
        bound_peak_bytes=min(figures.bound_peak_bytes, figures.resident_bytes),
        lowest_peak_bytes=lowest,
        minimum=None,
        measured_extra_seconds=None,
    )


def raised(figures: PlanFigures, between_bytes: int) -> PlanFigures:
    """A plan's figures with every peak raised to at least the highest point outside units, which no plan lowers.

    Args:
        figures: the plan's figures.
        between_bytes: highest point outside units.
    """
    predicted = figures.predicted_peak_bytes
    return replace(
        figures,
        predicted_peak_bytes=None if predicted is None else max(predicted, between_bytes),
        baseline_peak_bytes=max(figures.baseline_peak_bytes, between_bytes),
        bound_peak_bytes=max(figures.bound_peak_bytes, between_bytes),
        lowest_peak_bytes=max(figures.lowest_peak_bytes, between_bytes),
        minimum=figures.minimum if between_bytes <= figures.bound_peak_bytes else None,
    )


def resident_figures(resident_bytes: int, peak_bytes: int, step_seconds: float) -> PlanFigures:
    """Figures for a unit when none like it was recorded: the resident bytes are a bound for any plan.

    Args:
        resident_bytes: bytes of parameters, buffers and optimizer states on the device.
        peak_bytes: highest point so far.
        step_seconds: seconds of the last step.
    """
    return PlanFigures(
        predicted_peak_bytes=None,
        baseline_peak_bytes=peak_bytes,
        resident_bytes=resident_bytes,
        predicted_step_seconds=None,
        baseline_step_seconds=step_seconds,
        extra_seconds=None,
        bound_peak_bytes=resident_bytes,
        bound_extra_seconds=0.0,
        lowest_peak_bytes=resident_bytes,
        status=Status.INFEASIBLE.value,
        solve_seconds=0.0,
    )


def refusal(
    figures: PlanFigures, budget_bytes: int, between_bytes: int, *,
    proven: bool, evaluation_bytes: int = 0, declined: str = "", unreached: Sequence[str] = (), optimized: bool = False,
) -> BudgetError:
    """The error that says why a budget cannot be held, and what would lower the minimum.

    Args:
        figures: the figures of the plan, or of what is resident.
        budget_bytes: the budget.
        between_bytes: highest point outside units.
        proven: whether no plan can hold the budget; otherwise only none was found.
        evaluation_bytes: highest point of any evaluation without gradients.
        declined: why gradients could not be consumed within the backward; empty if that was not tried.
        unreached: what the script does that the interception does not reach.
        optimized: whether the unit was recorded with gradients or optimizer states offloaded.
    """
    bound, lowest, plain = figures.bound_peak_bytes, figures.lowest_peak_bytes, figures.baseline_peak_bytes
    if figures.resident_bytes >= bound:
        what = "resident memory (parameters, buffers and optimizer states)"
        advice = "a stateless optimizer, smaller parameters, or bfloat16"
    elif evaluation_bytes >= bound:
        what = "an evaluation without gradients"
        advice = "evaluating in smaller batches"
    elif between_bytes >= bound:
        what = "the optimizer's update"
        advice = "a stateless optimizer, or smaller parameters"
    else:
        where = f", {figures.minimum}," if figures.minimum is not None and figures.minimum.operator else ""
        what = f"one operator{where} with its inputs and outputs"
        advice = (
            "a smaller batch or sequence, bfloat16, or a memory optimization (`lowtide run --optimizations list` tries them)"
        )
    why = (
        f"{what} needs {format_bytes(bound)} ({bound} bytes) whatever is recomputed or offloaded" if proven
        else f"the lowest plan found needs {format_bytes(lowest)} ({lowest} bytes; the proven minimum is {bound})"
    )
    if lowest > figures.resident_bytes and ROOM * lowest < plain:
        advice += f"; a budget of {format_bytes(ROOM * lowest)}, somewhat above the lowest plan found"
    elif lowest > figures.resident_bytes:
        without = "with the memory optimizations and no plan" if optimized else "without Lowtide"
        advice += f"; {without} it takes {format_bytes(plain)}"
    if declined:
        advice += f"; gradients could not be consumed in the backward: {declined}"
    if unreached:
        advice += f"; out of Lowtide's reach in this script: {'; '.join(unreached)}"
    return BudgetError(
        f"the budget of {format_bytes(budget_bytes)} cannot be held: {why}; try {advice}",
        budget_bytes=budget_bytes,
        bound_bytes=bound,
        lowest_bytes=lowest,
    )
