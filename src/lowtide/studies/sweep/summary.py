"""What a sweep found, as one frozen value: every report of it renders this value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.studies.sweep.axes import pasted
from lowtide.studies.sweep.definition import Definition, named
from lowtide.studies.sweep.results import Cell
from lowtide.studies.sweep.trends import LEAK, OPEN, Effect, Row, confirmed, effects_of, front_of, recommended, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """All that is shown of a sweep.

    Attributes:
        complete: whether every cell has a result.
        recommended: a configuration, where one ran well and holds; None otherwise.
        reason: in a sentence, why it is recommended, or why none is.
        paste: lines that apply it.
        front: configurations that no other beats in growth and in rate at once.
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
