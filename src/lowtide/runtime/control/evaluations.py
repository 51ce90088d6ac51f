"""Calls of models without gradients, outside any unit: how high they were, and the room that is made for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from lowtide.runtime.budget import Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.tensors import beneath_autograd


@final
class Evaluations:
    """One per runtime.

    Attributes:
        highest_bytes: highest point of any of them: no plan lowers it.
    """

    def __init__(self, budget: Budget, interception: Interception) -> None:
        """There was none."""
        self._budget, self._interception = budget, interception
        self.highest_bytes = 0
        self._highest_from = self._began_at = self._peak_before = 0

    def forget(self) -> None:
        """Memory is counted on another device from here on: what was measured was of the former one."""
        self.highest_bytes = self._highest_from = self._began_at = self._peak_before = 0

    def begin(self, retained_bytes: Callable[[], int], *, within_unit: bool) -> None:
        """A model is called: where such calls took more than there is room for, saved tensors are evicted.

        Args:
            retained_bytes: tells what graphs of former units hold.
            within_unit: whether a unit runs, which is held on line or follows its plan.
        """
        known = self.highest_bytes - self._highest_from
        if self._budget.bytes and not within_unit and self._interception.saver.outstanding > 0 and known > 0:
            with beneath_autograd():
                self._interception.evictor.room_for(known)
        self._began_at = self._interception.meter.live() - retained_bytes()
        self._peak_before = self._interception.meter.span_peak()

    def end(self) -> bool:
        """That call returned, outside any unit; whether none was as high before."""
        peak = self._interception.meter.span_peak()
        if peak <= max(self._peak_before, self.highest_bytes):
            return False
        self.highest_bytes, self._highest_from = peak, self._began_at
        return True
