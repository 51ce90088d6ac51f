"""Solves bound programs beside the annealing search, and offers it rows made from their answers.

A search's time limit only ends it: no step gets a share of it. With more time the same programs are solved, and then more of
them. (A program's time limit is a constant or a multiple of what another program took. The time left decides at most whether a
program is started.)

One module: it is one class, whose state is what the programs have proven and answered so far.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from lowtide.planning.bounds import time_bounds
from lowtide.planning.bounds.precedence import Instant, Precedence
from lowtide.planning.bounds.solver_process import kept_ready
from lowtide.planning.bounds.time_bounds import TimeBound
from lowtide.planning.bounds.windows import Chain, chain_seconds
from lowtide.planning.graph_arrays import Game, profile
from lowtide.planning.search.checkpoints import SPACINGS, Crossings
from lowtide.planning.search.descent import Descent
from lowtide.planning.search.rounds import Hunt
from lowtide.planning.search.rows_from_bound import row_without

LARGE = 1000
"""In graphs of more operators, rows are offered as soon as they are found; the result may then depend on the clock."""
SAME = 1e-9
"""Share of the graph's seconds within which plan and bound count as equal: the rounding error of sums of seconds."""
_STAGES = (25, 60)
"""Numbers of instants in successive programs of several instants, where no rows say which instants to take."""
_EVERY_SECONDS = 3.0
"""Time limit, in seconds, of the program with one row for every instant."""
_SET_UP = 2e-4
"""Seconds per operator needed at least to set up that program; the program is skipped if less time is left."""
_SOLVED = 2e-4
"""Seconds per operator that must be left to solve the program of one instant of a long graph, which cuts have bounded: to
set it up, to relax it, and to search for a whole answer."""
_ORDERS_SECONDS = 4.0
"""Time limit of the bounds over all orders but the first, which offer no rows."""
_LEAST_SECONDS = 0.2
"""Seconds that must be left to start a further program of several instants."""
_NEAR = 5e-4
"""No further checkpoints are tried once a plan is within this share of the graph's seconds of what the instant proves."""
_LEAST_ROOM, _SPARE = 2e-4, 4
"""A program's budget is lowered by the bytes that its row has above the budget, by a further 1/2**_SPARE of them, and by the
share _LEAST_ROOM of the budget; each further time, by twice as much."""
_HOPELESS = 0.1
"""If a row exceeds the budget by more than this share, lowering the program's budget a little does not make it fit."""
_ROOMS = 6
"""Largest number of times that the budget of one instant's program is lowered until its row fits."""
_GROWS_FREE = 5000
"""In free order, a program grows only in graphs of up to this many operators: comparing instants requires all ancestors."""
_NEW, _MORE = 3, 7
"""Largest number of instants added to a program at once: the first time, and from then on (solving a program that has a few
more instants takes as long as one that has many more)."""
_APART = 200
"""Instants that are added together are more than 1/200 of the graph's operators apart."""
_VARIABLES, _LARGE_VARIABLES = 9000, 28000
"""Up to the first number of variables, a program keeps all of them. Beyond the second it is too large to be grown: a program
of 30,000 variables takes two seconds relaxed, and its rows never came close to the budget."""
_GAP, _NEAR_GAP = 1e-3, 1e-2
"""Relative gaps within which the search for a whole answer near a relaxed one may stop, for small and for large programs."""
_DIVED, _DIVED_SECONDS = 1.5, 1.0
"""Time limit of that search: the larger of 1.5x the relaxed solve and 1 s."""
_RAISED = 2e-3
"""The search is repeated only once the bound has risen by more than this share of it."""
_BETTER = 1e-3
"""A program's answer is offered only if it is better than the one before by this share of the graph's seconds."""
_MENDABLE = 0.02
"""A row that exceeds the budget by at most this share is lowered and mended; if it exceeds it by more, instants are added."""
_LIGHT = 3e-3
"""Share of the budget that the values counted as 0 bytes add up to at most, in programs too large to keep all variables."""
_LIGHT_FROM = 4
"""Smallest number of instants of a program in which values count as 0 bytes."""

Rows = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of one game and one budget, solved while a hunt runs.

    Attributes:
        game: the game.
        bound_game: the game that bounds are computed on, in which transfers that overlap with computation cost nothing.
        precedence: of both games.
        instants: the first runs that bounds examine.
        budget: in bytes.
        floor_bytes: lower bound on the peak of every plan.
        hunt: the search that rows are offered to; it ends when plan and bound meet.
        descent: returns the greedy descent, which other budgets share.
    """

    game: Game
    bound_game: Game
    precedence: Precedence
    instants: Sequence[Instant]
    budget: int
    floor_bytes: int
    hunt: Hunt
    descent: Callable[[], Descent]

    def prove(self, single: Sequence[Iterable[TimeBound]]) -> TimeBound:
        """Prove bounds, from quick to strong, while the hunt runs; each stronger bound raises the seconds that end the hunt.

        Args:
            single: the bounds of the highest instant, and those of the others.

        Returns:
            The strongest bound.
        """
        orders = time_bounds.any_order(
            self.bound_game, self.precedence, self.instants, self.budget, deadline=self.hunt.deadline
        )
        best, several = self._begun(single, self._stronger(time_bounds.NOTHING, next(orders, time_bounds.NOTHING)))
        until = time.monotonic() + _ORDERS_SECONDS
        for one in itertools.takewhile(lambda _: not self.hunt.over and time.monotonic() < until, orders):
            best = self._stronger(best, one)
        if self.hunt.over:
            return best
        if several is not None:
            with kept_ready():
                return self._stronger(best, self._whole(several))
        game = self.bound_game
        if time_bounds.is_cut(game) and self._left > _SOLVED * game.plain:
            best = self._solved(best)
        if not self.hunt.over and self._left > _SET_UP * game.plain:
            seconds = min(self._left / 2, _EVERY_SECONDS)
            every = time_bounds.all_instants(game, self.precedence, self.instants, self.budget, seconds=seconds)
            best = self._stronger(best, every)
        for most in _STAGES:
            chain = time_bounds.tight_chain(self.precedence, self.instants, self.budget, most=most)
            few = self.hunt.over or self._left < _LEAST_SECONDS or len(chain) < 2
            if few or 2 * len(chain) * len(game.value_nodes) > _VARIABLES:
                break
            best = self._stronger(best, chain_seconds(game, self.precedence, chain, self.budget, seconds=self._left))
            if len(chain) < most:
                break
        return best

    def _solved(self, best: TimeBound) -> TimeBound:
        """Solve the program of a long graph's highest instant, which cuts have bounded; offers the rows of its answers."""
        for at in time_bounds.binding(self.precedence, self.instants, self.budget)[:1]:
            for one in time_bounds.solved_instant(
                self.bound_game, self.precedence, at, self.budget, deadline=self.hunt.deadline
            ):
                best = self._stronger(best, one)
                self.hunt.offer(self._rows_of(one))
        return best

    def with_room(self, alone: time_bounds.Alone, *, over: int = 0, kept: AbstractSet[int] = frozenset()) -> Rows:
        """Rows of one instant's program for lower and lower budgets, until one fits: values need room where they come back.

        A long graph of small blocks needs little room, and its row is close to the best.

        Args:
            alone: the instant's program.
            over: bytes by which the row exceeds the budget if the program is given the budget itself.
            kept: values that are on the board at the instant.
        """
        rows: Rows = []
        lower = self.budget - over
        for k in range(_ROOMS):
            if self._left <= 0 or lower <= 0:
                break
            found = alone.absent(lower, seconds=self._left, kept=kept)
            if not found.absent:
                break
            row = row_without(self.game, found.absent, found.fetched)
            before, over = over, self._over(row)
            if before and over > before:  # recomputation takes more bytes than were freed
                break
            rows.append(row)
            if over <= 0:
                break
            lower -= (over + (over >> _SPARE) + int(_LEAST_ROOM * self.budget)) << k  # dropping more may bring more back
        return rows

    def crossed(self, row: tuple[int, ...], known: AbstractSet[int], *, most: int) -> list[int]:
        """Up to ``most`` operators whose first runs follow the highest places of a row above the budget, spread apart.

        Operators in ``known`` are left out.
        """
        high = profile(self.game, row)
        seen: set[int] = set()
        firsts = []
        for o in row:
            firsts.append(o if o not in seen and o < self.game.plain else -1)  # a fetch is no first run
            seen.add(o)
        found: list[int] = []
        apart = self.game.plain // _APART
        for place in np.argsort(-high)[: int((high > self.budget).sum())]:
            following = next((o for o in firsts[place:] if o >= 0), -1)
            near = any(abs(following - o) <= apart for o in found)
            if following >= 0 and following not in known and following != self.game.last and not near:
                found.append(following)
            if len(found) == most:
                break
        return found

    def fits(self, row: Sequence[int]) -> bool:
        """Whether a row stays within the budget."""
        return self._over(row) <= 0

    def _begun(self, single: Sequence[Iterable[TimeBound]], ordered: TimeBound) -> tuple[TimeBound, Chain | None]:
        """Offer rows from what programs leave absent; instants at which such a row exceeds the budget are added to a program.

        Args:
            single: as in :meth:`prove`.
            ordered: the strongest bound so far.

        Returns:
            The strongest bound, and the last program of several instants if its rows come close to the budget.
        """
        found, best = time_bounds.NOTHING, ordered
        rows: Rows = []
        row: tuple[int, ...] = ()
        for k, proven in enumerate(single):
            for one in proven:
                best = self._stronger(best, one)
                new = self._rows_of(one)
                if new and one.seconds >= found.seconds:
                    found, row = one, new[0]
                self.hunt.suggest(new)
                rows += new
                if self.hunt.over or (self.precedence.fixed and new and self._hopeless(new)):
                    break  # other instants matter too, and prove more together
            if self.hunt.over:
                break
            if not k and row:
                rows += self._mended(found, row)
                if self.precedence.fixed and self._over(row) > 0:
                    break
        several, proven_together, new = self._chain(found, row)
        best = self._stronger(best, proven_together)
        rows += new
        if several is None and self._comes_singly and self.hunt.best is not None:
            rows = [self.hunt.best.ops, *rows]
            self.hunt.offer(rows)
            rows = self._descended(rows)
        elif several is None:  # offered all at once, so as not to depend on the clock
            rows += self._descended(rows)
        self.hunt.offer(rows)
        return best, several

    def _chain(self, found: TimeBound, row: tuple[int, ...]) -> tuple[Chain | None, TimeBound, Rows]:
        """Grow a program by the instants at which its row exceeds the budget, until there are none.

        Args:
            found: the bound of an instant.
            row: its row.

        Returns:
            The last of the programs, if it is not too large and its row comes close to the budget; the strongest bound; and
            rows of whole answers near relaxed ones (only from programs that keep all variables).
        """
        rows: Rows = []
        several, best, answer = None, time_bounds.NOTHING, time_bounds.NOTHING
        known: AbstractSet[int] = {self.game.nodes.index(v) for v in found.nodes}
        while row and not self.hunt.over:
            if self.game.plain > _LARGE_VARIABLES:  # each operator before an instant is a variable
                break
            grown = self._grown(known, row, most=_NEW if several is None else _MORE)
            if grown is None:
                break
            if len(grown.program.cost) > _LARGE_VARIABLES:
                return None, best, rows
            several = grown
            known = several.ops
            best = self._stronger(best, several.relax(seconds=self._left, rounds=1))
            if self.hunt.over:
                break
            answer = several.rounded() if several.light else several.dive(seconds=self._dive_seconds(several), gap=_GAP)
            new = self._rows_of(answer)
            if several.light and not self._hopeless(new):
                self.hunt.rest()
                self.hunt.offer(new)
            if not several.light:
                rows += new
            row = new[0] if new else ()
            self.hunt.suggest(new)
        if several is None:
            return None, best, rows
        if several.light and self._hopeless([row] if row else []):
            return None, best, rows
        if not self.hunt.fits:
            rows += self._lowered(answer, [])
            self.hunt.suggest(rows[-1:])
        return several, best, rows

    def _whole(self, several: Chain) -> TimeBound:
        """Solve a program with whole variables, starting near its relaxed answer; offers the rows of both as they come."""
        if self.precedence.fixed:
            self.hunt.rest()
        several, best = self._near(several)
        if not self.hunt.fits:
            self.hunt.offer(self._descended([]))
        if self.hunt.over:
            return best
        found = several.whole(seconds=self._left, tell=self._listener())
        self.hunt.offer(self._rows_of(found))
        return self._stronger(best, found)

    def _near(self, several: Chain) -> tuple[Chain, TimeBound]:
        """Offer rows near the relaxed answers of a program, which grows until one fits.

        To a program whose row fits, window rows are added as long as they raise the bound: each new answer is another starting
        point for the hunt.

        Returns:
            The last of the programs, and the strongest bound.
        """
        dived: float | None = None
        best, fresh, least_over = time_bounds.NOTHING, False, np.inf
        while not self.hunt.over:
            best = self._stronger(best, several.relax(seconds=self._left, rounds=1))
            proven = several.proven.seconds
            if self.hunt.over or (dived is not None and proven - dived <= _RAISED * proven):
                break
            rows = self._rows_of(several.rounded())
            self.hunt.offer(rows)
            over = self._over(rows[0]) if rows else 0
            grown = None
            if _MENDABLE * self.budget < over < least_over:
                least_over, grown = over, self._grown(several.ops, rows[0], most=_MORE, like=several)
            if grown is None and fresh:  # without window rows, whole answers nearby cost much, or there are none
                fresh, least_over = False, -np.inf
                continue
            if grown is None:
                dived = proven
                answer = several.dive(seconds=self._dive_seconds(several), gap=_NEAR_GAP, tell=self._listener())
                rows = self._rows_of(answer)
                rows += self._lowered(answer, rows) if rows else []
                self.hunt.offer(rows)
                if rows and not any(self.fits(row) for row in rows):
                    least_over, grown = np.inf, self._grown(several.ops, rows[0], most=_MORE, like=several)
            if grown is not None:
                several, dived, fresh = grown, None, True
        return several, best

    def _dive_seconds(self, several: Chain) -> float:
        """Time limit, in seconds, of the search for a whole answer near a relaxed one."""
        return min(self._left, max(_DIVED_SECONDS, _DIVED * several.took))

    def _listener(self) -> Callable[[TimeBound, float], None]:
        """A callback that offers a program's answers to the hunt as they come, if they are better by more than ``_BETTER``."""
        least = np.inf

        def hear(answer: TimeBound, extra_fraction: float) -> None:
            nonlocal least
            if extra_fraction < least - _BETTER:
                least = extra_fraction
                self.hunt.offer(self._rows_of(answer))

        return hear

    def _grown(self, known: AbstractSet[int], row: tuple[int, ...], *, most: int, like: Chain | None = None) -> Chain | None:
        """The program of the ``known`` instants and those at which a row exceeds the budget; None if none can be added."""
        if not self.precedence.fixed and self.game.plain > _GROWS_FREE:
            return None
        crossed = self.crossed(row, known, most=most)
        chain = sorted({*known, *crossed})
        if not crossed or any(not self.precedence.comparable(a, b) for a, b in itertools.pairwise(chain)):
            return None
        at = [self.precedence.instant(o) for o in chain]
        light = self._light(len(chain))
        return Chain(self.bound_game, self.precedence, at, self.budget, like=like, light=light)

    def _light(self, instants: int) -> frozenset[int]:
        """The small values that a large program counts as 0 bytes."""
        game = self.game
        if instants < _LIGHT_FROM or instants * len(game.value_nodes) <= _VARIABLES:
            return frozenset()
        sizes = np.where(game.returns, game.bytes, self.budget)
        smallest = np.argsort(sizes, kind="stable")
        some = int(np.searchsorted(np.cumsum(sizes[smallest]), _LIGHT * self.budget, side="right"))
        return frozenset(smallest[:some].tolist())

    def _descended(self, rows: Sequence[tuple[int, ...]]) -> Rows:
        """A row from the greedy descent, unless one of ``rows`` almost fits: near the floor there may be no other."""
        if any(self._over(row) <= _MENDABLE * self.budget for row in rows):
            return []
        lower = self.descent().below(self.budget, deadline=self.hunt.deadline)
        self.hunt.suggest([lower])
        return [lower]

    def _lowered(self, answer: TimeBound, rows: Sequence[tuple[int, ...]]) -> Rows:
        """A row that fits, made from an answer by greedy descent; none if the descent fails or one of ``rows`` fits."""
        if any(self.fits(row) for row in rows):
            return []
        way = Descent(self.game, self.floor_bytes, absent=answer.absent, fetched=answer.fetched)
        row = way.below(self.budget, deadline=self.hunt.deadline)
        return [row] if self.fits(row) else []

    def _mended(self, found: TimeBound, row: tuple[int, ...]) -> Rows:
        """Rows of an instant that leave room elsewhere: with fewer bytes on the board at the instant, and with checkpoints."""
        at = self.precedence.instant(self.bound_game.nodes.index(found.nodes[0]))
        alone = time_bounds.Alone(self.bound_game, self.precedence, at, self.budget)
        over = self._over(row)
        rows = self.with_room(alone, over=over) if 0 < over < _HOPELESS * self.budget else []
        self.hunt.suggest(rows)
        crossings = Crossings(self.game, at.op)
        for kept in dict.fromkeys(crossings.values(spacing) for spacing in SPACINGS):
            if self.hunt.over or self.hunt.within(found.seconds + _NEAR * self.game.base_seconds):
                break
            new = self.with_room(alone, kept=kept)
            self.hunt.suggest(new)
            rows += new
            if self._comes_singly and new and self.fits(new[-1]):
                self.hunt.offer(new[-1:])
            if self.precedence.fixed and new and self._hopeless(new):
                break
        return rows

    def _rows_of(self, found: TimeBound) -> Rows:
        """The rows of a program's answer, if there is one: first that of fewer runs, then that of fewer bytes."""
        if not found.absent:
            return []
        return [row_without(self.game, found.absent, found.fetched, forgets=f) for f in (False, True)]

    def _over(self, row: Sequence[int]) -> int:
        """Bytes by which a row's peak exceeds the budget; negative if it is below."""
        return int(profile(self.game, row).max()) - self.budget

    def _hopeless(self, rows: Sequence[tuple[int, ...]]) -> bool:
        """Whether there is no row, or the first exceeds the budget by so much that a little more room does not help."""
        return not rows or self._over(rows[0]) > _HOPELESS * self.budget

    @property
    def _comes_singly(self) -> bool:
        """Whether rows are offered as they come; in small graphs they are offered at once, independent of the clock."""
        return self.precedence.fixed and self.game.plain > LARGE

    def _stronger(self, best: TimeBound, other: TimeBound) -> TimeBound:
        if not best.seconds < other.seconds < np.inf:  # infinite: no schedule fits, which is for floors to prove
            return best
        self.hunt.demand(self.game.base_seconds * (1 + SAME) + other.seconds)
        return other

    @property
    def _left(self) -> float:
        """Seconds until the hunt's deadline."""
        return self.hunt.deadline - time.monotonic()
