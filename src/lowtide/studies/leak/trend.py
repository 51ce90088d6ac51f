"""Estimates a counter's growth per step: where it has settled, the rate from there on, and how certain that is.

Growth is not tested against zero: on clean programs, such tests nearly always find drifts of a few bytes per step. The
question is whether growth is above a tolerance, and both answers are read from the interval that comes with the rate (a
minimum-effect test; see Machida et al., ISSREW 2013, on what Mann-Kendall does instead). Levels are taken per block of steps,
near the bottom of each block, because what a step still holds (a larger batch) lies above what stays.
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
"""Share of the steps that always counts as warm-up."""
LATEST: Final = 0.7
"""Share of the steps by which a counter must have settled."""
ALONE: Final = 0.6
"""A lone jump is removed only if the counter has settled by this share of the steps: in a shorter rest, jumps that recur would
be seen only once."""
BLOCKS: Final = (24, 16, 12, 8)
"""Numbers of blocks into which the settled part is cut. What comes and goes within a block does not count: longer blocks see
through a garbage collector's sawtooth, shorter ones give more levels. The fit with the narrowest interval is taken."""
FEWEST: Final = 8
"""Minimum number of blocks for any statement."""
SHORTEST: Final = 5
"""Minimum number of steps in a block."""
LOW: Final = 0.1
"""Quantile of a block that is taken as its level."""
SETTLING: Final = 40
"""Maximum number of blocks in which change-points are searched."""
PENALTY: Final = 4.0
"""Penalty for a change-point, in units of the noise's variance times the logarithm of the number of blocks."""
OUTLIER: Final = 8.0
"""An increment that lies this many standard deviations off the median is a jump."""
ALIKE: Final = 0.6
"""A jump of more than this share of another one counts as its recurrence."""
DROPS: Final = 5
"""Minimum number of drops in a series that counts as one that rises and falls."""
WANDERS: Final = 0.5
"""Autocorrelation of the residuals above which levels count as wandering."""
LEFT: Final = 0.7
"""Share of the noise that may remain at most for the steps' sizes to count as its cause."""
SMALL: Final = 256.0
"""Bytes per step below which increments count as equal."""
CHANCE: Final = 0.9
"""Probability of a clear answer after the suggested number of steps, if what steps hold does not depend on earlier steps."""
SPARE: Final = 1.1
"""The suggested number of settled steps is this multiple of what the noise calls for."""
LONGER: Final = 1.5
"""The suggested number of steps is at least this multiple of those seen: if something other than noise makes the answer
unclear, a longer look is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Growth of one counter in one process.

    Attributes:
        start: the step from which on the counter has settled.
        steps: number of steps seen.
        rate: growth in bytes per step from ``start`` on.
        error: standard error of the rate; infinite if too little was seen.
        freedom: degrees of freedom of the error.
        steady_rate: the rate without the two largest and the two smallest increments: near ``rate`` if growth is steady, far
            below it if growth came in jumps.
        late_rate: the rate of the last third; below ``rate`` if growth slows down.
        jump_bytes: size of a lone jump that was removed; 0 for none.
        jump_step: the step of that jump.
        before_bytes: growth from the end of the first tenth of the steps until the counter settled.
        noise_bytes: standard deviation of the levels about the fitted line.
        block_steps: number of steps in a block.
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
        """Lower and upper bound; the true rate lies beyond either one with at most the probability ``risk``."""
        if not math.isfinite(self.error):
            return -math.inf, math.inf
        margin = float(stats.t.ppf(1 - risk, self.freedom)) * self.error
        return self.rate - margin, self.rate + margin

    def steps_to_tell(self, threshold: float, risk: float, doubt: float) -> int:
        """Total number of steps that would give a clear answer, if growth and noise stay as they are.

        The variance of a slope over n levels falls with n cubed. The rate itself is uncertain: neither a large nor a small
        distance from the threshold is taken at face value. Memory does not shrink forever, so a negative rate counts as zero.

        Args:
            threshold: bytes per step that the rate must be known to lie above, or below.
            risk: probability of wrongly saying that it lies above.
            doubt: probability of wrongly saying that it lies below.
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
    """A bound as JSON can represent it: None if it is infinite."""
    return value if math.isfinite(value) else None


def like_sized(values: Series, peaks: Series) -> Series:
    """What steps would hold at their end if all were of the same size.

    The last batch is still held when a step ends; if batches differ in size, that is most of the noise. The peak of a step,
    less what it holds at its end, shows the step's size and does not grow with a leak. The share of it that is still held is
    fitted on differences between neighbouring steps, and subtracted if that leaves much less noise.

    Args:
        values: bytes held at the end of each step.
        peaks: highest bytes held within each step.
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
    """The floor of a series that rises and falls (because of a garbage collector or a cache): what is left after each drop.

    Between drops, the floor is interpolated linearly; before the first and after the last, it is NaN. Other series are
    returned unchanged.
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
    """Middle step and low level of each block that has values.

    Before the quantile is taken, growth within a block is removed relative to the block's middle.
    """
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

    Runs PELT (Killick et al. 2012) on the increments of block levels. A change after :data:`LATEST` of the steps does not
    count as the end of warm-up.
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
        values: bytes after each step; NaN where the counter was not read.
        tolerance: bytes per step that are tolerated; the scale on which changes matter.
        start: step from which on growth is measured; None to find where the counter has settled.
    """
    begin, found = 0, list[Trend]()
    for series in (valleys(values, tolerance), values):  # the floor, if it has enough values
        begin = settled(series, tolerance) if start is None else start
        fits = [_trend(series, tolerance, begin, blocks) for blocks in BLOCKS]
        found = [fit for fit in fits if fit is not None]
        if found:
            break
    if not found:
        return Trend(start=begin, steps=len(values), rate=0.0, error=math.inf, freedom=1.0, steady_rate=0.0, late_rate=0.0)
    return min(found, key=lambda fit: fit.interval(0.01)[1] - fit.rate)


def _trend(values: Series, tolerance: float, begin: int, blocks: int) -> Trend | None:
    """Growth from a step on, measured with this number of blocks; None if there are too few steps for them."""
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
    """The increments with a lone upward jump replaced by the median; the size of the jump in bytes, and its position."""
    middle = float(np.median(increments))
    spread = 1.4826 * float(np.median(np.abs(increments - middle)))
    far = OUTLIER * max(spread, tolerance / 4, SMALL / 4)
    up = np.flatnonzero(increments - middle > far)
    down = np.flatnonzero(middle - increments > far)
    # A jump may straddle the border between two blocks.
    if len(down) or not len(up) or len(up) > 2 or (len(up) == 2 and up[1] - up[0] != 1):
        return increments, 0.0, 0
    plain = increments.copy()
    plain[up] = middle
    return plain, float(((increments[up] - middle) * gaps[up]).sum()), int(up[0]) + 1


def _comes_again(values: Series, jump_bytes: float) -> bool:
    """Whether a counter jumps by about as much more than once after the first tenth: something kept once per epoch, say."""
    if not jump_bytes:
        return False
    rest = values[max(1, round(len(values) * FIRST)) :]
    _, levels = levels_of(rest, min(SETTLING, max(2, len(rest) // SHORTEST)))
    runs = itertools.groupby(np.diff(levels) > ALIKE * jump_bytes)
    return len([up for up, run in runs if up and len(list(run)) <= 2]) > 1


def _fit(steps: Series, levels: Series, *, lost: int) -> tuple[float, float, float, float]:
    """Fit a line to levels.

    Returns the slope, its standard error (widened for autocorrelated residuals), the residuals' deviation, and the degrees of
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
    if follows > WANDERS:  # in wandering levels, the increments are independent
        error = max(error, float(np.std(np.diff(levels) / np.diff(steps), ddof=1)) / math.sqrt(n - 1))
    return slope, error, noise, max(3.0, freedom / wider)


def _grown_before(values: Series, begin: int) -> float:
    """Growth in bytes between the end of the first tenth of the steps and the step where the counter settled."""
    first = max(1, round(len(values) * FIRST))
    early = values[first : first + SHORTEST]
    late = values[max(first, begin - SHORTEST) : begin + SHORTEST]
    if begin <= first or not np.isfinite(early).any() or not np.isfinite(late).any():
        return 0.0
    return float(np.nanmin(late) - np.nanmin(early))
