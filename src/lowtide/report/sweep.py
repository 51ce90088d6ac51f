"""Reports of a sweep: its table as Markdown and CSV, a summary in the terminal, one HTML page, and JSON."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict
from typing import Any, Final

from rich.markup import escape

from lowtide.report.pages import render
from lowtide.report.terminal import console
from lowtide.studies.sweep.cell import last_words
from lowtide.studies.sweep.definition import named
from lowtide.studies.sweep.summary import SweepSummary
from lowtide.studies.sweep.trends import Row

_COLUMNS: Final = ("min (KB)", "Q1 (KB)", "median (KB)", "Q3 (KB)", "max (KB)", "mean (KB)", "rate (/s)", "verdict")
_KB: Final = 1000.0


def _figures(row: Row) -> list[str]:
    if not math.isfinite(row.growth_bytes):
        return [*["-"] * 7, "; ".join(sorted(set(row.ended)))]
    growth = [*zip(row.change_bytes, row.change_errors, strict=True), (row.growth_bytes, row.growth_error)]
    figures = [_figure(size / _KB, row.margin(error) / _KB, 1) for size, error in growth]
    figures.append(_figure(row.samples_per_second, row.margin(row.rate_error), 2))
    verdicts = sorted(set(row.verdicts)) + [
        f"{n} of {len(row.verdicts) + len(row.ended)} {e}" for e in sorted(set(row.ended)) for n in (row.ended.count(e),)
    ]
    return [*figures, "; ".join(verdicts)]


def _figure(value: float, margin: float, digits: int) -> str:
    return f"{value:,.{digits}f}" + (f" ± {margin:,.{digits}f}" if math.isfinite(margin) else "")


def markdown(found: SweepSummary) -> str:
    """The table as Markdown: growth of resident memory per step, and the rate, by configuration.

    Figures are means over the repeats, ± half of their 95 % interval.
    """
    axes = list(found.definition.values)
    lines = ["| " + " | ".join([*axes, *_COLUMNS]) + " |", "|" + "---|" * len(axes) + "---:|" * (len(_COLUMNS) - 1) + "---|"]
    for row in found.rows:
        values = [named((pair,)).partition("=")[2] for pair in row.config]
        lines.append("| " + " | ".join([*values, *_figures(row)]) + " |")
    return "\n".join(lines) + "\n"


def as_csv(found: SweepSummary) -> str:
    """The sweep as CSV: one line per cell, sizes in bytes."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = ("min", "q1", "median", "q3", "max")
    figures = (
        "growth_bytes",
        "bytes_per_step",
        "samples_per_second",
        "peak_bytes",
        "steps",
        "seconds",
        "verdict",
        "ended",
        "exit",
    )
    writer.writerow([*found.definition.values, "repeat", *(f"change_{n}_bytes" for n in names), *figures])
    for cell in found.cells:
        result = cell.result or {}
        change = result.get("change_bytes") or {}
        values = [value for _, value in cell.config]
        writer.writerow([*values, cell.repeat, *(change.get(n) for n in names), *(result.get(f) for f in figures)])
    return out.getvalue()


def to_json(found: SweepSummary) -> dict[str, Any]:
    """The whole sweep as JSON."""
    return {
        "cells": [
            {
                "config": dict(cell.config),
                "repeat": cell.repeat,
                **(cell.result if cell.result is not None else {"ended": "not run"}),
            }
            for cell in found.cells
        ],
        "configurations": [
            {**_plain({k: v for k, v in asdict(row).items() if k != "config"}), "config": dict(row.config)}
            for row in found.rows
        ],
        "trends": [_plain(asdict(effect)) for effect in found.effects],
        "front": [dict(row.config) for row in found.front],
        "complete": found.complete,
        "recommended": None if found.recommended is None else dict(found.recommended.config),
        "reason": found.reason,
        "paste": list(found.paste),
    }


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value

    return {name: plain(value) for name, value in found.items()}


def show(found: SweepSummary) -> None:
    """Print the summary: which effects are certain, and what is recommended. The table itself goes to standard output."""
    out = console()
    if found.definition.file.repeats > 1:
        out.print("[dim]means over the repeats; ± is half of the 95 % confidence interval[/]")
    if found.effects:
        certain = [e for e in found.effects if e.certain]
        out.print("[bold]trends[/]" if certain else "[bold]trends[/]: none is certain")
        for effect in certain:
            out.print(f"  {effect.text}", markup=False)
        singles = [e for e in found.effects if not e.certain and len(e.axes) == 1]
        for effect in singles:
            out.print(f"  {effect.text}", style="dim", markup=False)
    failed: dict[tuple[Any, ...], list[str]] = {}
    for cell in found.cells:
        if cell.result is not None and (why := last_words(cell.result)):
            failed.setdefault(cell.config, []).append(why)
    for config, said in failed.items():
        out.print(f"[red]{escape(named(config))}[/]: {escape('; '.join(sorted(set(said))))}")
    if found.recommended is None:
        out.print(f"[bold]no recommendation[/]: {found.reason}")
        return
    out.print(f"[bold green]recommended[/]: {named(found.recommended.config)}: {found.reason}")
    for line in found.paste:
        out.print(f"  {line}", markup=False)


def page(found: SweepSummary) -> str:
    """The HTML page: the table, growth against rate, and the effects."""
    front = {row.config for row in found.front}
    data = {
        "points": [
            {
                "name": named(row.config),
                "growth": row.growth_bytes,
                "rate": row.samples_per_second,
                "front": row.config in front,
                "best": found.recommended is not None and row.config == found.recommended.config,
            }
            for row in found.rows
            if row.good
        ],
        "effects": [
            {
                "text": e.text,
                "name": named(tuple(zip(e.axes, e.values, strict=True))),
                "response": e.response,
                "change": e.change,
                "low": e.low if math.isfinite(e.low) else None,
                "high": e.high if math.isfinite(e.high) else None,
            }
            for e in found.effects
        ],
    }
    return render(
        "sweep",
        data,
        found=found,
        axes=list(found.definition.values),
        columns=_COLUMNS,
        rows=[
            (
                [named((pair,)).partition("=")[2] for pair in row.config],
                _figures(row),
                found.recommended is not None and row.config == found.recommended.config,
            )
            for row in found.rows
        ],
        chosen=None if found.recommended is None else named(found.recommended.config),
    )
