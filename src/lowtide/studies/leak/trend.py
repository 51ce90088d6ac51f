"""How a counter grows per step: where it has settled, the rate from there on, and how certain that is.

Growth is not tested against zero: on clean programs such tests find drifts of some bytes per step nearly always. The
question is whether it is above a tolerance, and the rate comes with an interval that both answers are read from (a
minimum-effect test; Machida et al., ISSREW 2013, on what Mann-Kendall does instead). Levels are taken per block of
steps, low in each block, because what a step still holds (a larger batch) lies above what stays.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import ruptures
from numpy.typing import NDArray
from scipy import stats

Series = NDArray[np.float64]

FIRST: Final = 0.1
"""Share of the steps that is always taken for warm-up."""
LATEST: Final = 0.7
"""Share of the steps by which a counter must have settled."""
ALONE: Final = 0.6
"""Share of the steps by which a counter must have settled for a jump after it to be taken out as one that stands alone: in a
shorter rest, jumps that come again are seen once."""
BLOCKS: Final = (24, 16, 12, 8)
"""Into how many blocks the settled part is cut: what comes and goes within a block does not count, so longer ones see through
a collector's saw, shorter ones have more levels; the narrowest interval is taken."""
FEWEST: Final = 8
"""Blocks without which nothing is said."""
SHORTEST: Final = 5
"""Steps of a block, at least."""
LOW: Final = 0.1
"""Quantile of a block that is its level."""
SETTLING: Final = 40
"""Blocks in which change-points are looked for."""
PENALTY: Final = 4.0
"""Of a change-point, in units of the noise's variance times the logarithm of the blocks."""
OUTLIER: Final = 8.0
"""An increment so many deviations off the others is a jump."""
ALIKE: Final = 0.6
"""A jump of this share of another is one like it."""
DROPS: Final = 5
"""Drops that make a series one that rises and falls."""
WANDERS: Final = 0.5
"""Correlation of residuals from which on levels are taken to wander."""
LEFT: Final = 0.7
"""Share of the noise that may remain for steps' sizes to count as its cause."""
SMALL: Final = 256.0
"""Bytes per step below which increments count as equal."""
CHANCE: Final = 0.9
"""Of a clear answer after as many steps as are asked for, where what steps hold does not depend on the steps before."""
SPARE: Final = 1.1
"""So many times what noise asks for is asked for."""
LONGER: Final = 1.5
"""So many times the steps are asked for at least: what is not clear for another reason than noise needs a longer look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Growth of one counter in one process.

    Attributes:
        start: step from which on it has settled.
        steps: steps seen.
        rate: bytes per step from there on.
        error: standard error of the rate; infinite where too little was seen.
        freedom: its degrees of freedom.
        steady_rate: the rate without the two largest and the two smallest increments: near ``rate`` where growth goes on,
            far below it where it came in jumps.
        late_rate: the rate of the last third; below ``rate`` where growth slows down.
        jump_bytes: a single jump that was taken out; 0 for none.
        jump_step: where.
        before_bytes: growth from the end of the first tenth until it settled.
        noise_bytes: standard deviation of a level about the line.
        block_steps: steps of a block.
    """

    start: int
    steps: int
    rate: float
    error: float
    freedom: float
    steady_rate: float
    late_rate: float
    jump_bytes: float = 0.0
    jump_step: int = 0
    before_bytes: float = 0.0
    noise_bytes: float = 0.0
    block_steps: int = 1

    def interval(self, risk: float) -> tuple[float, float]:
        """Bounds that the rate crosses, on either side, with at most this probability."""
        if not math.isfinite(self.error):
            return -math.inf, math.inf
        margin = float(stats.t.ppf(1 - risk, self.freedom)) * self.error
        return self.rate - margin, self.rate + margin

    def steps_to_tell(self, threshold: float, risk: float, doubt: float) -> int:
        """How many steps in all would tell, if growth and noise stay what they are.

        The variance of a slope over n levels falls with n cubed. The rate itself is uncertain, so it is not trusted to be
        far from the threshold, nor near to it, and memory does not shrink for ever, so a rate below zero is taken for none.

        Args:
            threshold: bytes per step that the rate must be known to lie above, or below.
            risk: of wrongly saying that it lies above.
            doubt: of wrongly saying that it lies below.
        """
        if not math.isfinite(self.error):
            return 2 * max(self.steps, FEWEST * SHORTEST * 2)
        above = self.rate > threshold
        reach = float(stats.t.ppf(1 - (risk if above else doubt), self.freedom)) + float(stats.norm.ppf(CHANCE))
        apart = abs(max(self.rate, 0.0) - threshold)
        room = max(apart - 2 * self.error, min(threshold, apart + 2 * self.error))
        factor = SPARE * (reach * self.error / room) ** (2 / 3)
        more: int = self.start + math.ceil((self.steps - self.start) * factor)
        return max(more, math.ceil(self.steps * LONGER))


def finite(value: float) -> float | None:
    """A bound as JSON can hold it."""
    return value if math.isfinite(value) else None


def like_sized(values: Series, peaks: Series) -> Series:
    """What steps would hold at their end if all were of one size.

    The last batch is still held when a step ends, and where batches differ in size that is most of the noise. What a step took
    besides (its peak, less what it holds at its end) tells its size, and does not grow with a leak. Its share is fitted on
    differences between neighbouring steps and taken off, where that leaves much less noise.
    """
    taken = peaks - values
    known = np.isfinite(values) & np.isfinite(taken)
    if known.sum() < 2 * FEWEST:
        return values
    late = np.flatnonzero(known)[int(known.sum() * FIRST) :]
    dy, dz = np.diff(values[late]), np.diff(taken[late])
    spread = float((dz * dz).sum())
    if not spread:
        return values
    share = float((dy * dz).sum()) / spread
    left = dy - share * dz
    if float(np.abs(left - np.median(left)).sum()) > LEFT * float(np.abs(dy - np.median(dy)).sum()):
        return values
    return values - share * (taken - np.nanmedian(taken))


def valleys(values: Series, tolerance: float) -> Series:
    """What is left after each of the drops of a series that rises and falls (a garbage collector's, a cache's): its floor.

    Between drops the floor lies on the line between them; after the last it is not known. Other series come back as they are.
    """
    known = np.flatnonzero(np.isfinite(values))
    changes = np.diff(values[known])
    if len(changes) < 2 * FEWEST:
        return values
    usual = 1.4826 * float(np.median(np.abs(changes - np.median(changes))))
    drops = np.flatnonzero(changes < -max(OUTLIER * usual, 4 * tolerance)) + 1
    drops = drops[drops >= FIRST * len(known)]
    if len(drops) < DROPS or float(np.median(changes)) <= 0:
        return values
    floor = np.interp(np.arange(len(values)), known[drops], values[known[drops]])
    floor[: known[drops[0]]] = floor[known[drops[-1]] + 1 :] = np.nan
    return floor


def levels_of(values: Series, blocks: int) -> tuple[Series, Series]:
    """Middle step and low level of each block that has values; growth within a block is taken off before, and put back."""
    edges = np.linspace(0, len(values), blocks + 1).astype(int)
    parts = [a + np.flatnonzero(np.isfinite(values[a:b])) for a, b in itertools.pairwise(edges)]
    parts = [part for part in parts if len(part)]
    steps = np.array([float(part.mean()) for part in parts])
    middles = np.array([float(np.median(values[part])) for part in parts])
    within = float(np.median(np.diff(middles) / np.diff(steps))) if len(steps) > 1 else 0.0
    levels = [float(np.quantile(values[part] - within * (part - at), LOW)) for part, at in zip(parts, steps, strict=True)]
    return steps, np.array(levels)


def settled(values: Series, tolerance: float) -> int:
    """Step from which on a counter grows as it does at the end: the last change-point after which it grows less than before.

    PELT (Killick et al. 2012) on the increments of block levels. What changes after :data:`LATEST` of the steps is not
    warm-up any more.
    """
    first = max(1, round(len(values) * FIRST))
    steps, levels = levels_of(values, min(SETTLING, max(2, len(values) // SHORTEST)))
    if len(levels) < FEWEST:
        return first
    rates = np.diff(levels) / np.diff(steps)
    late = rates[len(rates) // 2 :]
    scale = max(1.4826 * float(np.median(np.abs(late - np.median(late)))), SMALL, tolerance / 4)
    signal = np.clip((rates / scale)[:, None], -50, 50)
    found = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(signal).predict(pen=PENALTY * math.log(len(rates)))
    start = first
    for a, c, b in zip([0, *found], found[:-1], found[1:], strict=False):
        at = round(float(steps[c]))
        slows = float(np.mean(rates[a:c])) > float(np.mean(rates[c:b])) + tolerance / 4
        if slows and at <= LATEST * len(values) and len(values) - at >= FEWEST * SHORTEST:
            start = max(start, at)
    return int(start)


def trend(values: Series, tolerance: float, start: int | None = None) -> Trend:
    """Growth of a counter over the steps of a process.

    Args:
        values: bytes after each step; NaN where it was not read.
        tolerance: bytes per step that are let pass; the scale on which changes matter.
        start: step from which on it is looked at; None to find it.
    """
    begin, found = 0, list[Trend]()
    for series in (valleys(values, tolerance), values):  # the floor, where there is enough of it
        begin = settled(series, tolerance) if start is None else start
        fits = [_trend(series, tolerance, begin, blocks) for blocks in BLOCKS]
        found = [fit for fit in fits if fit is not None]
        if found:
            break
    if not found:
        return Trend(start=begin, steps=len(values), rate=0.0, error=math.inf, freedom=1.0, steady_rate=0.0, late_rate=0.0)
    return min(found, key=lambda fit: fit.interval(0.01)[1] - fit.rate)


def _trend(values: Series, tolerance: float, begin: int, blocks: int) -> Trend | None:
    """Growth from a step on, by so many blocks; None where there are too few steps for them."""
    rest = values[begin : int(np.flatnonzero(np.isfinite(values)).max(initial=0)) + 1]
    if len(rest) < blocks * SHORTEST:
        return None
    steps, levels = levels_of(rest, blocks)
    if len(levels) < FEWEST:
        return None
    increments = np.diff(levels) / np.diff(steps)
    plain, jump_bytes, jump_step = increments, 0.0, 0
    if begin <= ALONE * len(values):
        without = _without_jump(increments, np.diff(steps), tolerance)
        if not _comes_again(values, without[1]):
            plain, jump_bytes, jump_step = without
    line = np.concatenate([[levels[0]], levels[0] + np.cumsum(plain * np.diff(steps))])
    rate, error, noise, freedom = _fit(steps, line, lost=1 if jump_bytes else 0)
    kept = np.sort(plain)[2:-2]
    third = max(FEWEST // 2, len(line) // 3)
    return Trend(
        start=begin,
        steps=len(values),
        rate=rate,
        error=error,
        freedom=freedom,
        steady_rate=float(kept.mean()),
        late_rate=float(np.polyfit(steps[-third:], line[-third:], 1)[0]),
        jump_bytes=jump_bytes,
        jump_step=begin + round(float(steps[jump_step])) if jump_bytes else 0,
        before_bytes=_grown_before(values, begin),
        noise_bytes=noise,
        block_steps=max(1, len(rest) // blocks),
    )


def _without_jump(increments: Series, gaps: Series, tolerance: float) -> tuple[Series, float, int]:
    """Increments with a lone jump upwards replaced by the middle one, how high it was, and where."""
    middle = float(np.median(increments))
    spread = 1.4826 * float(np.median(np.abs(increments - middle)))
    far = OUTLIER * max(spread, tolerance / 4, SMALL / 4)
    up = np.flatnonzero(increments - middle > far)
    down = np.flatnonzero(middle - increments > far)
    # A jump may fall across the border of two blocks.
    if len(down) or not len(up) or len(up) > 2 or (len(up) == 2 and up[1] - up[0] != 1):
        return increments, 0.0, 0
    plain = increments.copy()
    plain[up] = middle
    return plain, float(((increments[up] - middle) * gaps[up]).sum()), int(up[0]) + 1


def _comes_again(values: Series, jump_bytes: float) -> bool:
    """Whether a counter jumped by about as much before, or after, what is looked at: something kept once per epoch, say."""
    if not jump_bytes:
        return False
    rest = values[max(1, round(len(values) * FIRST)) :]
    _, levels = levels_of(rest, min(SETTLING, max(2, len(rest) // SHORTEST)))
    runs = itertools.groupby(np.diff(levels) > ALIKE * jump_bytes)
    return len([up for up, run in runs if up and len(list(run)) <= 2]) > 1


def _fit(steps: Series, levels: Series, *, lost: int) -> tuple[float, float, float, float]:
    """Slope, its standard error widened for residuals that follow one another, the residuals' deviation, degrees of
    freedom.
    """
    n = len(levels)
    x = steps - steps.mean()
    spread = float((x * x).sum())
    slope = float((x * levels).sum()) / spread
    residuals = levels - levels.mean() - slope * x
    freedom = max(1.0, n - 2 - lost)
    noise = math.sqrt(float((residuals * residuals).sum()) / freedom)
    follows = 0.0
    if noise > 0:
        follows = float((residuals[1:] * residuals[:-1]).sum() / (residuals * residuals).sum()) + 2 / n
    follows = min(max(follows, 0.0), 0.9)
    wider = math.sqrt((1 + follows) / (1 - follows))
    error = noise / math.sqrt(spread) * wider
    if follows > WANDERS:  # levels that wander: then increments are what is independent
        error = max(error, float(np.std(np.diff(levels) / np.diff(steps), ddof=1)) / math.sqrt(n - 1))
    return slope, error, noise, max(3.0, freedom / wider)


def _grown_before(values: Series, begin: int) -> float:
    """Growth between the end of the first tenth and the step where the counter settled."""
    first = max(1, round(len(values) * FIRST))
    early = values[first : first + SHORTEST]
    late = values[max(first, begin - SHORTEST) : begin + SHORTEST]
    if begin <= first or not np.isfinite(early).any() or not np.isfinite(late).any():
        return 0.0
    return float(np.nanmin(late) - np.nanmin(early))
