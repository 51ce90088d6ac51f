"""Measures throughput and peak at each size, each in its own process; results survive a killed run."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from lowtide.base.errors import UsageError
from lowtide.base.files import why, write
from lowtide.base.messages import tell
from lowtide.studies.size.trial import TrialRequest, TrialResult
from lowtide.studies.size.vary import ScriptSetting, Vary

WARM: Final = 2
"""Number of steps that are not timed: the first allocates, the second is the first with the optimizer's states."""
TIMED: Final = 8
"""Number of timed steps by default."""
KNEE: Final = 0.95
"""The knee is the smallest value that reaches this share of the highest throughput."""
FALLS: Final = 2
"""Number of values in a row whose throughput is certainly below the highest, after which no larger value is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Throughput of a run.

    Attributes:
        low, median, high: quartiles, over the timed steps, of samples per second.
    """

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurement of one combination of values.

    Attributes:
        values: the values as the user wrote them, one for each axis.
        how: ``plain``, or ``budget`` for a run under the budget, which is made if the plain run does not fit.
        ended: as in :class:`lowtide.studies.size.trial.TrialResult`.
        message: the error's message, if it ended in one.
        rate: throughput; None if it did not run.
        cold_peak_bytes: peak of the first step; None if it did not run.
        peak_bytes: peak of all steps; None if it did not run.
        optimizations: names of the memory optimizations that it used.
    """

    values: tuple[str, ...]
    how: str
    ended: str
    message: str
    rate: Rate | None
    cold_peak_bytes: int | None
    peak_bytes: int | None
    optimizations: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the run succeeded, and so fits."""
        return self.rate is not None


def point_of(values: tuple[str, ...], how: str, ran: TrialResult, samples: float) -> Point:
    """The measurement that a run gives.

    Args:
        values: the values of the run.
        how: ``plain`` or ``budget``.
        ran: the run.
        samples: number of samples in a step.
    """
    timed = [float(s["seconds"]) for s in ran.steps[WARM:] if s.get("policy") != "online"]
    timed = timed or [float(s["seconds"]) for s in ran.steps[WARM:]]
    rate = None
    if ran.passes and timed:
        low, median, high = (samples / float(q) for q in np.percentile(timed, (75, 50, 25)))
        rate = Rate(low=low, median=median, high=high)
    ended, message = ran.ended, ran.message
    if ran.passes and not timed:
        ended, message = "error", f"it ended after {len(ran.steps)} steps, but more than {WARM} are needed"
    return Point(
        values=values,
        how=how,
        ended=ended,
        message=message,
        rate=rate,
        cold_peak_bytes=ran.cold_peak_bytes if rate else None,
        peak_bytes=ran.peak_bytes if rate else None,
        optimizations=tuple(str(lever["name"]) for lever in ran.levers if lever["used"]),
    )


@final
class SizeResults:
    """Points in a file, one JSON object per line; the first line says what they are measurements of."""

    def __init__(self, path: Path, about: dict[str, Any], *, fresh: bool) -> None:
        """Open or create the file.

        Args:
            path: the file.
            about: what is measured; a file about something else is refused.
            fresh: whether to discard the results that the file has.

        Raises:
            UsageError: if it is no results file, or has results of something else.
        """
        self.path = path
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._found: dict[tuple[tuple[str, ...], str], Point] = {}
        lines = [] if fresh or not path.exists() else path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]  # a killed run may leave half a line
        if whole:
            try:
                head, *rest = (json.loads(line) for line in whole)
                mine = head["digest"] == digest
                for row in rest:
                    point = _decode(row)
                    self._found[point.values, point.how] = point
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{path} is not a results file: give another with --results, or --fresh") from None
            if not mine:
                raise UsageError(
                    f"{path} has results of another script or other options: give another file with --results, or --fresh"
                )
        self._file = path.open("ab", buffering=0)
        self._full = False
        self._file.truncate(sum(map(len, whole)))
        if not whole:
            self._append({"digest": digest, "about": about})

    @property
    def known(self) -> int:
        """Number of points in the file."""
        return len(self._found)

    def get(self, values: tuple[str, ...], how: str) -> Point | None:
        """A point that was measured before; None if it was not."""
        return self._found.get((values, how))

    def add(self, point: Point) -> None:
        """Store a point; it is on disk when this returns.

        Errors and timeouts are not stored, since another try may succeed. If the disk is full, this is reported once, and
        nothing more is stored.
        """
        if point.ended in ("error", "timeout"):
            return
        self._found[point.values, point.how] = point
        self._append(to_json(point))

    def _append(self, row: dict[str, Any]) -> None:
        if self._full:
            return
        try:
            write(self._file.fileno(), json.dumps(row).encode() + b"\n")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._full = True
            tell(f"lowtide: results are no longer kept: {why(error)} at {self.path}: make room there; measuring goes on")

    def close(self) -> None:
        """Close the file; no more points can be added."""
        self._file.close()


def to_json(point: Point) -> dict[str, Any]:
    """A point as JSON, for a file."""
    rate = point.rate
    return {
        "value": point.values[0] if len(point.values) == 1 else list(point.values),
        "how": point.how,
        "ended": point.ended,
        "message": point.message,
        "samples_per_second": None if rate is None else rate.median,
        "samples_per_second_quartiles": None if rate is None else [rate.low, rate.high],
        "cold_peak_bytes": point.cold_peak_bytes,
        "peak_bytes": point.peak_bytes,
        "optimizations": list(point.optimizations),
        "fits": point.fits,
    }


def _decode(row: dict[str, Any]) -> Point:
    rate = None
    if row["samples_per_second"] is not None:
        low, high = row["samples_per_second_quartiles"]
        rate = Rate(low=low, median=row["samples_per_second"], high=high)
    value = row["value"]
    return Point(
        values=tuple(value) if isinstance(value, list) else (value,),
        how=row["how"],
        ended=row["ended"],
        message=row["message"],
        rate=rate,
        cold_peak_bytes=row["cold_peak_bytes"],
        peak_bytes=row["peak_bytes"],
        optimizations=tuple(row.get("optimizations", ())),
    )


def measure(
    vary: Vary, run: Callable[[ScriptSetting, TrialRequest], TrialResult], results: SizeResults, *,
    samples: Callable[[tuple[str, ...]], float],
    plain: TrialRequest, budget: TrialRequest | None,
) -> Iterator[Point]:
    """Measure the values in order until throughput falls or memory runs out; points that are known are not run again.

    Args:
        vary: what is varied.
        run: runs the script once.
        results: where points are stored.
        samples: returns the number of samples in a step, given the values.
        plain: the request for a plain run.
        budget: the request for a run under the budget, which is made if the plain run does not fit; None for no such runs.
    """
    best: Rate | None = None
    falling = 0
    for values in vary.points():
        fitted = False
        for how, asked in (("plain", plain), ("budget", budget)):
            if asked is None or fitted:
                continue
            point = results.get(values, how)
            if point is None:
                point = point_of(values, how, run(vary.set(values), asked), samples(values))
                results.add(point)
            yield point
            if point.ended == "error":
                return
            fitted = point.fits
            if point.rate is not None:
                falling = falling + 1 if best is not None and point.rate.high < best.low else 0
                best = point.rate if best is None or point.rate.median > best.median else best
        if len(vary.axes) == 1 and (not fitted or falling >= FALLS):
            return


def knee(points: Iterable[Point]) -> Point | None:
    """The smallest value that reaches nearly the highest throughput; None if none ran."""
    ran = sorted((p for p in points if p.rate is not None), key=lambda p: [float(v) for v in p.values])
    best = max((p.rate.median for p in ran if p.rate is not None), default=math.nan)
    return next((p for p in ran if p.rate is not None and p.rate.median >= KNEE * best), None)


def largest(points: Iterable[Point], how: str) -> Point | None:
    """The last value that fits plainly, or for ``budget`` also under the budget; None if none does."""
    return next((p for p in reversed(list(points)) if p.fits and (how == "budget" or p.how == "plain")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeStudy:
    """The findings of ``lowtide batch`` for one script.

    Attributes:
        script: path of the script.
        vary: what was varied.
        points: the measurements, in the order in which they were made.
        per_sample: whether rates count samples, not steps.
        whole: whether all sizes were run; until then, no size is called the best.
    """

    script: str
    vary: Vary
    points: tuple[Point, ...]
    per_sample: bool
    whole: bool = True

    @property
    def knee(self) -> Point | None:
        """The smallest size with nearly the highest throughput; None until all sizes were run."""
        return knee(self.points) if self.whole else None

    @property
    def largest(self) -> Point | None:
        """The largest size that fits without a budget; None until all sizes were run."""
        return largest(self.points, "plain") if self.whole else None

    @property
    def largest_under_budget(self) -> Point | None:
        """The largest size that fits, with or without the budget; None until all sizes were run."""
        return largest(self.points, "budget") if self.whole else None
