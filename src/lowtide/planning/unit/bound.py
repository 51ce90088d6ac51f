"""Lower bounds on the peak and extra time of a unit's plans; the peak's comes with the event that proves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Need
from lowtide.planning.unit.problem import Problem

_EVENTS_TRIED = 32
"""Number of highest events that are tried for the bound on extra time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound on the peak of every plan that recomputes and moves values.

    Attributes:
        peak_bytes: the bound.
        peak_event: the event whose forced bytes prove it; -1 for a problem without events.
    """

    peak_bytes: int
    peak_event: int


class Forced(StrEnum):
    """Why a value is live at an event under every plan."""

    SCRIPT = "held by the script"
    NODE = "held by the autograd node that asked for it"
    FIXED = "can be neither recomputed nor offloaded"


def forced_spans(problem: Problem, value: int) -> Iterator[tuple[int, int, Forced]]:
    """When a counted value is live under every plan: first and last event of each span, in order and disjoint, and why."""
    buffer = problem.trace.buffers[value]
    held = min(buffer.held_until, problem.end(value))
    spans = [(buffer.born + 1, held, Forced.SCRIPT)]
    if not problem.remakeable[value] and not problem.can_move(value):
        spans.append((held + 1, problem.end(value), Forced.FIXED))
    else:
        spans += [(max(event + 1, buffer.held_until + 1), pin, Forced.NODE) for event, pin in problem.needs[value]]
    reached = -1
    for start, last, why in spans:
        first = max(start, reached + 1)
        if last >= first:
            yield first, last, why
            reached = last


def forced_live(problem: Problem) -> NDArray[np.int64]:
    """Per event, bytes that are live under every plan, including the event's own rise.

    A value is forced while the script holds it and while the autograd node that unpacked it runs; if it can neither be
    recomputed nor moved, it is always forced.
    """
    events = len(problem.trace.events)
    delta = np.zeros(events + 2, dtype=np.int64)
    for v, buffer in enumerate(problem.trace.buffers):
        for first, last, _ in forced_spans(problem, v) if buffer.counted else ():
            delta[first] += buffer.bytes
            delta[last + 1] -= buffer.bytes
    live = np.cumsum(delta)[:events] + problem.base_bytes + np.asarray(problem.trace.other_bytes, dtype=np.int64)
    own = [asked_bytes(problem, event) for event in range(events)]
    return live + np.maximum(problem.rise, np.asarray(own, dtype=np.int64))


def asked_bytes(problem: Problem, event: int) -> int:
    """Bytes of the value that backward asks for at an event, if it may be absent until then; otherwise 0."""
    need = problem.trace.events[event]
    if not isinstance(need, Need) or not _absent_able(problem, need.value, event):
        return 0
    return problem.trace.buffers[need.value].bytes


def _absent_able(problem: Problem, v: int, event: int) -> bool:
    buffer = problem.trace.buffers[v]
    pinned = any(e < event <= pin for e, pin in problem.needs[v])
    return buffer.counted and event > buffer.held_until and not pinned and (problem.remakeable[v] or problem.can_move(v))


def peak_bound(problem: Problem) -> Bound:
    """The bound from the event with the most forced bytes."""
    forced = forced_live(problem)
    if not len(forced):
        return Bound(peak_bytes=problem.base_bytes, peak_event=-1)
    return Bound(peak_bytes=int(forced.max()), peak_event=int(forced.argmax()))


class UnitTimeBound:
    """Lower bound on the seconds that every plan within a budget adds to the plain run.

    At any event, the absent values together must free the bytes that the plain run has above the budget. Each of them that is
    needed later costs at least the seconds of its operator (once for all values of one operator) or its transfers. The
    relaxation is a fractional knapsack per event, and the bound is the best of the highest events. The knapsack's items are
    the same for every budget, and a runtime asks for a budget in every step, so they are computed once.
    """

    def __init__(self, problem: Problem) -> None:
        """Store the problem; nothing is computed yet."""
        self._problem = problem

    @cached_property
    def _packed(self) -> tuple[tuple[int, NDArray[np.float64], NDArray[np.float64]], ...]:
        """Per highest event: bytes in the plain run, and bytes freed and seconds added as the knapsack fills, best first."""
        highest = self._problem.plain_live + self._problem.rise
        offers = _Offers(self._problem)
        return tuple((int(highest[event]), *offers.at(int(event))) for event in np.argsort(highest)[::-1][:_EVENTS_TRIED])

    def at(self, budget_bytes: int) -> float:
        """The bound for a budget, in seconds."""
        return max(
            (float(np.interp(peak - budget_bytes, freed, seconds)) for peak, freed, seconds in self._packed), default=0.0
        )


class _Offers:
    """What being absent frees and costs, for every counted value that can be recomputed or moved, in columns.

    Values that one operator makes are one offer: it runs once for all of them.
    """

    def __init__(self, problem: Problem) -> None:
        """Gather the columns."""
        buffers, needs = problem.trace.buffers, problem.needs
        priced = [(v, price) for v, b in enumerate(buffers) if b.counted and (price := _price(problem, v)) is not None]
        self._bytes = np.array([buffers[v].bytes for v, _ in priced], dtype=np.float64)
        self._price = np.array([price for _, price in priced])
        self._born = np.array([buffers[v].born for v, _ in priced], dtype=np.int64)
        self._held_until = np.array([buffers[v].held_until for v, _ in priced], dtype=np.int64)
        self._end = np.array([problem.end(v) for v, _ in priced], dtype=np.int64)
        self._last_need = np.array([max((e for e, _ in needs[v]), default=-1) for v, _ in priced], dtype=np.int64)
        keys = [buffers[v].born if buffers[v].born >= 0 else -2 - v for v, _ in priced]
        groups, group = np.unique(np.array(keys, dtype=np.int64), return_inverse=True)
        self._group, self._groups = group.reshape(-1), len(groups)
        pins = [(at, e, pin) for at, (v, _) in enumerate(priced) for e, pin in needs[v] if pin > e]
        self._pinned, self._pinned_from, self._pinned_until = np.array(pins, dtype=np.int64).reshape(-1, 3).T

    def at(self, event: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes freed and seconds added at an event as values become absent, the cheapest per byte first."""
        there = (self._born < event) & (event <= self._end) & (event > self._held_until)
        there[self._pinned[(self._pinned_from < event) & (event <= self._pinned_until)]] = False
        group = self._group[there]
        size = np.bincount(group, weights=self._bytes[there], minlength=self._groups)
        cost = np.full(self._groups, np.inf)
        np.minimum.at(cost, group, np.where(self._last_need >= event, self._price, 0.0)[there])
        size, cost = size[size > 0], cost[size > 0]
        best = np.argsort(cost / size, kind="stable")
        return np.concatenate(([0.0], np.cumsum(size[best]))), np.concatenate(([0.0], np.cumsum(cost[best])))


def _price(problem: Problem, v: int) -> float | None:
    """The least that a value's absence costs if it is needed afterwards, in seconds; None if it cannot be absent."""
    prices = [problem.again_seconds(problem.maker(v))] if problem.remakeable[v] else []
    if problem.can_move(v):
        prices.append(problem.move_seconds(v))
    return min(prices, default=None)
