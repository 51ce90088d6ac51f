"""What programs prove while rows are hunted for, and the rows that come of their answers.

The limit of a search only ends it: nothing here is cut to a share of it. With more time the same programs are solved, and then
more of them. (What a program's time limit is, is a constant or a multiple of what another one took, and how much is left for a
search decides at most whether one is begun.)

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
"""Operators beyond which rows are offered as they come: what is made of them then may depend on the clock."""
SAME = 1e-9
"""Share of the graph's seconds within which plan and bound are one: what sums of seconds lose to rounding."""
_STAGES = (25, 60)
"""Instants that the program over several of them looks at where no rows say which: first so many, then so many."""
_EVERY_SECONDS = 3.0
"""How long the program of all instants, each by itself, may take."""
_SET_UP = 2e-4
"""Seconds per operator in which it is hardly set up."""
_LEAST_SECONDS = 0.2
"""What must be left for a further program of several instants."""
_NEAR = 5e-4
"""Share of the graph's seconds within which of what an instant proves no further checkpoints are tried."""
_LEAST_ROOM, _SPARE = 2e-4, 4
"""Share of the budget by which it is lowered on top of what was too much, with the 2 ** so manieth part of that."""
_HOPELESS = 0.1
"""Share of the budget above which what a row has too much is no matter of a little room."""
_ROOMS = 6
"""How often the budget of such a program is lowered until its row fits."""
_GROWS_FREE = 5000
"""Operators up to which a program grows in free order, where comparing instants takes all ancestors."""
_NEW, _MORE = 3, 7
"""Instants that join it at once, at most: at first, and from then on (a program of few more takes as long as one of many)."""
_APART = 200
"""They are this fraction of the graph apart."""
_VARIABLES, _LARGE_VARIABLES = 9000, 28000
"""Variables up to which it keeps all of them, and beyond which a program is too large to grow by: one of 30,000 takes two
seconds relaxed, and its rows were never near."""
_GAP, _NEAR_GAP = 1e-3, 1e-2
"""Relative gap at which a whole answer is near enough to a relaxed one: of a small program, and of a large one."""
_DIVED, _DIVED_SECONDS = 1.5, 1.0
"""So many times what the relaxed program took such an answer of a large one is looked for, and at least so many seconds."""
_RAISED = 2e-3
"""Share of what was proven by which it must have risen since for another such answer to be looked for."""
_BETTER = 1e-3
"""Share of the graph's seconds by which a program's answer must be better than the one before it to be offered."""
_MENDABLE = 0.02
"""Share of the budget by which a row may cross it and is lowered and mended; where it crosses it farther, instants join."""
_LIGHT = 3e-3
"""Share of the budget that values which are taken for 0 bytes come to together, in programs too large to be whole."""
_LIGHT_FROM = 4
"""Instants from which they are."""

Rows = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs of one game and one budget, beside a hunt.

    Attributes:
        game: what is played.
        bound_game: what bounds are computed on: transfers that overlap with computing may cost nothing there.
        precedence: of both.
        instants: first runs that are looked at.
        budget: in bytes.
        floor_bytes: the peak that no plan goes below.
        hunt: for which there are rows, and which ends where plan and bound meet.
        descent: the way down by greed, which other budgets share.
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
        """Bounds, from the quick one to the strong one, while the hunt goes on; each raises what it is content with.

        Args:
            single: what the highest instant proves, and what others do.
        """
        best, several = self._begun(single)
        if self.hunt.over:
            return best
        if several is not None:
            with kept_ready():
                return self._stronger(best, self._whole(several))
        game = self.bound_game
        if self._left > _SET_UP * game.plain:
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

    def with_room(self, alone: time_bounds.Alone, *, over: int = 0, kept: AbstractSet[int] = frozenset()) -> Rows:
        """Rows of one instant, for ever lower budgets until one fits: what comes back elsewhere needs room there.

        Of a long graph of small blocks that is little; such a row is near the best.

        Args:
            alone: the instant's program.
            over: by how much the row crosses the budget that the program was given without this.
            kept: values that are on the board then.
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
            if before and over > before:  # what runs again takes more than the room that it made
                break
            rows.append(row)
            if over <= 0:
                break
            lower -= (over + (over >> _SPARE) + int(_LEAST_ROOM * self.budget)) << k  # what is dropped may bring more back
        return rows

    def crossed(self, row: tuple[int, ...], known: AbstractSet[int], *, most: int) -> list[int]:
        """Operators whose first runs follow the highest places of a row above the budget, apart from each other."""
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

    def _begun(self, single: Sequence[Iterable[TimeBound]]) -> tuple[TimeBound, Chain | None]:
        """Rows from what programs leave absent; an instant at which such a row crosses the budget joins the program.

        Returns:
            The strongest bound, and the last program of several instants, if its rows are near.
        """
        found = best = time_bounds.NOTHING
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
                    break  # others decide, too, and prove more together
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
        elif several is None:  # once: what is offered must not depend on the clock
            rows += self._descended(rows)
        self.hunt.offer(rows)
        return best, several

    def _chain(self, found: TimeBound, row: tuple[int, ...]) -> tuple[Chain | None, TimeBound, Rows]:
        """The program of the instants at which rows of such programs cross the budget, which join it until none does.

        Args:
            found: what an instant proves.
            row: its row.

        Returns:
            The last of these programs, if it is not too large and its row is near; what was proven; and rows of whole answers
            near relaxed ones (of none where values are left out).
        """
        rows: Rows = []
        several, best, answer = None, time_bounds.NOTHING, time_bounds.NOTHING
        known: AbstractSet[int] = {self.game.nodes.index(v) for v in found.nodes}
        while row and not self.hunt.over:
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
        """A program with whole variables, from a row near its relaxed answer; what comes of both is mended as it comes."""
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
        """Rows near the relaxed answers of a program, which grows until one fits.

        Of what fits more rows of windows are asked, as long as they raise what is proven: each such answer is another place to
        begin from.

        Returns:
            The last of these programs, and what was proven.
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
            if grown is None and fresh:  # what is near an answer without rows of windows is dear, or nothing is
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
        """How long a whole answer near a relaxed one is looked for."""
        return min(self._left, max(_DIVED_SECONDS, _DIVED * several.took))

    def _listener(self) -> Callable[[TimeBound, float], None]:
        """Who offers a program's answers as they come, those that are better by more than a little."""
        least = np.inf

        def hear(answer: TimeBound, extra_fraction: float) -> None:
            nonlocal least
            if extra_fraction < least - _BETTER:
                least = extra_fraction
                self.hunt.offer(self._rows_of(answer))

        return hear

    def _grown(self, known: AbstractSet[int], row: tuple[int, ...], *, most: int, like: Chain | None = None) -> Chain | None:
        """The program of some instants and those at which a row crosses the budget; None where there are no others."""
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
        """Values so small that a large program does without them."""
        game = self.game
        if instants < _LIGHT_FROM or instants * len(game.value_nodes) <= _VARIABLES:
            return frozenset()
        sizes = np.where(game.returns, game.bytes, self.budget)
        smallest = np.argsort(sizes, kind="stable")
        some = int(np.searchsorted(np.cumsum(sizes[smallest]), _LIGHT * self.budget, side="right"))
        return frozenset(smallest[:some].tolist())

    def _descended(self, rows: Sequence[tuple[int, ...]]) -> Rows:
        """Where none of some rows nearly fits, one from the way down by greed: near the floor nothing else may."""
        if any(self._over(row) <= _MENDABLE * self.budget for row in rows):
            return []
        lower = self.descent().below(self.budget, deadline=self.hunt.deadline)
        self.hunt.suggest([lower])
        return [lower]

    def _lowered(self, answer: TimeBound, rows: Sequence[tuple[int, ...]]) -> Rows:
        """Where none of an answer's rows fits, that with what crosses the budget taken away by greed; none where it fails."""
        if any(self.fits(row) for row in rows):
            return []
        way = Descent(self.game, self.floor_bytes, absent=answer.absent, fetched=answer.fetched)
        row = way.below(self.budget, deadline=self.hunt.deadline)
        return [row] if self.fits(row) else []

    def _mended(self, found: TimeBound, row: tuple[int, ...]) -> Rows:
        """Rows of an instant that have room elsewhere: with less on the board then, and with checkpoints."""
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
        """What a program's answer comes to, if it has one: in fewest runs, then in fewer bytes."""
        if not found.absent:
            return []
        return [row_without(self.game, found.absent, found.fetched, forgets=f) for f in (False, True)]

    def _over(self, row: Sequence[int]) -> int:
        """By how much a row crosses the budget."""
        return int(profile(self.game, row).max()) - self.budget

    def _hopeless(self, rows: Sequence[tuple[int, ...]]) -> bool:
        """Whether the first of some rows crosses the budget so far that no little room helps."""
        return not rows or self._over(rows[0]) > _HOPELESS * self.budget

    @property
    def _comes_singly(self) -> bool:
        """Whether rows are offered as they come; of a small graph at once, so that what is mended is not up to the clock."""
        return self.precedence.fixed and self.game.plain > LARGE

    def _stronger(self, best: TimeBound, other: TimeBound) -> TimeBound:
        if other.seconds <= best.seconds:
            return best
        self.hunt.demand(self.game.base_seconds * (1 + SAME) + other.seconds)
        return other

    @property
    def _left(self) -> float:
        """Seconds until the hunt's deadline."""
        return self.hunt.deadline - time.monotonic()
