"""Evaluations (model calls without gradients, outside any unit): their peaks, and making room for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from lowtide.runtime.budget import Budget
from lowtide.runtime.control.interception import Interception
from lowtide.runtime.tensors import beneath_autograd


@final
class Evaluations:
    """The evaluations of a run; one per runtime.

    Attributes:
        highest_bytes: the highest peak of any evaluation, which no plan lowers.
    """

    def __init__(self, budget: Budget, interception: Interception) -> None:
        """Start without evaluations."""
        self._budget, self._interception = budget, interception
        self.highest_bytes = 0
        self._highest_from = self._began_at = self._peak_before = 0

    def forget(self) -> None:
        """Other memory counts from now on (another device's, or without gradients): discard what was measured so far."""
        self.highest_bytes = self._highest_from = self._began_at = self._peak_before = 0

    def begin(self, retained_bytes: Callable[[], int], *, within_unit: bool) -> None:
        """A model is called without gradients: evict saved tensors if earlier evaluations took more than there is room for.

        Args:
            retained_bytes: returns the bytes that graphs of earlier units hold.
            within_unit: whether a unit is running: it makes room itself, online or by its plan.
        """
        known = self.highest_bytes - self._highest_from
        if self._budget.bytes and not within_unit and self._interception.saver.outstanding > 0 and known > 0:
            with beneath_autograd():
                self._interception.evictor.room_for(known)
        self._began_at = self._interception.meter.live() - retained_bytes()
        self._peak_before = self._interception.meter.span_peak()

    def end(self) -> bool:
        """The call returned, outside any unit. Returns whether it peaked higher than every evaluation before."""
        peak = self._interception.meter.span_peak()
        if peak <= max(self._peak_before, self.highest_bytes):
            return False
        self.highest_bytes, self._highest_from = peak, self._began_at
        return True
