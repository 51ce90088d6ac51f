"""Reports of the smallest budget that works and of each memory optimization alone: tables, a page, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.table import Table

from lowtide.base.lever_catalogue import LEVERS
from lowtide.base.units import format_bytes, format_seconds
from lowtide.report.pages import render
from lowtide.report.terminal import console
from lowtide.studies.size.minimum import LeverTrials, MinimumStudy
from lowtide.studies.size.trial import TrialResult

_BAR: Final = 28


def new_table(title: str, *heads: str) -> Table:
    """A table that aligns its first column to the left, and the others, which hold numbers, to the right."""
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    return table


def time_text(seconds: float | None) -> str:
    """Seconds as text; empty if they are not known."""
    return "" if seconds is None else format_seconds(seconds)


def _ran_json(ran: TrialResult) -> dict[str, Any]:
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


def minimum_json(study: MinimumStudy) -> dict[str, Any]:
    """The whole study as JSON; the first keys describe the set of levers that needs the least memory."""
    plain, least = study.plain, study.least
    return {
        "minimum_bytes": None if least is None else least.minimum_bytes,
        "fails_at_bytes": None if least is None else least.fails_at_bytes,
        "set": None if least is None else least.name,
        "plain": {**_ran_json(plain), "warm_peak_bytes": plain.warm_peak_bytes, "resident_bytes": plain.resident_bytes},
        "declined": dict(study.declined),
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
            for f in study.sets
        ],
        "runs": [_ran_json(r) for f in study.sets for r in f.runs],
    }


def _title(name: str) -> str:
    """The name of a set of memory optimizations in reports; its name in the JSON file says ``levers``."""
    return "baseline" if name == "plain" else name.replace("levers", "optimizations")


def _minimum_rows(study: MinimumStudy) -> list[list[str]]:
    plain = study.plain
    rows = [["baseline, first step", format_bytes(plain.cold_peak_bytes), "", "", "", "", ""],
            ["baseline, later steps", format_bytes(plain.warm_peak_bytes), "100 %", "", time_text(plain.step_seconds), "1.00",
             ""]]
    for f in study.sets:
        if f.minimum_bytes is None:
            rows.append([_title(f.name), "none", "", "", "", "", str(len(f.runs))])
            continue
        at = f.at_minimum
        seconds = None if at is None else at.step_seconds
        slower = "" if seconds is None or not plain.step_seconds else f"{seconds / plain.step_seconds:.2f}"
        fails = "" if f.fails_at_bytes is None else format_bytes(f.fails_at_bytes)
        share = f"{f.minimum_bytes / plain.peak_bytes:.0%}".replace("%", " %")
        rows.append([
            _title(f.name), format_bytes(f.minimum_bytes), share, fails, time_text(seconds), slower, str(len(f.runs)),
        ])
    return rows


_MINIMUM_HEADS: Final = ("", "peak or budget", "of baseline", "fails at", "step time", "x baseline", "runs")


def show_minimum(study: MinimumStudy) -> None:
    """Print the smallest budgets, and what they cost in time."""
    table = new_table("smallest budget that works", *_MINIMUM_HEADS)
    for row in _minimum_rows(study):
        table.add_row(*row)
    out = console()
    out.print(table)
    _show_curve(study)
    for f in study.sets:
        if f.survived is not None and f.minimum_bytes is not None:
            held = f"{len(f.survived.steps)} steps at {format_bytes(f.minimum_bytes)} under a hard cap"
            own = bool(f.survived.steps) and not f.survived.lacks_memory
            why = f"{'; then the script ended by itself' if own else ' FAILED'}: {f.survived.message}"
            out.print(f"{_title(f.name)}: {held}{'' if f.survived.passes else why}", markup=False)
        if f.reason:
            out.print(f"{_title(f.name)}: {f.reason}", markup=False)
    for name, text in study.declined.items():
        out.print(f"{name} is not used: {text}", markup=False)


def _show_curve(study: MinimumStudy) -> None:
    points = [(_title(name), *point) for name, line in study.curve for point in line]
    if not points:
        return
    longest = max(seconds for _, _, seconds in points)
    table = new_table("step time by memory", "", "memory", "step time", "")
    table.columns[-1].justify = "left"
    for name, memory, seconds in points:
        table.add_row(name, format_bytes(memory), time_text(seconds), "█" * round(_BAR * seconds / longest))
    console().print(table)


def minimum_page(study: MinimumStudy) -> str:
    """The HTML page, with the curve of step time against memory."""
    plain, best = study.plain, study.least
    least = None if best is None else best.minimum_bytes
    summary = f"baseline peak {format_bytes(plain.peak_bytes)}"
    if least is not None:
        summary += f"; the smallest budget that works is {format_bytes(least)}, {100 * least / plain.peak_bytes:.0f} % of it"
    plot = {
        "title": "Step time by memory",
        "text": "every run that stayed within its budget, and the baseline run",
        "x": {"kind": "bytes", "label": "memory"},
        "y": {"kind": "seconds", "label": "step time"},
        "series": [{"name": _title(name), "points": points} for name, points in study.curve],
    }
    return render("size", [plot], title=f"The smallest budget for {Path(study.script).name}", summary=summary, plots=[plot],
                  head=_MINIMUM_HEADS, rows=_minimum_rows(study))


def levers_json(trials: LeverTrials) -> dict[str, Any]:
    """All trials as JSON; savings are relative to the run without levers."""
    return {
        "plain": _ran_json(trials.plain),
        "lowest_plan_bytes": trials.lowest_plan_bytes,
        "levers": [
            {
                "name": name,
                "exact": LEVERS[name].exact,
                "bits": LEVERS[name].bits,
                "text": trials.text(name),
                "used": trials.is_used(name),
                "saving_bytes": trials.saving_bytes(name),
                "floor_saving_bytes": trials.floor_saving_bytes(name),
                **_ran_json(ran),
            }
            for name, ran in trials.runs.items()
        ],
    }


def show_levers(trials: LeverTrials) -> None:
    """Print what each lever saves on this script, and whether it changes the bits."""
    out, lowest = console(), trials.lowest_plan_bytes
    title = f"memory optimizations, each alone: baseline peak {format_bytes(trials.plain.warm_peak_bytes)}"
    title += "" if lowest is None else f", lowest plan {format_bytes(lowest)}"
    table = new_table(title, "optimization", "lowers the baseline peak by", "lowers the lowest plan by", "bits")
    table.columns[3].justify = "left"
    table.columns[0].no_wrap = True
    for name in trials.runs:
        saved = [trials.saving_bytes(name), trials.floor_saving_bytes(name)]
        table.add_row(name, *("" if s is None else format_bytes(s) for s in saved), LEVERS[name].bits)
    out.print(table)
    for name in trials.runs:
        out.print(f"{name}: {trials.text(name)}", markup=False)
    automatic = ", ".join(x.name for x in LEVERS.values() if x.automatic)
    out.print(f"{automatic} are used by default if a budget needs them; the others only with --allow NAME", markup=False)


def number(x: float) -> str:
    """A number to three significant digits or, from 100 on, to the nearest whole number."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
