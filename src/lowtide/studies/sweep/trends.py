"""Statistics of a sweep: figures per configuration, effects of its axes with intervals, and a recommendation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lowtide.base.units import format_bytes
from lowtide.studies.leak.verdict import TOLERANCE, Verdict
from lowtide.studies.sweep.axes import Value
from lowtide.studies.sweep.definition import Config, Definition, named
from lowtide.studies.sweep.results import Cell

LEAK: Final = Verdict.LEAK.value
OPEN: Final = Verdict.INCONCLUSIVE.value
CONFIDENCE: Final = 0.95
"""Confidence level of the intervals; effects are tested together (Bonferroni)."""
NEAR: Final = 0.98
"""A throughput of at least this share of another one does not count as lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration: means over its repeats.

    Attributes:
        config: the configuration.
        change_bytes: min, Q1, median, Q3 and max of the growth per step; NaN if nothing was measured.
        change_errors: their standard errors over the repeats; NaN for a single repeat.
        growth_bytes: mean growth per step, over the repeats, of resident memory and of what child processes took.
        growth_error: its standard error; NaN for a single repeat.
        samples_per_second: mean throughput.
        rate_error: its standard error; NaN for a single repeat.
        verdicts: the leak verdicts of the repeats that were measured.
        ended: how repeats ended that did not end well.
    """

    config: Config
    change_bytes: tuple[float, ...]
    change_errors: tuple[float, ...]
    growth_bytes: float
    growth_error: float
    samples_per_second: float
    rate_error: float
    verdicts: tuple[str, ...]
    ended: tuple[str, ...]

    def margin(self, error: float) -> float:
        """Half-width of the interval of a mean over the repeats with this standard error; NaN for a single repeat."""
        repeats = len(self.verdicts)
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, repeats - 1)) * error if repeats > 1 else math.nan

    @property
    def good(self) -> bool:
        """Whether all its repeats ran well."""
        return not self.ended and math.isfinite(self.growth_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of one value of an axis, compared with the axis's first value and averaged over the other axes; or the
    interaction of two values: their joint effect beyond the sum of the two.

    Attributes:
        axes: one axis, or two for an interaction.
        values: the values of these axes.
        response: ``growth_bytes`` or ``samples_per_second``.
        change: change of the response.
        low, high: interval of the change; NaN if the noise cannot be estimated.
        text: the effect in one sentence.
    """

    axes: tuple[str, ...]
    values: tuple[Value, ...]
    response: str
    change: float
    low: float
    high: float
    text: str

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def rows_of(definition: Definition, cells: Sequence[Cell]) -> list[Row]:
    """Figures of each configuration that has run, in the definition's order."""
    by: dict[Config, list[dict[str, Any]]] = {config: [] for config in (*definition.configs, definition.baseline)}
    for cell in cells:
        if cell.result is not None:
            by[cell.config].append(cell.result)
    return [_row(config, results) for config, results in by.items() if results]


def _row(config: Config, results: Sequence[Mapping[str, Any]]) -> Row:
    measured = [r for r in results if r["ended"] == "ok" and r["change_bytes"] is not None]
    growth = np.array([r["growth_bytes"] for r in measured])
    rates = np.array([r["samples_per_second"] for r in measured if r["samples_per_second"]])
    names = ("min", "q1", "median", "q3", "max")
    changes = np.array([[r["change_bytes"][n] for n in names] for r in measured]).reshape(-1, len(names)).T
    return Row(
        config=config,
        change_bytes=tuple(_mean(change) for change in changes),
        change_errors=tuple(_error(change) for change in changes),
        growth_bytes=_mean(growth),
        growth_error=_error(growth),
        samples_per_second=_mean(rates),
        rate_error=_error(rates) if len(rates) == len(measured) else math.nan,
        verdicts=tuple(r["verdict"] for r in measured),
        ended=tuple(r["ended"] for r in results if r["ended"] != "ok"),
    )


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _error(values: NDArray[np.float64]) -> float:
    """Standard error of a mean; NaN for fewer than two values."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def effects_of(definition: Definition, cells: Sequence[Cell]) -> list[Effect]:
    """Main effects and pairwise interactions, by least squares on all cells that ran well.

    The model includes interactions if the cells determine it; otherwise it has main effects only.
    """
    good = [c for c in cells if c.result is not None and c.result["ended"] == "ok" and c.result["growth_bytes"] is not None]
    found: list[Effect] = []
    for response in ("growth_bytes", "samples_per_second"):
        used = [c for c in good if c.result is not None and c.result[response] is not None]
        found += _fitted(definition, used, response)
    return found


Term = tuple[tuple[str, Value], ...]
Values = Mapping[str, tuple[Value, ...]]


def _fitted(definition: Definition, cells: Sequence[Cell], response: str) -> list[Effect]:
    values = _seen(definition, cells)
    levels = [(axis, value) for axis, found in values.items() for value in found[1:]]
    single: list[Term] = [(level,) for level in levels]
    pairs: list[Term] = [(a, b) for a, b in itertools.combinations(levels, 2) if a[0] != b[0]]
    y = np.array([float((c.result or {})[response]) for c in cells])
    for terms in ([*single, *pairs], single):
        x = _design(values, cells, terms)
        if len(cells) > 0 and np.linalg.matrix_rank(x) == x.shape[1] <= len(cells):
            return _effects(values, terms, x, y, response)
    return []


def _seen(definition: Definition, cells: Sequence[Cell]) -> Values:
    """For each axis, the values with which something was measured.

    A value with which every cell failed has no effect, and must not prevent the effects of others from being estimated.
    """
    configs = [dict(cell.config) for cell in cells]
    return {axis: tuple(v for v in values if any(c[axis] == v for c in configs)) for axis, values in definition.values.items()}


def _design(values: Values, cells: Sequence[Cell], terms: Sequence[Term]) -> NDArray[np.float64]:
    """The design matrix: one column per term, centred so that a main effect is the mean over the other axes."""
    columns = [np.ones(len(cells))]
    for term in terms:
        column = np.ones(len(cells))
        for axis, value in term:
            share = 1 / len(values[axis])
            column = column * np.array([float(dict(c.config)[axis] == value) - share for c in cells])
        columns.append(column)
    return np.stack(columns, axis=1)


def _effects(
    values: Values, terms: Sequence[Term], x: NDArray[np.float64], y: NDArray[np.float64], response: str
) -> list[Effect]:
    solved, *_ = np.linalg.lstsq(x, y, rcond=None)
    freedom = len(y) - x.shape[1]
    errors = np.full(len(solved), math.nan)
    margin = math.nan
    if freedom > 0 and terms:
        variance = float(((y - x @ solved) ** 2).sum()) / freedom
        errors = np.sqrt(np.maximum(0.0, np.diag(np.linalg.inv(x.T @ x)) * variance))
        margin = float(stats.t.ppf(1 - (1 - CONFIDENCE) / 2 / len(terms), freedom))
    found = []
    for k, term in enumerate(terms, 1):
        change, reach = float(solved[k]), float(errors[k]) * margin
        found.append(_effect(values, term, response, change, change - reach, change + reach))
    return found


def _effect(values: Values, term: Term, response: str, change: float, low: float, high: float) -> Effect:
    """An effect with its sentence, which claims no more than the interval allows."""

    def size(value: float) -> str:
        return format_bytes(value) if response == "growth_bytes" else f"{value:,.3g}/s"

    what = "growth per step" if response == "growth_bytes" else "the rate"
    plain = {axis: found[0] for axis, found in values.items() if found}
    name = named(term)
    against = named(tuple((axis, plain[axis]) for axis, _ in term))
    interval = f"{size(low)} to {size(high)}" if math.isfinite(low) else "no interval: nothing was repeated"
    certain = low > 0 or high < 0
    if len(term) == 1 and certain:
        text = f"{name} {'raises' if change > 0 else 'lowers'} {what} by {size(abs(change))} versus {against} ({interval})"
    elif len(term) == 1:
        text = f"{name}: no effect on {what} is certain ({size(change)}; {interval})"
    elif certain:
        text = f"{name} together change {what} by {size(change)} beyond what each does alone ({interval})"
    else:
        text = f"{name} together: no interaction in {what} is certain ({size(change)}; {interval})"
    return Effect(
        axes=tuple(axis for axis, _ in term),
        values=tuple(value for _, value in term),
        response=response,
        change=change,
        low=low,
        high=high,
        text=text,
    )


def front_of(rows: Sequence[Row]) -> list[Row]:
    """Configurations that no other beats in both growth and throughput, the one with the least growth first."""
    good = sorted((r for r in rows if r.good), key=lambda r: (r.growth_bytes, -r.samples_per_second))
    front: list[Row] = []
    for row in good:
        if not front or row.samples_per_second > front[-1].samples_per_second:
            front.append(row)
    return front


def recommended(definition: Definition, rows: Sequence[Row]) -> Row | None:
    """The configuration to recommend; None if none ran well.

    Configurations that leak are only considered if all do. Of the rest, those are kept whose growth exceeds the least by no
    more than the noise or the tolerance of a leak. Of these, those are kept that are not certainly slower than the fastest. Of
    these, the one on the front that changes the fewest axes is recommended.
    """
    good = [row for row in rows if row.good]
    good = [row for row in good if LEAK not in row.verdicts] or good
    if not good:
        return None
    least = min(good, key=lambda r: r.growth_bytes)
    alike = [max(TOLERANCE, _reach(r.growth_error, least.growth_error)) for r in good]
    near = [r for r, reach in zip(good, alike, strict=True) if r.growth_bytes <= least.growth_bytes + reach]
    fastest = max(near, key=lambda r: r.samples_per_second)
    equal = [
        r
        for r in near
        if r.samples_per_second
        >= min(NEAR * fastest.samples_per_second, fastest.samples_per_second - _reach(r.rate_error, fastest.rate_error))
    ]
    front = front_of(good)
    on_front = [r for r in equal if any(r is other for other in front)]
    return min(on_front or equal, key=lambda r: (_changes(definition, r.config), -r.samples_per_second))


def _reach(*errors: float) -> float:
    """Difference up to which two means with these standard errors do not count as different."""
    return 2 * math.hypot(*(e if math.isfinite(e) else 0.0 for e in errors))


def _changes(definition: Definition, config: Config) -> int:
    return sum(value != first for (_, value), (_, first) in zip(config, definition.baseline, strict=True))


def confirmed(chosen: Row | None, baseline: Row | None) -> tuple[bool, str]:
    """Whether a configuration holds up on the second command, and a sentence that says why.

    Args:
        chosen: its figures on the second command; None if it did not run there.
        baseline: figures of the first values of all axes on the second command; None if they did not run.
    """
    if chosen is None or not chosen.good:
        return False, "it did not run well on the second command"
    if baseline is None or not baseline.good:
        return True, "on the second command it ran well, and the baseline (the first value of every axis) did not"
    error = _reach(chosen.growth_error, baseline.growth_error)
    figures = (
        f"growth {format_bytes(chosen.growth_bytes)} a step versus {format_bytes(baseline.growth_bytes)}, "
        f"{chosen.samples_per_second:,.4g}/s versus {baseline.samples_per_second:,.4g}/s"
    )
    if not math.isfinite(chosen.growth_error) or not math.isfinite(baseline.growth_error):
        figures += " (one run of each, so the noise is unknown: give repeats)"
    if chosen.growth_bytes > baseline.growth_bytes + error:
        return False, f"on the second command it grows more than the baseline (the first value of every axis): {figures}"
    faster = chosen.samples_per_second >= NEAR * baseline.samples_per_second
    if not faster and chosen.growth_bytes >= baseline.growth_bytes - error:
        return False, f"on the second command it is slower and grows no less: {figures}"
    return True, f"on the second command: {figures}"
