"""Reports of `lowtide batch --predict` and `lowtide predict`: predicted peaks and what fits, as text and JSON."""

from __future__ import annotations

from typing import Any

from lowtide.base.units import format_bytes, format_seconds
from lowtide.report.size import new_table, time_text
from lowtide.report.terminal import console
from lowtide.studies.size.fit import Fit
from lowtide.studies.size.prediction import Prediction, Predictions


def _one_json(p: Prediction, memory: int | None) -> dict[str, Any]:
    return {
        "sizes": dict(p.sizes),
        "peak_bytes": p.peak_bytes,
        "at_most_bytes": p.at_most_bytes,
        "cold_peak_bytes": p.cold_peak_bytes,
        "step_seconds": p.step_seconds,
        "doubt": p.doubt,
        "checked": p.checked,
        "op": p.op,
        "fits": None if not memory else p.fits(memory),
    }


def prediction_json(found: Predictions) -> dict[str, Any]:
    """All predictions as JSON."""
    return {
        "degrees": dict(found.degrees),
        "aligned": found.aligned,
        "checked": found.checked,
        "memory_bytes": found.memory_bytes or None,
        "points": [_one_json(p, found.memory_bytes) for p in found.points],
    }


def show_predictions(found: Predictions) -> None:
    """Print what sizes that were not run would take."""
    memory = found.memory_bytes
    heads = ("peak", "at most", "step time (about)", *(["fits"] if memory else []), "operator at the peak")
    table = new_table("predicted, not run", ", ".join(found.degrees), *heads)
    table.columns[-1].justify = "left"
    for p in found.points:
        fits = {True: "yes", False: "no", None: "too close to tell"}[p.fits(memory)] if memory else None
        table.add_row(", ".join(f"{v:g}" for v in p.sizes.values()), format_bytes(p.peak_bytes), format_bytes(p.at_most_bytes),
                      time_text(p.step_seconds), *([fits] if fits else []), p.op)
    out = console()
    if found.points:
        out.print(table)
        told = f"for the first {found.steps} steps, if the script runs the same operators at that size"
        out.print(f"{told}; `lowtide batch` without --predict measures it", markup=False)
    else:
        out.print("all given sizes were recorded: give larger ones to predict", markup=False)
    degrees = ", ".join(f"{name}: degree {degree}" for name, degree in found.degrees.items())
    if not found.aligned:
        out.print("the recordings do not run the same operators: only their peaks could be fitted", markup=False)
    elif found.left_out:
        out.print(
            f"{found.left_out} recordings were left out: they run other operators than the largest one (as size 1 does)"
        )
    if found.aligned and not found.checked:
        out.print(f"{degrees}; no recording was left to check that: give one more size", markup=False)


def fit_json(answer: Fit) -> dict[str, Any]:
    """The whole answer as JSON."""
    plan = answer.plan
    return {
        **_one_json(answer.prediction, answer.memory_bytes),
        "memory_bytes": answer.memory_bytes,
        "fits": None if answer.memory_bytes is None else "plain" if answer.plain else "by a plan" if plan else "no",
        "floor_bytes": answer.floor_bytes,
        "plan": None if plan is None else {"peak_bytes": plan.timeline.peak_bytes, "extra_fraction": plan.extra_fraction},
    }


def show_fit(answer: Fit) -> None:
    """Print the answer in a few lines."""
    p, out = answer.prediction, console()
    sizes = ", ".join(f"{k} {v:g}" for k, v in p.sizes.items())
    roughly = "very roughly" if p.far else "about"
    out.print(f"{sizes}: peak {format_bytes(p.peak_bytes)}, at most {format_bytes(p.at_most_bytes)}"
              f"{f', in {p.op}' if p.op else ''}; a step takes {roughly} {format_seconds(p.step_seconds)}", markup=False)
    if answer.memory_bytes is None:
        return
    memory = format_bytes(answer.memory_bytes)
    if answer.plain:
        out.print(f"fits in {memory}", markup=False)
    elif answer.plan is not None:
        close = "" if answer.plain is False else " (without one it is too close to tell)"
        out.print(f"fits in {memory} with a plan that takes {answer.plan.extra_fraction:.1%} more time{close}: "
                  f"lowtide run --budget {answer.memory_bytes} ...", markup=False)
    elif answer.plain is None:
        out.print(f"too close to {memory} to tell: {answer.why_no_plan or 'no plan certainly fits'}", markup=False)
    else:
        floor = "" if answer.floor_bytes is None else f": recomputing cannot go below {format_bytes(answer.floor_bytes)}"
        moving = " (without offloading, which `lowtide run` does too)" if floor else ""
        out.print(f"does not fit in {memory}{floor}{moving}{answer.why_no_plan and f': {answer.why_no_plan}'}", markup=False)
