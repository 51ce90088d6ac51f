"""A program relaxed, solved again and again as rows and variables join it: HiGHS goes on from where it stood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowtide.pebble.apart import Told, highs_of

_ANEW = 0.05
"""Share of the rows from which it begins anew: 9,900 rows that joined 40,700 took 2.0 s to go on from and 0.8 anew, 50 that
joined 52,000 took 0.2 s and 1.0 anew."""


class Linear:
    """HiGHS with a program that grows."""

    def __init__(self) -> None:
        """Nothing is asked yet."""
        self._highs: Any = None
        self._columns = self._rows = 0

    def solve(self, asked: Mapping[str, Any], seconds: float) -> Told:
        """What is known of a program with real variables, within a time limit.

        Args:
            asked: as in :func:`lowtide.pebble.apart.solved_apart`; what was there before is unchanged.
            seconds: the limit.
        """
        import highspy

        if self._highs is None:
            self._highs = highs_of({**asked, "whole": np.zeros(len(asked["cost"]), dtype=bool)})
        else:
            self._join(asked)
        self._columns, self._rows = len(asked["cost"]), len(asked["low"])
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + seconds)  # it counts all of its runs
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            return Told(impossible=status == highspy.HighsModelStatus.kInfeasible)
        cost = self._highs.getInfo().objective_function_value
        return Told(bound=cost, cost=cost, x=np.array(self._highs.getSolution().col_value), ended=True)

    def _join(self, asked: Mapping[str, Any]) -> None:
        """Hand over the variables and rows that HiGHS has not."""
        new = slice(self._columns, None)
        more = len(asked["cost"]) - self._columns
        if more:
            none = np.zeros(more, dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0)
            self._highs.addCols(more, asked["cost"][new], asked["lower"][new], asked["upper"][new], 0, *none)
        new = slice(self._rows, None)
        more = len(asked["low"]) - self._rows
        if more:
            first = int(asked["starts"][self._rows])
            columns, values = asked["columns"][first:].astype(np.int32), asked["values"][first:]
            starts = (asked["starts"][self._rows : -1] - first).astype(np.int32)
            self._highs.addRows(more, asked["low"][new], asked["high"][new], len(columns), starts, columns, values)
        if more > _ANEW * len(asked["low"]):
            self._highs.clearSolver()
