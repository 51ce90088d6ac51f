"""``solve(graph, budget)``: selects the solver for a graph and a budget.

| question | solver | answer |
|---|---|---|
| the floor is above the budget | ``peak_bounds.floor`` | ``infeasible``, with the node that proves it |
| the given order fits | none | ``optimal``, nothing runs twice |
| few nodes | ``exhaustive.search`` | ``optimal`` or ``infeasible``, from all schedules; if time runs out, as any other graph |
| any other | ``rounds.Hunt`` beside ``time_bounds`` | ``optimal`` if plan and bound meet, else ``feasible`` with the gap |
| nothing found that fits | | ``unknown``: no plan found, none ruled out |
| no budget | ``rounds.lowest_order`` beside ``peak_bounds.once`` | the order of the lowest peak found, each operator once |

The referee plays every answer before it is returned.

One module: it is the list of these cases, each a few lines, in the order in which they are tried.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from lowtide.base.errors import StructureError
from lowtide.planning.bounds import peak_bounds, time_bounds
from lowtide.planning.bounds.peak_bounds import PeakBound
from lowtide.planning.bounds.precedence import Instant, Precedence
from lowtide.planning.bounds.solver_process import kept_ready
from lowtide.planning.bounds.time_bounds import TimeBound
from lowtide.planning.graph import Graph
from lowtide.planning.graph_arrays import Game, game_of
from lowtide.planning.referee import Timeline, play
from lowtide.planning.schedule import Row, Schedule, plain_row, unfold
from lowtide.planning.search import classics, exhaustive
from lowtide.planning.search.annealing import AnnealedRow, Annealer, library
from lowtide.planning.search.descent import Descent
from lowtide.planning.search.prefetch import faster
from lowtide.planning.search.programs import LARGE, SAME, Programs
from lowtide.planning.search.rounds import Hunt, lowest_order
from lowtide.planning.status import Status

SECONDS = 8.0
"""Default time limit of a search, in seconds."""
_FLOOR_SECONDS = 5.0
"""Time limit, in seconds, of the program for the floor, which takes no longer than the first program of a search."""
_ORDERS_SHARE = 0.05
"""Share of a search's time limit for the floor over all orders, which may rule the budget out."""
_PLAYED, _PLAYED_SHARE = 2.0, 0.1
"""Time reserved for judging the rows found: this multiple of the time to play the given order, at most this share of the
limit."""
_CURVE_DESCENT_SHARE = 0.25
"""Share of a curve's time for the greedy descent to its lowest budget."""
_OVERLAPPED, _HIDDEN = 0.25, 0.1
"""If transfers overlap with computation: shares of a transfer's seconds that the first and the second search count."""
_FIRST_SHARE = 0.65
"""Share of the time for the first of these searches."""
_LEFT = 0.5
"""The second search starts only if this part of its share of the time is left."""
_LONGEST = 1e8
"""Upper limit for the seconds of any search, because the timeouts of threads are limited."""
_EXACT_SHARE = 0.5
"""Share of the time for the exhaustive search of a small graph; if it does not end, the graph is searched like others."""
_LEAST_SHARE = 0.25
"""Smallest time for each budget of a curve, as a share of an equal split."""


class Order(StrEnum):
    """Whether first runs keep the given order."""

    FIXED = "fixed"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan with its certificate.

    Attributes:
        status: whether there is a plan, and whether a better one is possible.
        graph: the graph that was solved.
        order: whether first runs keep the given order.
        budget_bytes: the budget; None if the lowest peak was asked for.
        row, schedule, timeline: the plan as a row and in full, and the outcome of playing it; for ``unknown`` that of the
            lowest peak that was found, for ``infeasible`` the given order (that of a named strategy in both cases).
        given_peak_bytes: peak of the given order without a plan.
        peak_bound: lower bound on the peak of every plan of this kind.
        time_bound: lower bound on the extra seconds of every plan within the budget.
        solve_seconds: duration of the search.
        rounds: rounds of annealing, plus rows that were counted as starts or offers.
    """

    status: Status
    graph: Graph
    order: Order
    budget_bytes: int | None
    row: Row
    schedule: Schedule
    timeline: Timeline
    given_peak_bytes: int
    peak_bound: PeakBound
    time_bound: TimeBound
    solve_seconds: float
    rounds: int

    @property
    def extra_seconds(self) -> float:
        """Seconds beyond running every operator once."""
        return max(0.0, self.timeline.seconds - self.graph.base_seconds)

    @property
    def extra_fraction(self) -> float:
        """Extra seconds as a share of the seconds of every operator once."""
        return self.extra_seconds / self.graph.base_seconds if self.graph.base_seconds else 0.0


class Solver:
    """Solves one graph for one or several budgets."""

    def __init__(self, graph: Graph, *, order: Order = Order.FIXED, overlapped: float = _OVERLAPPED) -> None:
        """Play the given order; nothing is searched yet.

        Args:
            graph: the graph.
            order: whether first runs keep the given order.
            overlapped: share of a transfer's seconds that the search counts if transfers overlap with computation.
        """
        self.graph = graph
        self.order = order
        self.fixed = order is Order.FIXED
        self.overlaps = graph.offload is not None and graph.offload.overlap
        self.game = game_of(graph, transfer_share=overlapped if self.overlaps else 1.0)
        self.precedence = Precedence(self.game, fixed=self.fixed)
        self.row = plain_row(graph)
        began = time.monotonic()
        self.given = play(graph, unfold(graph, self.row))
        self._playing = time.monotonic() - began
        self._closed: PeakBound | None = None

    @cached_property
    def instants(self) -> list[Instant]:
        """The first runs that bounds examine."""
        return peak_bounds.looked_at(self.game, self.precedence)

    @cached_property
    def _other(self) -> Solver:
        """A solver of the same graph that assumes that more of each transfer is hidden."""
        return Solver(self.graph, order=self.order, overlapped=_HIDDEN)

    @cached_property
    def floor(self) -> PeakBound:
        """A lower bound on the peak of every plan, from values without a way back."""
        return peak_bounds.floor(self.game, self.precedence, self.instants)

    def closed_floor(self, *, seconds: float = _FLOOR_SECONDS) -> PeakBound:
        """The floor, or the bound of the highest instant's closed program if it is higher.

        Computed once; if the time is too short for the program, returns the plain floor.
        """
        if self._closed is not None:
            return self._closed
        limit = min(seconds, _FLOOR_SECONDS)
        if limit <= 0:
            return self.floor
        began, highest = time.monotonic(), time_bounds.binding(self.precedence, self.instants, 0)
        closed = [peak_bounds.closed_floor(self.bound_game, self.precedence, at, seconds=limit) for at in highest[:1]]
        if not self.fixed and closed and closed[0].bytes:
            closed.append(peak_bounds.any_order(self.bound_game, self.precedence, highest, deadline=began + limit))
        found = max(*closed, self.floor, key=lambda f: f.bytes) if closed else self.floor
        if limit == _FLOOR_SECONDS or all(one.bytes for one in closed):  # otherwise time may have run out
            self._closed = found
        return found

    @property
    def told_floor(self) -> PeakBound:
        """The floor to report: the closed one, or the plain one for graphs that are searched exhaustively."""
        return self.floor if exhaustive.small(self.graph) else self.closed_floor()

    @cached_property
    def descent(self) -> Descent:
        """The greedy descent to the floor."""
        return Descent(self.game, self.floor.bytes)

    def lowest(self, *, seconds: float = SECONDS) -> Answer:
        """The order of the lowest peak found, with every operator run once."""
        began, seconds = time.monotonic(), min(seconds, _LONGEST)
        least = peak_bounds.once(self.game, self.precedence, self.instants, seconds=seconds / 2)
        row = self.row
        if not self.fixed and library() is not None:
            ops = lowest_order(self.game, deadline=began + seconds, stop_bytes=least.bytes, first_peak=self.given.peak_bytes)
            row = self.game.row(ops)
        answer = self._answer(Status.FEASIBLE, None, row, time_bounds.NOTHING, began, 0, peak_bound=least)
        met = answer.timeline.peak_bytes <= least.bytes or self.fixed
        return replace(answer, status=Status.OPTIMAL) if met else answer

    def at(
        self,
        budget_bytes: int,
        *,
        seconds: float = SECONDS,
        seeds: Sequence[Row] = (),
        progress: Callable[[AnnealedRow], None] | None = None,
    ) -> Answer:
        """The cheapest plan found within a budget.

        Args:
            budget_bytes: the peak that the plan must not exceed.
            seconds: time limit.
            seeds: rows to start from, in addition to the given order.
            progress: called with every better row.
        """
        began, seconds = time.monotonic(), min(seconds, _LONGEST)
        if self.given.peak_bytes <= budget_bytes:
            return self._answer(Status.OPTIMAL, budget_bytes, self.row, time_bounds.NOTHING, began, 0)
        if self.floor.bytes > budget_bytes:
            return self._answer(Status.INFEASIBLE, budget_bytes, self.row, time_bounds.NOTHING, began, 0)
        if exhaustive.small(self.graph):
            with contextlib.suppress(TimeoutError):
                return self._exact(budget_bytes, deadline=began + _EXACT_SHARE * seconds)
            seconds -= time.monotonic() - began
        if not self.overlaps or library() is None:
            return self.searched(budget_bytes, seconds=seconds, seeds=seeds, progress=progress)
        first = self.searched(budget_bytes, seconds=_FIRST_SHARE * seconds, seeds=seeds, progress=progress)
        share, left = (1 - _FIRST_SHARE) * seconds, seconds - (time.monotonic() - began)
        if first.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return first
        if left < _LEFT * share:  # setting up took longer than the search
            return first
        return self.better(first, self._other.searched(budget_bytes, seconds=min(left, share), seeds=seeds))

    def _exact(self, budget: int, *, deadline: float) -> Answer:
        began = time.monotonic()
        row = exhaustive.search(self.graph, budget, fixed=self.fixed, deadline=deadline)
        looked = TimeBound(seconds=0.0, method="search", solved=True)
        if row is None:
            return self._answer(Status.INFEASIBLE, budget, self.row, looked, began, 0)
        answer = self._answer(Status.OPTIMAL, budget, row, looked, began, 0)
        return replace(answer, time_bound=replace(looked, seconds=answer.extra_seconds))

    def better(self, first: Answer, second: Answer) -> Answer:
        """The better plan of two answers for one budget, with the stronger bound and the seconds and rounds of both."""
        for one in (first, second):
            if one.status is Status.INFEASIBLE:
                return one
        best = min(first, second, key=lambda a: _worth(a.timeline, fits=a.status.has_plan))
        proof = max(first.time_bound, second.time_bound, key=lambda b: b.seconds)
        took, rounds = first.solve_seconds + second.solve_seconds, first.rounds + second.rounds
        return self._judged(replace(best, time_bound=proof, solve_seconds=took, rounds=rounds))

    def curve(
        self,
        points: int,
        *,
        seconds: float = SECONDS,
        known: Sequence[Answer] = (),
        progress: Callable[[float], None] | None = None,
    ) -> list[Answer]:
        """Plans for budgets from the given peak down to the floor, evenly spaced; the highest budget first.

        Each search starts from the plan of the next higher budget and gets its share of the time left, so the budgets near the
        floor, which are the hard ones, get the time that the others did not need. A plan also serves for every budget above
        its peak, and a bound also holds for every lower budget: seconds and bounds never fall when the budget falls.

        Args:
            points: number of budgets.
            seconds: time limit for all of them.
            known: plans that were found before for other budgets, with their bounds.
            progress: called with the share of points that are done.
        """
        top = self.given.peak_bytes
        small = exhaustive.small(self.graph)
        low = self.floor.bytes if small else self.closed_floor(seconds=_CURVE_DESCENT_SHARE * seconds).bytes
        budgets = [top - (top - low) * k // max(1, points - 1) for k in range(points)]
        found: list[Answer] = []
        began = time.monotonic()
        deadline = began + seconds
        if not exhaustive.small(self.graph):
            self.descent.below(low, deadline=began + _CURVE_DESCENT_SHARE * seconds)
        for k, budget in enumerate(budgets):
            seeds = [a.row for a in (*found[-1:], *known) if a.status.has_plan]
            if not exhaustive.small(self.graph):
                seeds.append(self.game.row(self.descent.below(budget, deadline=0.0)))
            share = max((deadline - time.monotonic()) / (points - k), _LEAST_SHARE * seconds / points)
            found.append(self.at(budget, seconds=share, seeds=seeds))
            if progress is not None:
                progress((k + 1) / points)
        for k in range(points - 1, -1, -1):
            for lower in (*found[k + 1 : k + 2], *known):
                fits = lower.status.has_plan and lower.timeline.peak_bytes <= budgets[k]
                if fits and (not found[k].status.has_plan or lower.timeline.seconds < found[k].timeline.seconds):
                    found[k] = replace(
                        found[k], row=lower.row, schedule=lower.schedule, timeline=lower.timeline, status=Status.FEASIBLE
                    )
        for k in range(points):
            for higher in (*found[max(0, k - 1) : k], *known):
                holds = higher.budget_bytes is not None and higher.budget_bytes >= budgets[k]
                if holds and higher.time_bound.seconds > found[k].time_bound.seconds:
                    found[k] = replace(found[k], time_bound=higher.time_bound)
        return [self._judged(a) for a in found]

    def _judged(self, answer: Answer) -> Answer:
        """The answer with its status set from plan and bound: optimal if they meet."""
        if answer.status.has_plan:
            met = answer.extra_seconds <= answer.time_bound.seconds + SAME * self.graph.base_seconds
            return replace(answer, status=Status.OPTIMAL if met else Status.FEASIBLE)
        return answer

    def follow(self, row: Row, budget: int | None) -> Answer:
        """The answer for a given row; if it does not fit, ``infeasible`` if the floor does not either, else ``unknown``."""
        began = time.monotonic()
        answer = self._answer(Status.FEASIBLE, budget, row, time_bounds.NOTHING, began, 0)
        if budget is None or answer.timeline.peak_bytes <= budget:
            return answer
        return replace(answer, status=Status.INFEASIBLE if self.floor.bytes > budget else Status.UNKNOWN)

    def searched(
        self,
        budget: int,
        *,
        seconds: float = SECONDS,
        seeds: Sequence[Row] = (),
        progress: Callable[[AnnealedRow], None] | None = None,
    ) -> Answer:
        """A plan by annealing, with bounds; the budget must lie between the floor and the peak of the given order."""
        began = time.monotonic()
        deadline = began + seconds - min(_PLAYED * self._playing, _PLAYED_SHARE * seconds)
        if library() is None:
            rows = [self.row, *seeds, *classics.rows(self.game, budget)]
            bound_ = time_bounds.all_instants(self.bound_game, self.precedence, self.instants, budget, seconds=seconds)
            return self._best(budget, rows, bound_, began, 0, ranked=False)
        if not self.fixed:
            lowest = self.closed_floor(seconds=_ORDERS_SHARE * seconds)
            if lowest.bytes > budget:
                return self._answer(Status.INFEASIBLE, budget, self.row, time_bounds.NOTHING, began, 0, peak_bound=lowest)
        programs = self.programs(budget, deadline=deadline, seeds=seeds, progress=progress)
        hunt = programs.hunt
        with kept_ready() if self.game.plain > LARGE else contextlib.nullcontext():
            single = time_bounds.binding(self.precedence, self.instants, budget)
            highest = itertools.chain.from_iterable(
                time_bounds.highest_instant(self.bound_game, self.precedence, at, budget, deadline=deadline)
                for at in single[:1]
            )
            first = next(highest, time_bounds.NOTHING)
            if first.seconds == math.inf:
                lowest = self.closed_floor(seconds=deadline - time.monotonic())
                if lowest.bytes > budget:
                    return self._answer(Status.INFEASIBLE, budget, self.row, time_bounds.NOTHING, began, 0, peak_bound=lowest)
                first = next(highest, time_bounds.NOTHING)
            others = time_bounds.other_instants(self.bound_game, self.precedence, single[1:], budget, deadline=deadline)
            hunt.start()
            try:
                proof = programs.prove((itertools.chain([first], highest), others))
                found = hunt.wait()
            finally:
                hunt.stop()
        return self._best(budget, [self.game.row(found.ops), *seeds, self.row], proof, began, hunt.rounds, ranked=True)

    def programs(
        self,
        budget: int,
        *,
        deadline: float,
        seeds: Sequence[Row] = (),
        progress: Callable[[AnnealedRow], None] | None = None,
    ) -> Programs:
        """The programs for a budget, with a hunt that is not started yet (``seeds`` and ``progress`` as in :meth:`at`)."""
        hunt = Hunt(
            annealer=Annealer(self.game, budget, fixed=self.fixed),
            starts=[self.game.given, *(self.game.ops(row) for row in seeds)],
            fixed=self.fixed,
            target_seconds=self.game.base_seconds * (1 + SAME),
            deadline=deadline,
            progress=progress,
        )
        return Programs(
            game=self.game,
            bound_game=self.bound_game,
            precedence=self.precedence,
            instants=self.instants,
            budget=budget,
            floor_bytes=self.floor.bytes,
            hunt=hunt,
            descent=lambda: self.descent,
        )

    @cached_property
    def bound_game(self) -> Game:
        """The game for bounds: transfers that overlap with computation cost nothing."""
        return game_of(self.graph, transfer_share=0.0) if self.overlaps else self.game

    def _best(
        self, budget: int, rows: Sequence[Row], proof: TimeBound, began: float, rounds: int, *, ranked: bool
    ) -> Answer:
        """The cheapest of some rows that fits according to the referee; the one of the lowest peak if none does.

        Args:
            budget: in bytes.
            rows: the candidates; those that break a rule are skipped.
            proof: lower bound on the extra seconds of every plan within the budget.
            began: start of the search, by :func:`time.monotonic`.
            rounds: rounds of the search.
            ranked: whether the first row is the best by the search's count. If it fits, the others are then not played, unless
                transfers overlap with computation.
        """
        played = []
        for row in dict.fromkeys(rows):
            try:
                schedule = unfold(self.graph, row)
                timeline = play(self.graph, schedule)
            except StructureError:
                continue
            fits = timeline.peak_bytes <= budget
            best = row
            if fits:
                best, timeline = faster(self.graph, row, timeline, budget)
            if best is not row:
                schedule = unfold(self.graph, best)
            played.append((_worth(timeline, fits=fits), best, schedule, timeline, fits))
            if fits and ranked and not self.overlaps:
                break
        _, row, schedule, timeline, fits = min(played, key=lambda x: x[0])
        status = Status.FEASIBLE if fits else Status.UNKNOWN
        return self._judged(self._answer(status, budget, row, proof, began, rounds, played=(schedule, timeline)))

    def _answer(
        self,
        status: Status,
        budget: int | None,
        row: Row,
        proof: TimeBound,
        began: float,
        rounds: int,
        *,
        peak_bound: PeakBound | None = None,
        played: tuple[Schedule, Timeline] | None = None,
    ) -> Answer:
        if played is None:
            schedule = unfold(self.graph, row)
            played = schedule, play(self.graph, schedule)
        return Answer(
            status=status,
            graph=self.graph,
            order=self.order,
            budget_bytes=budget,
            row=row,
            schedule=played[0],
            timeline=played[1],
            given_peak_bytes=self.given.peak_bytes,
            peak_bound=peak_bound or self.floor,
            time_bound=proof,
            solve_seconds=time.monotonic() - began,
            rounds=rounds,
        )


def _worth(timeline: Timeline, *, fits: bool) -> tuple[bool, float, int]:
    """Sort key, smaller is better: plans that fit come first, by seconds; others by peak."""
    return (not fits, timeline.seconds if fits else 0.0, timeline.peak_bytes)


def solve(graph: Graph, budget_bytes: int, *, order: Order = Order.FIXED, seconds: float = SECONDS) -> Answer:
    """Find a plan for a graph within a budget in bytes."""
    return Solver(graph, order=order).at(budget_bytes, seconds=seconds)
