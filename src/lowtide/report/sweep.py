"""A sweep for people: the table in the terminal, as Markdown and as CSV, one HTML page, and everything as JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.markup import escape

from lowtide.report.pages import render
from lowtide.report.terminal import console
from lowtide.studies.sweep.axes import pasted
from lowtide.studies.sweep.cell import last_words
from lowtide.studies.sweep.definition import Definition, named
from lowtide.studies.sweep.results import Cell
from lowtide.studies.sweep.trends import LEAK, OPEN, Effect, Row, confirmed, effects_of, front_of, recommended, rows_of

_COLUMNS: Final = ("min (KB)", "Q1 (KB)", "median (KB)", "Q3 (KB)", "max (KB)", "mean (KB)", "rate (/s)", "verdict")
_KB: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is shown of a sweep.

    Attributes:
        complete: whether every cell has a result.
        recommended: a configuration, where one ran well and holds; None otherwise.
        reason: in a sentence, why it is recommended, or why none is.
        paste: lines that apply it.
    """

    definition: Definition
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    effects: tuple[Effect, ...]
    complete: bool
    recommended: Row | None
    reason: str
    paste: tuple[str, ...]


def report_of(definition: Definition, cells: Sequence[Cell], second: Sequence[Cell]) -> Report:
    """What the results say.

    Args:
        definition: the sweep.
        cells: of the sweep.
        second: of the command that confirms; empty where none is given, or it has not run yet.
    """
    rows = rows_of(definition, cells)
    complete = all(cell.result is not None for cell in cells)
    chosen = recommended(definition, rows) if complete else None
    reason = "no configuration ran well" if complete else "the sweep is not complete"
    if chosen is not None:
        reason = "none grows less for certain, and of those that grow as little none is faster for certain"
        if LEAK in chosen.verdicts:
            reason = f"every configuration that ran well leaks; of these {reason}"
        elif OPEN in chosen.verdicts:
            reason += "; whether it leaks is open: its steps were too few to tell"
    if chosen is not None and definition.confirm:
        again = {row.config: row for row in rows_of(definition, second)}
        holds, why = confirmed(again.get(chosen.config), again.get(definition.baseline))
        if not holds:
            reason, chosen = f"{named(chosen.config)} was best, but {why}", None
        else:
            reason = f"{reason}; {why}"
    return Report(
        definition=definition,
        cells=tuple(cells),
        rows=tuple(rows),
        effects=tuple(effects_of(definition, cells)),
        complete=complete,
        recommended=chosen,
        reason=reason,
        paste=() if chosen is None else tuple(pasted(definition.settings(chosen.config))),
    )


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


def markdown(report: Report) -> str:
    """The table: growth of resident memory per step, and the rate, by configuration; means over repeats, and half of their
    95 % intervals.
    """
    axes = list(report.definition.values)
    lines = ["| " + " | ".join([*axes, *_COLUMNS]) + " |", "|" + "---|" * len(axes) + "---:|" * (len(_COLUMNS) - 1) + "---|"]
    for row in report.rows:
        values = [named((pair,)).partition("=")[2] for pair in row.config]
        lines.append("| " + " | ".join([*values, *_figures(row)]) + " |")
    return "\n".join(lines) + "\n"


def as_csv(report: Report) -> str:
    """One line per cell, in bytes."""
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
    writer.writerow([*report.definition.values, "repeat", *(f"change_{n}_bytes" for n in names), *figures])
    for cell in report.cells:
        found = cell.result or {}
        change = found.get("change_bytes") or {}
        values = [value for _, value in cell.config]
        writer.writerow([*values, cell.repeat, *(change.get(n) for n in names), *(found.get(f) for f in figures)])
    return out.getvalue()


def to_json(report: Report) -> dict[str, Any]:
    """Everything."""
    return {
        "cells": [
            {
                "config": dict(cell.config),
                "repeat": cell.repeat,
                **(cell.result if cell.result is not None else {"ended": "not run"}),
            }
            for cell in report.cells
        ],
        "configurations": [
            {**_plain({k: v for k, v in asdict(row).items() if k != "config"}), "config": dict(row.config)}
            for row in report.rows
        ],
        "trends": [_plain(asdict(effect)) for effect in report.effects],
        "front": [dict(row.config) for row in front_of(report.rows)],
        "complete": report.complete,
        "recommended": None if report.recommended is None else dict(report.recommended.config),
        "reason": report.reason,
        "paste": list(report.paste),
    }


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value

    return {name: plain(value) for name, value in found.items()}


def show(report: Report) -> None:
    """The summary: what is certain, what is recommended. The table itself goes to standard output."""
    out = console()
    if report.definition.file.repeats > 1:
        out.print("[dim]means over the repeats; ± is half of their 95 % interval[/]")
    if report.effects:
        certain = [e for e in report.effects if e.certain]
        out.print("[bold]trends[/]" if certain else "[bold]trends[/]: none is certain")
        for effect in certain:
            out.print(f"  {effect.text}", markup=False)
        singles = [e for e in report.effects if not e.certain and len(e.axes) == 1]
        for effect in singles:
            out.print(f"  {effect.text}", style="dim", markup=False)
    failed: dict[tuple[Any, ...], list[str]] = {}
    for cell in report.cells:
        if cell.result is not None and (why := last_words(cell.result)):
            failed.setdefault(cell.config, []).append(why)
    for config, said in failed.items():
        out.print(f"[red]{escape(named(config))}[/]: {escape('; '.join(sorted(set(said))))}")
    if report.recommended is None:
        out.print(f"[bold]no recommendation[/]: {report.reason}")
        return
    out.print(f"[bold green]recommended[/]: {named(report.recommended.config)}: {report.reason}")
    for line in report.paste:
        out.print(f"  {line}", markup=False)


def page(report: Report) -> str:
    """The page: table, growth against rate, effects."""
    front = {row.config for row in front_of(report.rows)}
    data = {
        "points": [
            {
                "name": named(row.config),
                "growth": row.growth_bytes,
                "rate": row.samples_per_second,
                "front": row.config in front,
                "best": report.recommended is not None and row.config == report.recommended.config,
            }
            for row in report.rows
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
            for e in report.effects
        ],
    }
    return render(
        "sweep",
        data,
        report=report,
        axes=list(report.definition.values),
        columns=_COLUMNS,
        rows=[
            (
                [named((pair,)).partition("=")[2] for pair in row.config],
                _figures(row),
                report.recommended is not None and row.config == report.recommended.config,
            )
            for row in report.rows
        ],
        chosen=None if report.recommended is None else named(report.recommended.config),
    )
