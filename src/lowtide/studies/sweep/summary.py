"""The findings of a sweep as one frozen value, which every report renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.studies.sweep.axes import pasted
from lowtide.studies.sweep.definition import Definition, named
from lowtide.studies.sweep.results import Cell
from lowtide.studies.sweep.trends import LEAK, OPEN, Effect, Row, confirmed, effects_of, front_of, recommended, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """Everything that reports show of a sweep.

    Attributes:
        definition: the sweep.
        cells: its cells.
        rows: figures of each configuration that has run.
        effects: effects of the axes.
        complete: whether every cell has a result.
        recommended: the recommended configuration; None if none ran well, or if it did not hold up on the second command.
        reason: one sentence on why it is recommended, or why none is.
        paste: lines that apply the recommended configuration.
        front: configurations that no other beats in both growth and throughput.
    """

    definition: Definition
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    effects: tuple[Effect, ...]
    complete: bool
    recommended: Row | None
    reason: str
    paste: tuple[str, ...]
    front: tuple[Row, ...]


def summary_of(definition: Definition, cells: Sequence[Cell], second: Sequence[Cell]) -> SweepSummary:
    """Derive the summary from the results.

    Args:
        definition: the sweep.
        cells: the cells of the sweep.
        second: the cells of the confirming command; empty if none is given, or if it has not run yet.
    """
    rows = rows_of(definition, cells)
    complete = all(cell.result is not None for cell in cells)
    chosen = recommended(definition, rows) if complete else None
    reason = "no configuration ran well" if complete else "the sweep is not complete"
    if chosen is not None:
        reason = "no other certainly grows less, and none that grows as little is certainly faster"
        if LEAK in chosen.verdicts:
            reason = f"every configuration that ran well leaks; of these, {reason}"
        elif OPEN in chosen.verdicts:
            reason += "; whether it leaks is open: it ran too few steps to tell"
    if chosen is not None and definition.confirm:
        again = {row.config: row for row in rows_of(definition, second)}
        holds, why = confirmed(again.get(chosen.config), again.get(definition.baseline))
        if not holds:
            reason, chosen = f"{named(chosen.config)} was best, but {why}", None
        else:
            reason = f"{reason}; {why}"
    return SweepSummary(
        definition=definition,
        cells=tuple(cells),
        rows=tuple(rows),
        effects=tuple(effects_of(definition, cells)),
        complete=complete,
        recommended=chosen,
        reason=reason,
        paste=() if chosen is None else tuple(pasted(definition.settings(chosen.config))),
        front=tuple(front_of(rows)),
    )
