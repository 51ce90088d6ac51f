"""How fast memory grows, and when it will reach a limit."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 12
"""Number of time spans that readings are grouped into; the peak of each counts, because peaks hit a limit."""
LEAST_SECONDS: Final = 2.0
"""Readings must span this long before growth is reported."""
LONGEST_SECONDS: Final = 120.0
"""Readings older than this are dropped: they say nothing about current growth."""
RECENT: Final = 0.6
"""Share of the time since the first reading that is used; what came before is warm-up."""
CONFIDENCE: Final = 0.95
NEGLIGIBLE: Final = 0.02
"""Growth is reported if it would fill more than this share of the limit in `LONGEST_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of memory.

    Attributes:
        rate: bytes per second.
        low, high: confidence interval of the rate (`CONFIDENCE`), bytes per second.
        level: peak that the trend gives for now, bytes.
    """

    rate: float
    low: float
    high: float
    level: float

    def seconds_to(self, limit: float) -> float | None:
        """Seconds until the limit is reached; None if growth is not certain, or negligible."""
        if self.low <= 0 or self.rate * LONGEST_SECONDS < NEGLIGIBLE * limit:
            return None
        return max(0.0, limit - self.level) / self.rate

    def is_flat(self, limit: float) -> bool:
        """Whether it is certain that growth is negligible or none."""
        return self.high * LONGEST_SECONDS < NEGLIGIBLE * limit


class Forecast:
    """Readings of one process, and the growth that they show."""

    def __init__(self) -> None:
        """Begin without readings."""
        self._readings: collections.deque[tuple[float, float]] = collections.deque()
        self._began: float | None = None

    def add(self, seconds: float, size: float) -> None:
        """Add a reading: its time in seconds, and its bytes."""
        if self._began is None:
            self._began = seconds
        self._readings.append((seconds, size))
        while seconds - self._readings[0][0] > LONGEST_SECONDS:
            self._readings.popleft()

    def growth(self) -> Growth | None:
        """Current growth: median of the slopes between the peaks of time spans (Theil-Sen); None if it is too early."""
        if self._began is None:
            return None
        now = self._readings[-1][0]
        since = max(now - RECENT * (now - self._began), self._readings[0][0])
        found = np.array([r for r in self._readings if r[0] >= since])
        if now - since < LEAST_SECONDS or len(found) < 2 * BINS:
            return None
        places = np.minimum(((found[:, 0] - since) / (now - since) * BINS).astype(int), BINS - 1)
        points = [found[places == i][np.argmax(found[places == i, 1])] for i in range(BINS) if (places == i).any()]
        times, sizes = np.array(points).T
        if len(times) < BINS // 2:
            return None
        slope, low, high = slopes(times, sizes)
        level = float(np.median(sizes - slope * times) + slope * now)
        return Growth(rate=slope, low=low, high=high, level=level)


def slopes(times: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median of the slopes between all pairs of points, and its confidence interval (Sen, 1968).

    Equal to ``scipy.stats.theilslopes`` (a test compares the two), whose import would double the guard's own memory.

    Args:
        times: times of the points, all different.
        sizes: one size for each time.

    Returns:
        The median, and the lower and upper end of its interval.
    """
    first, second = np.triu_indices(len(times), 1)
    found = np.sort((sizes[second] - sizes[first]) / (times[second] - times[first]))
    n = len(times)
    _, ties = np.unique(sizes, return_counts=True)
    spread = np.sqrt((n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18)
    reach = statistics.NormalDist().inv_cdf(0.5 - CONFIDENCE / 2) * spread
    lower = max(int(np.round((len(found) + reach) / 2)) - 1, 0)
    upper = min(int(np.round((len(found) - reach) / 2)), len(found) - 1)
    return float(np.median(found)), float(found[lower]), float(found[upper])
