"""``solve(graph, budget)``: which solver answers what.

| question | solver | answer |
|---|---|---|
| the floor is above the budget | ``bound.floor`` | ``infeasible``, with the node that proves it |
| the given order fits | none | ``optimal``, nothing runs twice |
| few nodes | ``exact.search`` | ``optimal`` or ``infeasible``, all schedules looked at |
| any other | ``search.Hunt`` beside ``bound`` | ``optimal`` where plan and bound meet, else ``feasible`` with the gap |
| nothing fits | | ``unknown``: no plan found, none ruled out |
| no budget | ``search.lowest_order`` beside ``bound.once`` | the order of the lowest peak found, each operator once |

Every answer is played by the referee before it is returned.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from lowtide.errors import StructureError
from lowtide.pebble import bound, classics, exact
from lowtide.pebble.anneal import Annealer, Found, library
from lowtide.pebble.apart import kept_ready
from lowtide.pebble.before import Instant, Precedence
from lowtide.pebble.bound import PeakBound, TimeBound
from lowtide.pebble.checkpoints import SPACINGS, Crossings
from lowtide.pebble.descent import Descent
from lowtide.pebble.game import Game, game_of, profile
from lowtide.pebble.graph import Graph
from lowtide.pebble.lazy import row_without
from lowtide.pebble.prefetch import faster
from lowtide.pebble.referee import Timeline, play
from lowtide.pebble.schedule import Row, Schedule, plain_row, unfold
from lowtide.pebble.search import Hunt, lowest_order
from lowtide.pebble.status import Status
from lowtide.pebble.windows import Chain, chain_seconds

SECONDS = 8.0
"""How long a search may take by default."""
_FLOOR_SECONDS = 5.0
"""Time limit of the program for the floor, which takes no more than the first one of a search."""
_LARGE = 1000
"""Operators beyond which a process for programs is begun at once: theirs may be too large to be asked within this one."""
_CLOSED = 5000
"""Operators up to which the closed floor is told with every plan."""
_SAME = 1e-9
"""Share of the graph's seconds within which plan and bound are one: what sums of seconds lose to rounding."""
_STAGES = (25, 60)
"""Instants that the program over several of them looks at: first so many, then, if time is left, so many."""
_SEED_SHARE = 0.7
"""Share of the time limit that programs may take from which half of the search begins."""
_DESCENT_SHARE = 0.8
"""Share of what is left then in which a row that fits may be looked for by greed, where no program has led to one."""
_LOWERED_SHARE = 0.3
"""Share of what is left for programs in which greed may lower the row of one."""
_CURVE_DESCENT_SHARE = 0.25
"""Share of a curve's time for the way down to its lowest budgets."""
_NEAR = 5e-4
"""Share of the graph's seconds within which of what an instant proves no further checkpoints are tried."""
_MENDED_SHARE = 0.7
"""Share of this time in which the highest instant's rows are given room elsewhere."""
_LEAST_ROOM, _SPARE = 2e-4, 4
"""Share of the budget by which it is lowered on top of what was too much, with the 2 ** so manieth part of that."""
_HOPELESS = 0.1
"""Share of the budget above which what a row has too much is no matter of a little room."""
_ROOMS = 6
"""How often the budget of such a program is lowered until its row fits."""
_SEED_FREE = 5000
"""Operators up to which it grows in free order, where comparing instants takes all ancestors."""
_SEED_NEW, _SEED_MORE = 3, 7
"""Instants that join it at once, at most: at first, and from then on (a program of few more takes as long as one of many)."""
_SEED_APART = 200
"""They are this fraction of the graph apart."""
_SEED_GROWS = 1.5
"""So many times as long as the one before it a program with more of them is expected to take."""
_SEED_GAP = 1e-3
"""Relative gap at which it may stop."""
_OVERLAPPED, _HIDDEN = 0.25, 0.1
"""Share of a transfer's seconds that the search counts where transfers overlap with computing, and that another one does."""
_FIRST_SHARE = 0.65
"""Share of the time of the first of these searches."""
_LEFT = 0.5
"""Part of its own share that must be left for the other one to begin."""
_LEAST_SHARE = 0.25
"""Share of an even share of the time that each budget of a curve has at least."""
_GROWN_SHARE = 0.3
"""Share of the time of programs in which instants join by what relaxed answers cross, and nothing is made of these."""
_RELAXED_SHARE = 0.5
"""Share of what is left of it in which one of these is solved, or given up."""
_SET_UP = 2e-4
"""Seconds per operator in which the program of all instants is hardly set up."""
_WHOLE_SHARE = 0.85
"""Share of what is left then in which the last of them is solved with whole variables; its answer is mended in the rest."""
_WHOLE_LEAST = 0.25
"""Share of it in which HiGHS has hardly begun with a large one: then the row is mended instead."""
_DIVE_SHARE = 0.6
"""Share of what is left in which a whole answer near a relaxed one is looked for."""
_NEAR_GAP = 1e-2
"""Relative gap at which it may stop, as the program itself is solved after it."""
_NEAR_SHARE = 0.6
"""Share of what is left in which rows near the relaxed answers of a large program are looked for before it is solved whole."""
_MENDABLE = 0.02
"""Share of the budget by which a row may cross it and is lowered and mended; where it crosses it farther, instants join."""
_LIGHT = 3e-3
"""Share of the budget that values which are taken for 0 bytes come to together, in programs too large to be whole."""
_LIGHT_FROM = 4
"""Instants from which they are."""
_STAGE_VARIABLES = 9000
"""Variables up to which it is set up with all variables whole."""


class Order(StrEnum):
    """Whether first runs keep the given order."""

    FIXED = "fixed"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan with its certificate.

    Attributes:
        status: what is known of it.
        graph: what was asked about.
        order: whether first runs keep the given order.
        budget_bytes: what was asked; None where the lowest peak was.
        row, schedule, timeline: the plan, in short and in full, and how it plays; for ``infeasible`` and ``unknown`` the one
            of the lowest peak that was found.
        given_peak_bytes: of the given order without a plan.
        peak_bound: no plan of this kind has a lower peak.
        time_bound: no plan within the budget adds fewer seconds.
        solve_seconds: how long the search took.
        rounds: of annealing.
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
        """Seconds on top of every operator once."""
        return max(0.0, self.timeline.seconds - self.graph.base_seconds)

    @property
    def extra_fraction(self) -> float:
        """The same as a share of these."""
        return self.extra_seconds / self.graph.base_seconds if self.graph.base_seconds else 0.0


class Solver:
    """One graph, asked for one or several budgets."""

    def __init__(self, graph: Graph, *, order: Order = Order.FIXED, overlapped: float = _OVERLAPPED) -> None:
        """Nothing is searched yet.

        Args:
            graph: what is asked.
            order: whether first runs keep the given order.
            overlapped: share of a transfer's seconds that the search counts where transfers overlap with computing.
        """
        self.graph = graph
        self.order = order
        self.fixed = order is Order.FIXED
        self.overlaps = graph.offload is not None and graph.offload.overlap
        self.game = game_of(graph, transfer_share=overlapped if self.overlaps else 1.0)
        self.precedence = Precedence(self.game, fixed=self.fixed)
        self.row = plain_row(graph)
        self.given = play(graph, unfold(graph, self.row))
        self._closed: PeakBound | None = None

    @cached_property
    def instants(self) -> list[Instant]:
        """First runs that the bounds look at."""
        return bound.looked_at(self.game, self.precedence)

    @cached_property
    def _other(self) -> Solver:
        """The same graph, with more of each transfer taken to be hidden."""
        return Solver(self.graph, order=self.order, overlapped=_HIDDEN)

    @cached_property
    def floor(self) -> PeakBound:
        """The peak that no plan goes below."""
        return bound.floor(self.game, self.precedence, self.instants)

    def closed_floor(self, *, seconds: float = _FLOOR_SECONDS) -> PeakBound:
        """The same, or what the highest instant proves with what comes back there, if that is higher.

        Looked for once; where the time does not do, the other one is told.
        """
        if self._closed is not None:
            return self._closed
        limit = min(seconds, _FLOOR_SECONDS)
        if limit <= 0:
            return self.floor
        highest = bound.binding(self.precedence, self.instants, 0)[:1]
        closed = [bound.closed_floor(self.bound_game, self.precedence, at, seconds=limit) for at in highest]
        found = max(*closed, self.floor, key=lambda f: f.bytes) if closed else self.floor
        if limit == _FLOOR_SECONDS or all(one.bytes for one in closed):  # else it was perhaps for want of time
            self._closed = found
        return found

    @property
    def told_floor(self) -> PeakBound:
        """The closed floor, where it takes no time worth speaking of; else the other one."""
        return self.floor if self.game.plain > _CLOSED or exact.small(self.graph) else self.closed_floor()

    @cached_property
    def descent(self) -> Descent:
        """Rows on the way down to the floor."""
        return Descent(self.game, self.floor.bytes)

    def lowest(self, *, seconds: float = SECONDS) -> Answer:
        """The order of the lowest peak, every operator once."""
        began = time.monotonic()
        least = bound.once(self.game, self.precedence, self.instants)
        row = self.row
        if not self.fixed and library() is not None:
            ops = lowest_order(self.game, deadline=began + seconds, stop_bytes=least.bytes, first_peak=self.given.peak_bytes)
            row = self.game.row(ops)
        answer = self._answer(Status.FEASIBLE, None, row, bound.NOTHING, began, 0, peak_bound=least)
        met = answer.timeline.peak_bytes <= least.bytes or self.fixed
        return replace(answer, status=Status.OPTIMAL) if met else answer

    def at(
        self,
        budget_bytes: int,
        *,
        seconds: float = SECONDS,
        seeds: Sequence[Row] = (),
        progress: Callable[[Found], None] | None = None,
    ) -> Answer:
        """The cheapest plan within a budget.

        Args:
            budget_bytes: the peak that may not be crossed.
            seconds: how long may be searched.
            seeds: rows to begin from, besides the given order.
            progress: told of every better row.
        """
        began = time.monotonic()
        if self.given.peak_bytes <= budget_bytes:
            return self._answer(Status.OPTIMAL, budget_bytes, self.row, bound.NOTHING, began, 0)
        if self.floor.bytes > budget_bytes:
            return self._answer(Status.INFEASIBLE, budget_bytes, self.row, bound.NOTHING, began, 0)
        if exact.small(self.graph):
            row = exact.search(self.graph, budget_bytes, fixed=self.fixed)
            looked = TimeBound(seconds=0.0, method="search", solved=True)
            if row is None:
                return self._answer(Status.INFEASIBLE, budget_bytes, self.row, looked, began, 0)
            answer = self._answer(Status.OPTIMAL, budget_bytes, row, looked, began, 0)
            return replace(answer, time_bound=replace(looked, seconds=answer.extra_seconds))
        if not self.overlaps or library() is None:
            return self.searched(budget_bytes, seconds=seconds, seeds=seeds, progress=progress)
        first = self.searched(budget_bytes, seconds=_FIRST_SHARE * seconds, seeds=seeds, progress=progress)
        share, left = (1 - _FIRST_SHARE) * seconds, seconds - (time.monotonic() - began)
        if first.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return first
        if left < _LEFT * share:  # what it took to begin was more than the search itself
            return first
        return self.better(first, self._other.searched(budget_bytes, seconds=min(left, share), seeds=seeds))

    def better(self, first: Answer, second: Answer) -> Answer:
        """Of two answers for one budget the better plan, with the stronger bound; what it took is what both did."""
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

        Each search begins with the plan of the budget above it, and may take its share of the time that is left: the budgets
        near the floor, which are the hard ones, have what the others did not need. A plan that fits a budget serves for every
        budget above its peak too, and a bound holds for every budget below: seconds and bounds never fall as the budget does.

        Args:
            points: how many.
            seconds: for all of them.
            known: plans for budgets that were found before, with their bounds.
            progress: told the share that is done.
        """
        top = self.given.peak_bytes
        low = self.floor.bytes if exact.small(self.graph) else self.closed_floor(seconds=_CURVE_DESCENT_SHARE * seconds).bytes
        budgets = [top - (top - low) * k // max(1, points - 1) for k in range(points)]
        found: list[Answer] = []
        began = time.monotonic()
        deadline = began + seconds
        if not exact.small(self.graph):
            self.descent.below(low, deadline=began + _CURVE_DESCENT_SHARE * seconds)
        for k, budget in enumerate(budgets):
            seeds = [a.row for a in (*found[-1:], *known) if a.status.has_plan]
            if not exact.small(self.graph):
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
        """An answer with what plan and bound say of each other."""
        if answer.status.has_plan:
            met = answer.extra_seconds <= answer.time_bound.seconds + _SAME * self.graph.base_seconds
            return replace(answer, status=Status.OPTIMAL if met else Status.FEASIBLE)
        return answer

    def follow(self, row: Row, budget: int | None) -> Answer:
        """A named plan, judged like any other: where it does not fit, ``infeasible`` if no plan does, else ``unknown``."""
        began = time.monotonic()
        answer = self._answer(Status.FEASIBLE, budget, row, bound.NOTHING, began, 0)
        if budget is None or answer.timeline.peak_bytes <= budget:
            return answer
        return replace(answer, status=Status.INFEASIBLE if self.floor.bytes > budget else Status.UNKNOWN)

    def searched(
        self,
        budget: int,
        *,
        seconds: float = SECONDS,
        seeds: Sequence[Row] = (),
        progress: Callable[[Found], None] | None = None,
    ) -> Answer:
        """A plan by annealing, bounds beside it, whatever the graph's size; the budget lies between floor and given peak."""
        began = time.monotonic()
        deadline = began + seconds
        if library() is None:
            rows = [self.row, *seeds, *classics.rows(self.game, budget)]
            bound_ = bound.all_instants(self.game, self.precedence, self.instants, budget, seconds=seconds)
            return self._best(budget, rows, bound_, began, 0)
        starts = [self.game.given, *(self.game.ops(row) for row in seeds)]
        base = self.game.base_seconds
        hunt = Hunt(
            annealer=Annealer(self.game, budget, fixed=self.fixed),
            starts=starts,
            fixed=self.fixed,
            target_seconds=base * (1 + _SAME),
            deadline=deadline,
            progress=progress,
        )
        with kept_ready() if self.game.plain > _LARGE else contextlib.nullcontext():
            until = time.monotonic() + _SEED_SHARE * seconds
            single = bound.binding(self.precedence, self.instants, budget)
            highest = itertools.chain.from_iterable(
                bound.highest_instant(self.bound_game, self.precedence, at, budget, deadline=until) for at in single[:1]
            )
            first = next(highest, bound.NOTHING)
            if first.seconds == math.inf:
                lowest = self.closed_floor(seconds=deadline - time.monotonic())
                if lowest.bytes > budget:
                    return self._answer(Status.INFEASIBLE, budget, self.row, bound.NOTHING, began, 0, peak_bound=lowest)
                first = next(highest, bound.NOTHING)
            others = bound.other_instants(self.bound_game, self.precedence, single[1:], budget, deadline=until)
            hunt.start()
            proof = self._prove(budget, hunt, *self._seed(budget, hunt, (itertools.chain([first], highest), others), until))
        found = hunt.wait()
        return self._best(budget, [self.row, self.game.row(found.ops), *seeds], proof, began, hunt.rounds)

    def _seed(
        self, budget: int, hunt: Hunt, single: Sequence[Iterable[TimeBound]], until: float
    ) -> tuple[TimeBound, Chain | None]:
        """Rows from what programs leave absent; an instant at which such a row crosses the budget joins the program.

        Args:
            budget: in bytes.
            hunt: which these rows are for.
            single: what the highest instant proves, and what others do.
            until: of :func:`time.monotonic`.

        Returns:
            The strongest bound, and the last program of several instants.
        """
        found = best = bound.NOTHING
        rows: list[tuple[int, ...]] = []
        row: tuple[int, ...] = ()
        for k, proven in enumerate(single):
            for one in proven:
                best = self._stronger(best, one, hunt)
                new = self._rows_of(one)
                if new and one.seconds >= found.seconds:
                    found, row = one, new[0]
                hunt.suggest(new)
                rows += new
                if hunt.over or (self.fixed and new and self._hopeless(new, budget)):
                    break  # others decide, too, and prove more together
            if hunt.over:
                break
            if not k and row:
                rows += self._mended(budget, found, row, hunt, until)
                if self.fixed and self._over(row, budget) > 0:
                    break
        several, new = self._chain(budget, hunt, found, row, until)
        rows += new
        if several is not None:
            best = self._stronger(best, several.proven, hunt)
        elif self.fixed and self.game.plain > _LARGE and hunt.best is not None:
            rows = [hunt.best.ops, *rows]
            hunt.offer(rows)
            rows = self._descended(budget, rows, hunt)
        else:  # once: what is offered must not depend on the clock
            rows += self._descended(budget, rows, hunt)
        hunt.offer(rows)
        return best, several

    def _chain(
        self, budget: int, hunt: Hunt, found: TimeBound, row: tuple[int, ...], until: float
    ) -> tuple[Chain | None, list[tuple[int, ...]]]:
        """The program of the instants at which rows of such programs cross the budget, which join it until none does.

        Args:
            budget: in bytes.
            hunt: which its rows are for.
            found: what an instant proves.
            row: its row.
            until: of :func:`time.monotonic`.

        Returns:
            The last of these programs, and rows of whole answers near relaxed ones (of none where values are left out).
        """
        rows: list[tuple[int, ...]] = []
        several: Chain | None = None
        known = {self.game.nodes.index(v) for v in found.nodes}
        took = 0.0
        grow_until = time.monotonic() + _GROWN_SHARE * (until - time.monotonic())
        while row and not hunt.over and (now := time.monotonic()) < grow_until and until - now > _SEED_GROWS * took:
            grown = self._grown(budget, known, row, most=_SEED_NEW if several is None else _SEED_MORE)
            if grown is None:
                break
            several = grown
            known = {at.op for at in several.tight}
            if several.light:
                several.relax(seconds=_RELAXED_SHARE * (until - now), rounds=1)
                new = self._rows_of(several.rounded())
                if not self._hopeless(new, budget):
                    hunt.rest()
            else:
                self._stronger(bound.NOTHING, several.relax(seconds=until - now), hunt)
                answer = several.dive(seconds=until - time.monotonic(), gap=_SEED_GAP)
                new = self._rows_of(answer)
                rows += [*new, *self._lowered(budget, answer, new, until)]
            row = new[0] if new else ()
            hunt.suggest([*new, *rows[-1:]])
            took = time.monotonic() - now
        if several is not None and several.light and self._hopeless([row] if row else [], budget):
            self._stronger(bound.NOTHING, several.proven, hunt)
            return None, rows
        if several is not None and several.light and not hunt.fits:
            rows += self._lowered(budget, several.rounded(), [], until)
            hunt.suggest(rows[-1:])
        return several, rows

    def _grown(
        self, budget: int, known: AbstractSet[int], row: tuple[int, ...], *, most: int, like: Chain | None = None
    ) -> Chain | None:
        """The program of some instants and those at which a row crosses the budget; None where there are no others."""
        if not self.fixed and self.game.plain > _SEED_FREE:
            return None
        crossed = self._crossed(row, budget, known, most=most)
        chain = sorted({*known, *crossed})
        if not crossed or any(not self.precedence.comparable(a, b) for a, b in itertools.pairwise(chain)):
            return None
        at = [self.precedence.instant(o) for o in chain]
        light = self._light(budget, len(chain))
        return Chain(self.bound_game, self.precedence, at, budget, like=like, light=light)

    def _light(self, budget: int, instants: int) -> frozenset[int]:
        """Values so small that a large program does without them."""
        game = self.game
        if instants < _LIGHT_FROM or instants * len(game.value_nodes) <= _STAGE_VARIABLES:
            return frozenset()
        sizes = np.where(game.returns, game.bytes, budget)
        smallest = np.argsort(sizes, kind="stable")
        some = int(np.searchsorted(np.cumsum(sizes[smallest]), _LIGHT * budget, side="right"))
        return frozenset(smallest[:some].tolist())

    def _descended(self, budget: int, rows: Sequence[tuple[int, ...]], hunt: Hunt) -> list[tuple[int, ...]]:
        """Where none of some rows nearly fits, one from the way down by greed: near the floor nothing else may."""
        if any(self._over(row, budget) <= _MENDABLE * budget for row in rows):
            return []
        now = time.monotonic()
        lower = self.descent.below(budget, deadline=now + _DESCENT_SHARE * (hunt.deadline - now))
        hunt.suggest([lower])
        return [lower]

    def _lowered(
        self, budget: int, answer: TimeBound, rows: Sequence[tuple[int, ...]], until: float
    ) -> list[tuple[int, ...]]:
        """Where none of an answer's rows fits, that with what crosses the budget taken away by greed; none where it fails."""
        if any(self._fits(row, budget) for row in rows):
            return []
        now = time.monotonic()
        way = Descent(self.game, self.floor.bytes, absent=answer.absent, fetched=answer.fetched)
        row = way.below(budget, deadline=now + _LOWERED_SHARE * (until - now))
        return [row] if self._fits(row, budget) else []

    def _rows_of(self, found: TimeBound) -> list[tuple[int, ...]]:
        """What a program's answer comes to, if it has one: in fewest runs, then in fewer bytes."""
        if not found.absent:
            return []
        return [row_without(self.game, found.absent, found.fetched, forgets=f) for f in (False, True)]

    def _over(self, row: Sequence[int], budget: int) -> int:
        """By how much a row crosses the budget."""
        return int(profile(self.game, row).max()) - budget

    def _hopeless(self, rows: Sequence[tuple[int, ...]], budget: int) -> bool:
        """Whether the first of some rows crosses the budget so far that no little room helps."""
        return not rows or self._over(rows[0], budget) > _HOPELESS * budget

    def _fits(self, row: Sequence[int], budget: int) -> bool:
        return self._over(row, budget) <= 0

    def _mended(
        self, budget: int, found: TimeBound, row: tuple[int, ...], hunt: Hunt, until: float
    ) -> list[tuple[int, ...]]:
        """Rows of an instant that have room elsewhere: with less on the board then, and with checkpoints."""
        now = time.monotonic()
        until = now + _MENDED_SHARE * (until - now)
        at = self.precedence.instant(self.bound_game.nodes.index(found.nodes[0]))
        alone = bound.Alone(self.bound_game, self.precedence, at, budget)
        over = self._over(row, budget)
        rows = self._with_room(budget, alone, until, over=over) if 0 < over < _HOPELESS * budget else []
        hunt.suggest(rows)
        crossings = Crossings(self.game, at.op)
        for kept in dict.fromkeys(crossings.values(spacing) for spacing in SPACINGS):
            if hunt.over or hunt.within(found.seconds + _NEAR * self.game.base_seconds):
                break
            new = self._with_room(budget, alone, until, kept=kept)
            hunt.suggest(new)
            rows += new
            if self.fixed and new and self._hopeless(new, budget):
                break
        return rows

    def _with_room(
        self, budget: int, alone: bound.Alone, until: float, *, over: int = 0, kept: AbstractSet[int] = frozenset()
    ) -> list[tuple[int, ...]]:
        """Rows of one instant, for ever lower budgets until one fits: what comes back elsewhere needs room there.

        Of a long graph of small blocks that is little; such a row is near the best.

        Args:
            budget: in bytes.
            alone: the instant's program.
            until: of :func:`time.monotonic`.
            over: by how much the row crosses the budget that the program was given without this.
            kept: values that are on the board then.
        """
        rows: list[tuple[int, ...]] = []
        lower = budget - over
        for k in range(_ROOMS):
            left = until - time.monotonic()
            if left <= 0 or lower <= 0:
                break
            found = alone.absent(lower, seconds=left, kept=kept)
            if not found.absent:
                break
            row = row_without(self.game, found.absent, found.fetched)
            before, over = over, self._over(row, budget)
            if before and over > before:  # what runs again takes more than the room that it made
                break
            rows.append(row)
            if over <= 0:
                break
            lower -= over + (over >> _SPARE) + int(_LEAST_ROOM * budget) << k  # what is dropped then may bring more back
        return rows

    def _crossed(self, row: tuple[int, ...], budget: int, known: AbstractSet[int], *, most: int) -> list[int]:
        """Operators whose first runs follow the highest places of a row above the budget, apart from each other."""
        high = profile(self.game, row)
        seen: set[int] = set()
        firsts = []
        for o in row:
            firsts.append(o if o not in seen and o < self.game.plain else -1)  # a fetch is no first run
            seen.add(o)
        found: list[int] = []
        apart = self.game.plain // _SEED_APART
        for place in np.argsort(-high)[: int((high > budget).sum())]:
            following = next((o for o in firsts[place:] if o >= 0), -1)
            near = any(abs(following - o) <= apart for o in found)
            if following >= 0 and following not in known and following != self.game.last and not near:
                found.append(following)
            if len(found) == most:
                break
        return found

    def _prove(self, budget: int, hunt: Hunt, first: TimeBound, several: Chain | None) -> TimeBound:
        """Bounds, from the quick one to the strong one, while the hunt goes on; each raises what the hunt is content with."""
        game = self.bound_game
        left = hunt.deadline - time.monotonic()
        if several is not None and left > 0 and not hunt.over:
            return self._stronger(first, self._whole(budget, hunt, several), hunt)
        best = first
        if left > _SET_UP * game.plain:
            every = bound.all_instants(game, self.precedence, self.instants, budget, seconds=left / 2)
            best = self._stronger(first, every, hunt)
        for most in _STAGES:
            left = hunt.deadline - time.monotonic()
            chain = bound.tight_chain(self.precedence, self.instants, budget, most=most)
            if hunt.over or left < 0.2 or len(chain) < 2 or 2 * len(chain) * len(game.value_nodes) > _STAGE_VARIABLES:
                break
            stronger = chain_seconds(game, self.precedence, chain, budget, seconds=left)
            best = self._stronger(best, stronger, hunt)
            if len(chain) < most:
                break
        return best

    def _whole(self, budget: int, hunt: Hunt, several: Chain) -> TimeBound:
        """A program with whole variables, from a row near its relaxed answer; what comes of both is mended."""
        now = time.monotonic()
        left = hunt.deadline - now
        if self.fixed:
            hunt.rest()
        if several.light:
            several = self._near(budget, hunt, several, now + _NEAR_SHARE * left)
        if not hunt.fits:
            hunt.offer(self._descended(budget, [], hunt))
        last = now + _WHOLE_SHARE * left - time.monotonic()
        if several.light and last < _WHOLE_LEAST * left:
            return several.proven
        found = several.whole(seconds=last)
        hunt.offer(self._rows_of(found))
        return found

    def _near(self, budget: int, hunt: Hunt, several: Chain, until: float) -> Chain:
        """Rows near the relaxed answers of a program, which grows until one fits; the last of these programs."""
        while not hunt.over and (left := until - time.monotonic()) > 0:
            several.relax(seconds=left, rounds=1)
            known = {at.op for at in several.tight}
            rows = self._rows_of(several.rounded())
            hunt.offer(rows)
            still = until - time.monotonic()
            again = still > _SEED_GROWS * (left - still)
            far = bool(rows) and self._over(rows[0], budget) > _MENDABLE * budget
            grown = self._grown(budget, known, rows[0], most=_SEED_MORE, like=several) if far and again else None
            if grown is None:
                if again:
                    several.relax(seconds=still, rounds=1)
                answer = several.dive(seconds=_DIVE_SHARE * (hunt.deadline - time.monotonic()), gap=_NEAR_GAP)
                rows = self._rows_of(answer)
                rows += self._lowered(budget, answer, rows, until) if rows else []
                if rows and not any(self._fits(row, budget) for row in rows):
                    grown = self._grown(budget, known, rows[0], most=_SEED_MORE, like=several)
                hunt.offer(rows)
            if grown is None:
                break
            several = grown
        return several

    def _stronger(self, best: TimeBound, other: TimeBound, hunt: Hunt) -> TimeBound:
        if other.seconds <= best.seconds:
            return best
        hunt.demand((self.game.base_seconds + other.seconds) * (1 + _SAME))
        return other

    @cached_property
    def bound_game(self) -> Game:
        """What bounds are computed on: transfers that overlap with computing may cost nothing."""
        return game_of(self.graph, transfer_share=0.0) if self.overlaps else self.game

    def _best(self, budget: int, rows: Sequence[Row], proof: TimeBound, began: float, rounds: int) -> Answer:
        """The cheapest of some rows that fits by the referee's judgement; the lowest where none does."""
        played = []
        for row in dict.fromkeys(rows):
            try:
                timeline = play(self.graph, unfold(self.graph, row))
            except StructureError:
                continue
            fits = timeline.peak_bytes <= budget
            best, timeline = faster(self.graph, row, timeline, budget) if fits else (row, timeline)
            played.append((_worth(timeline, fits=fits), best, fits))
        _, row, fits = min(played, key=lambda x: x[0])
        return self._judged(self._answer(Status.FEASIBLE if fits else Status.UNKNOWN, budget, row, proof, began, rounds))

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
    ) -> Answer:
        schedule = unfold(self.graph, row)
        return Answer(
            status=status,
            graph=self.graph,
            order=self.order,
            budget_bytes=budget,
            row=row,
            schedule=schedule,
            timeline=play(self.graph, schedule),
            given_peak_bytes=self.given.peak_bytes,
            peak_bound=peak_bound or self.floor,
            time_bound=proof,
            solve_seconds=time.monotonic() - began,
            rounds=rounds,
        )


def _worth(timeline: Timeline, *, fits: bool) -> tuple[bool, float, int]:
    """What is to be small: of plans that fit their seconds, of others their peaks."""
    return (not fits, timeline.seconds if fits else 0.0, timeline.peak_bytes)


def solve(graph: Graph, budget_bytes: int, *, order: Order = Order.FIXED, seconds: float = SECONDS) -> Answer:
    """A plan for a graph within a budget."""
    return Solver(graph, order=order).at(budget_bytes, seconds=seconds)
