"""Sizes for people: the smallest budget that works, throughput by size, and predictions; tables, pages and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from lowtide.base.lever_catalogue import LEVERS
from lowtide.base.units import format_bytes, format_seconds
from lowtide.report.pages import render
from lowtide.report.terminal import console
from lowtide.studies.size.fit import Fit
from lowtide.studies.size.minimum import Found
from lowtide.studies.size.predict import Model, Prediction
from lowtide.studies.size.throughput import Point, knee, largest, to_json
from lowtide.studies.size.trial import Ran
from lowtide.studies.size.vary import Vary

_BAR: Final = 28


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


# --- lowtide min -----------------------------------------------------------------------------------------------------


def _ran_json(ran: Ran) -> dict[str, Any]:
    return {
        "budget_bytes": ran.asked.budget_bytes,
        "cap_bytes": ran.asked.cap_bytes,
        "allow": sorted(ran.asked.allow),
        "ended": ran.ended,
        "message": ran.message,
        "passes": ran.passes,
        "steps": len(ran.steps),
        "cold_peak_bytes": ran.cold_peak_bytes,
        "peak_bytes": ran.peak_bytes,
        "step_seconds": ran.step_seconds,
    }


def least_of(found: Sequence[Found]) -> Found | None:
    """The set of levers that needs least, of two that need the same the one with fewer levers; None where none works."""
    return min((f for f in found if f.minimum_bytes is not None), key=lambda f: f.minimum_bytes or 0, default=None)


def minimum_json(plain: Ran, found: Sequence[Found], declined: Mapping[str, str]) -> dict[str, Any]:
    """Everything; the first keys are of the set of levers that needs least."""
    least = least_of(found)
    return {
        "minimum_bytes": None if least is None else least.minimum_bytes,
        "fails_at_bytes": None if least is None else least.fails_at_bytes,
        "set": None if least is None else least.name,
        "plain": {**_ran_json(plain), "warm_peak_bytes": plain.warm_peak_bytes, "resident_bytes": plain.resident_bytes},
        "declined": dict(declined),
        "sets": [
            {
                "name": f.name,
                "levers": sorted(f.allow),
                "minimum_bytes": f.minimum_bytes,
                "fails_at_bytes": f.fails_at_bytes,
                "floor_bytes": f.floor_bytes,
                "step_seconds": None if f.at_minimum is None else f.at_minimum.step_seconds,
                "survived_steps": None if f.survived is None or not f.survived.passes else len(f.survived.steps),
                "reason": f.reason,
                "runs": [_ran_json(r) for r in f.runs],
            }
            for f in found
        ],
        "runs": [_ran_json(r) for f in found for r in f.runs],
    }


def _minimum_rows(plain: Ran, found: Sequence[Found]) -> list[list[str]]:
    rows = [["plain, first step", format_bytes(plain.cold_peak_bytes), "", "", "", "", ""],
            ["plain, later steps", format_bytes(plain.warm_peak_bytes), "100 %", "", _time(plain.step_seconds), "1.00", ""]]
    for f in found:
        if f.minimum_bytes is None:
            rows.append([f.name, "none", "", "", "", "", str(len(f.runs))])
            continue
        at = f.at_minimum
        seconds = None if at is None else at.step_seconds
        slower = "" if seconds is None or not plain.step_seconds else f"{seconds / plain.step_seconds:.2f}"
        fails = "" if f.fails_at_bytes is None else format_bytes(f.fails_at_bytes)
        share = f"{f.minimum_bytes / plain.peak_bytes:.0%}".replace("%", " %")
        rows.append([f.name, format_bytes(f.minimum_bytes), share, fails, _time(seconds), slower, str(len(f.runs))])
    return rows


_MINIMUM_HEADS: Final = ("", "peak or budget", "of plain", "fails at", "a step", "x plain", "runs")


def show_minimum(plain: Ran, found: Sequence[Found], declined: Mapping[str, str]) -> None:
    """The smallest budgets, and what they cost in time."""
    table = _table("the least memory that works", *_MINIMUM_HEADS)
    for row in _minimum_rows(plain, found):
        table.add_row(*row)
    out = console()
    out.print(table)
    _show_curve(plain, found)
    for f in found:
        if f.survived is not None and f.minimum_bytes is not None:
            held = f"{len(f.survived.steps)} steps at {format_bytes(f.minimum_bytes)} under a hard cap"
            own = bool(f.survived.steps) and not f.survived.lacks_memory
            why = f"{'; then the script ended by itself' if own else ' FAILED'}: {f.survived.message}"
            out.print(f"{f.name}: {held}{'' if f.survived.passes else why}", markup=False)
        if f.reason:
            out.print(f"{f.name}: {f.reason}", markup=False)
    for name, text in declined.items():
        out.print(f"{name} is not used: {text}", markup=False)


def _curve(plain: Ran, found: Sequence[Found]) -> list[tuple[str, list[tuple[int, float]]]]:
    """Points of the curve for each set of levers: (budget, seconds of a step).

    A run without a cap at its budget may have crossed it, so only runs that stayed within are points.
    """
    lines = []
    if plain.step_seconds:
        lines.append(("plain", [(plain.peak_bytes, plain.step_seconds)]))
    for f in found:
        within = {
            r.asked.budget_bytes: r.step_seconds for r in f.runs if r.passes and not r.over_bytes and r.asked.budget_bytes
        }
        lines.append((f.name, sorted((budget, seconds) for budget, seconds in within.items() if seconds)))
    return lines


def _show_curve(plain: Ran, found: Sequence[Found]) -> None:
    points = [(name, *point) for name, line in _curve(plain, found) for point in line]
    if not points:
        return
    longest = max(seconds for _, _, seconds in points)
    table = _table("time of a step by memory", "levers", "memory", "a step", "")
    table.columns[-1].justify = "left"
    for name, memory, seconds in points:
        table.add_row(name, format_bytes(memory), _time(seconds), "█" * round(_BAR * seconds / longest))
    console().print(table)


def minimum_page(script: str, plain: Ran, found: Sequence[Found]) -> str:
    """A page with the curve of memory against time."""
    best = least_of(found)
    least = None if best is None else best.minimum_bytes
    summary = f"plain peak {format_bytes(plain.peak_bytes)}"
    if least is not None:
        summary += f"; the least that works is {format_bytes(least)}, {100 * least / plain.peak_bytes:.0f} % of it"
    plot = {
        "title": "Time of a step by memory",
        "text": "every run that stayed within its budget, and the plain run",
        "x": {"kind": "bytes", "label": "memory"},
        "y": {"kind": "seconds", "label": "a step"},
        "series": [{"name": name, "points": points} for name, points in _curve(plain, found)],
    }
    return render("size", [plot], title=f"The least memory for {Path(script).name}", summary=summary, plots=[plot],
                  head=_MINIMUM_HEADS, rows=_minimum_rows(plain, found))


# --- lowtide run --levers list ---------------------------------------------------------------------------------------


def levers_json(plain: Ran, found: Mapping[str, Ran]) -> dict[str, Any]:
    """Everything; savings against the run without levers (named ``""`` in ``found``)."""
    return {
        "plain": _ran_json(plain),
        "lowest_plan_bytes": _planned(found[""], "lowest_peak_bytes"),
        "levers": [
            {
                "name": name,
                "exact": LEVERS[name].exact,
                "bits": LEVERS[name].bits,
                "text": _lever_text(name, ran),
                "used": _is_used(name, ran),
                "saving_bytes": _saved(found, name, "baseline_peak_bytes"),
                "floor_saving_bytes": _saved(found, name, "lowest_peak_bytes"),
                **_ran_json(ran),
            }
            for name, ran in found.items() if name
        ],
    }


def _planned(ran: Ran, key: str) -> int | None:
    return None if ran.plan is None else int(ran.plan[key])


def _saved(found: Mapping[str, Ran], name: str, key: str) -> int | None:
    """By how much a figure of the plan is lower with a lever."""
    before, after = _planned(found[""], key), _planned(found[name], key)
    return before - after if before is not None and after is not None and _is_used(name, found[name]) else None


def _is_used(name: str, ran: Ran) -> bool:
    return ran.passes and any(x["name"] == name and x["used"] for x in ran.levers)


def _lever_text(name: str, ran: Ran) -> str:
    """What the lever did in a run, or why it did nothing."""
    told = next((str(x["text"]) for x in ran.levers if x["name"] == name), "there was nothing for it to do")
    if ran.passes or ran.ended == "refused":  # that the budget of the trial cannot be held says nothing of the lever
        return told
    return ran.message.removeprefix(f"LeverError: {name}: ")


def show_levers(plain: Ran, found: Mapping[str, Ran]) -> None:
    """Each lever with what it saves on this script, and its effect on the bits."""
    out = console()
    lowest = _planned(found[""], "lowest_peak_bytes")
    title = f"levers, each alone: plain peak {format_bytes(plain.warm_peak_bytes)}"
    title += "" if lowest is None else f", lowest plan {format_bytes(lowest)}"
    table = _table(title, "lever", "off the plain peak", "off the lowest plan", "bits")
    table.columns[3].justify = "left"
    table.columns[0].no_wrap = True
    for name in found:
        if name:
            saved = [_saved(found, name, key) for key in ("baseline_peak_bytes", "lowest_peak_bytes")]
            told = ["" if s is None else format_bytes(s) for s in saved]
            table.add_row(name, *told, LEVERS[name].bits)
    out.print(table)
    for name, ran in found.items():
        if name:
            out.print(f"{name}: {_lever_text(name, ran)}", markup=False)
    out.print("exact levers are used without being asked for where a budget needs them; others by --allow NAME", markup=False)


# --- lowtide batch ---------------------------------------------------------------------------------------------------


def batch_json(vary: Vary, points: Sequence[Point]) -> dict[str, Any]:
    """Everything."""
    best, plain, held = knee(points), largest(points, "plain"), largest(points, "budget")
    return {
        "axes": [{"name": n, "kind": a.kind} for n, a in zip(vary.names, vary.axes, strict=True)],
        "points": [to_json(p) for p in points],
        "knee": None if best is None else to_json(best)["value"],
        "largest": None if plain is None else to_json(plain)["value"],
        "largest_under_budget": None if held is None else to_json(held)["value"],
    }


def _batch_rows(points: Sequence[Point], *, per_sample: bool) -> list[list[str]]:
    best = knee(points) if per_sample else None
    rows = []
    for p in points:
        name = ", ".join(p.values)
        if p.rate is None:
            rows.append([name, p.how, p.ended, "", "", "", ""])
            continue
        spread = f"{_number(p.rate.low)}-{_number(p.rate.high)}"
        peaks = [format_bytes(b or 0) for b in (p.cold_peak_bytes, p.peak_bytes)]
        rows.append([name, p.how, _number(p.rate.median), spread, *peaks, "knee" if p is best else ""])
    return rows


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _batch_heads(vary: Vary, *, per_sample: bool) -> tuple[str, ...]:
    what = "samples" if per_sample else "steps"
    return (", ".join(vary.names), "how", f"{what}/s", "quartiles", "peak, first step", "peak", "")


def show_batch(vary: Vary, points: Sequence[Point], *, per_sample: bool, whole: bool = True) -> None:
    """The table, and if the whole was run the knee and the largest that fits."""
    table = _table("throughput and peak by size", *_batch_heads(vary, per_sample=per_sample))
    for row in _batch_rows(points, per_sample=per_sample and whole):
        table.add_row(*row)
    out = console()
    out.print(table)
    name = ", ".join(vary.names)
    best, plain, held = (knee(points), largest(points, "plain"), largest(points, "budget")) if whole else (None, None, None)
    if best is not None and per_sample:
        what = "the smallest with at least 95 % of the highest throughput"
        out.print(f"knee: {name} {', '.join(best.values)}, {what}", markup=False)
    if plain is not None:
        out.print(f"largest that fits: {', '.join(plain.values)}", markup=False)
    if held is not None and held is not plain:
        out.print(f"largest that fits under the budget: {', '.join(held.values)}", markup=False)
    for p in points:
        if p.message:
            out.print(f"{', '.join(p.values)} ({p.how}): {p.message}", markup=False)


def batch_page(script: str, vary: Vary, points: Sequence[Point], *, per_sample: bool) -> str:
    """A page with throughput and peak."""
    best = knee(points)
    x = {"kind": "number", "label": vary.names[0]}
    log = len(points) > 2 and all(float(p.values[0]) > 0 for p in points)

    def lines(of: Any) -> list[dict[str, Any]]:
        groups: dict[str, list[tuple[float, float]]] = {}
        for p in points:
            if p.fits:
                others = ", ".join(f"{n} {v}" for n, v in zip(vary.names[1:], p.values[1:], strict=True))
                groups.setdefault(" ".join(filter(None, [p.how, others])), []).append((float(p.values[0]), of(p)))
        return [{"name": name, "points": sorted(found), "dash": name.startswith("budget")} for name, found in groups.items()]

    plots = [
        {"title": "Throughput", "text": "median over the steps that are neither cold nor warming up", "x": x, "log": log,
         "y": {"kind": "number", "label": "samples a second" if per_sample else "steps a second"},
         "series": lines(lambda p: p.rate.median)},
        {"title": "Peak", "text": "of torch's allocator, over all steps", "x": x, "log": log,
         "y": {"kind": "bytes", "label": "peak"}, "series": lines(lambda p: p.peak_bytes)},
    ]
    summary = "each size in a process of its own"
    if best is not None and per_sample:
        what = "the smallest with at least 95 % of the highest throughput"
        summary += f"; the knee is at {', '.join(best.values)}, {what}"
    shown = [p for p in plots if p["series"]]
    return render("size", shown, title=f"Sizes of {Path(script).name}", summary=summary, plots=shown,
                  head=_batch_heads(vary, per_sample=per_sample), rows=_batch_rows(points, per_sample=per_sample))


# --- predictions -----------------------------------------------------------------------------------------------------


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


def prediction_json(model: Model, predictions: Sequence[Prediction], memory: int) -> dict[str, Any]:
    """Everything."""
    return {
        "degrees": dict(zip(model.names, model.degrees, strict=True)),
        "aligned": model.aligned,
        "checked": model.checked,
        "memory_bytes": memory or None,
        "points": [_one_json(p, memory) for p in predictions],
    }


def show_predictions(model: Model, predictions: Sequence[Prediction], memory: int, steps: int) -> None:
    """What larger sizes would take."""
    heads = ("peak", "at most", "a step, about", *(["fits"] if memory else []), "where the peak is")
    table = _table("predicted, not run", ", ".join(model.names), *heads)
    table.columns[-1].justify = "left"
    for p in predictions:
        fits = {True: "yes", False: "no", None: "too close to tell"}[p.fits(memory)] if memory else None
        table.add_row(", ".join(f"{v:g}" for v in p.sizes.values()), format_bytes(p.peak_bytes), format_bytes(p.at_most_bytes),
                      _time(p.step_seconds), *([fits] if fits else []), p.op)
    out = console()
    if predictions:
        out.print(table)
        told = f"of the first {steps} steps, if the script runs the same operators at that size"
        out.print(f"{told}; `lowtide batch` without --predict runs it", markup=False)
    else:
        out.print("all sizes that were given were recorded: give larger ones to be predicted", markup=False)
    _show_model(model)


def _show_model(model: Model) -> None:
    found = ", ".join(f"{n}: degree {d}" for n, d in zip(model.names, model.degrees, strict=True))
    if not model.aligned:
        console().print("the recordings do not run the same operators: only their peaks could be fitted", markup=False)
    elif model.left_out:
        console().print(f"{model.left_out} recordings run other operators than the largest (as a size of one does): left out")
    if model.aligned and not model.checked:
        console().print(f"{found}; no recording was left to check that with: give one more size", markup=False)


def fit_json(answer: Fit) -> dict[str, Any]:
    """Everything."""
    plan = answer.plan
    return {
        **_one_json(answer.prediction, answer.memory_bytes),
        "memory_bytes": answer.memory_bytes,
        "fits": None if answer.memory_bytes is None else "plain" if answer.plain else "by a plan" if plan else "no",
        "floor_bytes": answer.floor_bytes,
        "plan": None if plan is None else {"peak_bytes": plan.timeline.peak_bytes, "extra_fraction": plan.extra_fraction},
    }


def show_fit(answer: Fit) -> None:
    """The answer in a few lines."""
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
        close = "" if answer.plain is False else " (plainly it is too close to tell)"
        out.print(f"fits in {memory} by a plan that takes {answer.plan.extra_fraction:.1%} more time{close}: "
                  f"lowtide run --budget {answer.memory_bytes} ...", markup=False)
    elif answer.plain is None:
        out.print(f"too close to {memory} to tell: {answer.why_no_plan or 'no plan was found that makes sure'}", markup=False)
    else:
        floor = "" if answer.floor_bytes is None else f": no recomputing goes below {format_bytes(answer.floor_bytes)}"
        moving = " (moving, which `lowtide run` does too, is not reckoned with)" if floor else ""
        out.print(f"does not fit in {memory}{floor}{moving}{answer.why_no_plan and f': {answer.why_no_plan}'}", markup=False)
