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
from lowtide.studies.size.minimum import Found
from lowtide.studies.size.trial import Ran

_BAR: Final = 28


def new_table(title: str, *heads: str) -> Table:
    """A table with its numbers at the right."""
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    return table


def time_text(seconds: float | None) -> str:
    """Seconds, or nothing where they are not known."""
    return "" if seconds is None else format_seconds(seconds)


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
            ["plain, later steps", format_bytes(plain.warm_peak_bytes), "100 %", "", time_text(plain.step_seconds), "1.00",
             ""]]
    for f in found:
        if f.minimum_bytes is None:
            rows.append([f.name, "none", "", "", "", "", str(len(f.runs))])
            continue
        at = f.at_minimum
        seconds = None if at is None else at.step_seconds
        slower = "" if seconds is None or not plain.step_seconds else f"{seconds / plain.step_seconds:.2f}"
        fails = "" if f.fails_at_bytes is None else format_bytes(f.fails_at_bytes)
        share = f"{f.minimum_bytes / plain.peak_bytes:.0%}".replace("%", " %")
        rows.append([f.name, format_bytes(f.minimum_bytes), share, fails, time_text(seconds), slower, str(len(f.runs))])
    return rows


_MINIMUM_HEADS: Final = ("", "peak or budget", "of plain", "fails at", "a step", "x plain", "runs")


def show_minimum(plain: Ran, found: Sequence[Found], declined: Mapping[str, str]) -> None:
    """The smallest budgets, and what they cost in time."""
    table = new_table("the least memory that works", *_MINIMUM_HEADS)
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
    table = new_table("time of a step by memory", "levers", "memory", "a step", "")
    table.columns[-1].justify = "left"
    for name, memory, seconds in points:
        table.add_row(name, format_bytes(memory), time_text(seconds), "█" * round(_BAR * seconds / longest))
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
    table = new_table(title, "lever", "off the plain peak", "off the lowest plan", "bits")
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


def number(x: float) -> str:
    """Three digits at least."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
