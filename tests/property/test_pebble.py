"""Laws of the pebble game: referee, greedy walk and bounds, on random units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, target
from hypothesis import strategies as st

from lowtide.base.errors import StructureError
from lowtide.planning.unit.prefetch import fetches_ahead
from lowtide.planning.unit.bound import UnitTimeBound, forced_live, peak_bound
from lowtide.planning.unit.state import State
from lowtide.planning.unit.greedy import backtracked, lightened, pareto, walk
from lowtide.planning.unit.problem import Action, Away, Bandwidth, Key, Problem
from lowtide.planning.unit.simulate import play
from lowtide.planning.unit.lp_plan import Relaxed
from lowtide.planning.unit.solve import WORTHWHILE_SHARE, Front, Status
from lowtide.base.trace import Buffer, Need, Op, Phase, Save, Site, Trace
from property.naive import Naive
from property.strategies import BASE_BYTES, plans, problems

Planned = tuple[Problem, dict[Key, Away]]

settings.register_profile("pebble", max_examples=60)
settings.load_profile("pebble")

WALK_SECONDS = 0.1
FEW = settings(max_examples=20)
ROUNDING = 1e-6


@given(problems())
def test_without_decisions_the_baseline_is_played(problem: Problem) -> None:
    """The baseline's live bytes at every event and its peak, no extra seconds, nothing remembered."""
    timeline = play(problem, {})
    assert timeline.peak_bytes == problem.plain_peak
    assert timeline.extra_seconds == 0
    assert not timeline.remakes
    assert not timeline.recorded
    assert not timeline.captured
    assert (timeline.live_bytes == problem.plain_live).all()


def test_a_unit_without_events_peaks_at_its_base() -> None:
    """The smallest unit obeys the same law: peak of play == plain_peak == base."""
    trace = Trace(base_bytes=BASE_BYTES, resident_bytes=0, events=(), buffers=(), saves=(), other_bytes=(),
                  spike_bytes=(), backward_event=0)  # fmt: skip
    problem = Problem(trace=trace, base_bytes=BASE_BYTES)
    assert problem.plain_peak == BASE_BYTES
    assert play(problem, {}).peak_bytes == problem.plain_peak


def _op(reads: tuple[int, ...], write: int, size: int) -> Op:
    return Op(site=Site("net", f"op{write}", 0), phase=Phase.FORWARD, seconds=1.0, inside_bytes=size, reads=reads,
              writes=(write,))  # fmt: skip


def _buffer(size: int, born: int, held: int, released: int) -> Buffer:
    return Buffer(bytes=size, born=born, slot=0, held_until=held, released=released, counted=born >= 0, movable=False)


def test_a_value_away_at_its_release_is_subtracted_once() -> None:
    """A value that was away when autograd released it frees nothing more in later replays (it used to, and the peak was too
    low).

    Value 1 (100 bytes) is away from event 2 on and is released, absent, at event 3. Value 2 (10 bytes) is recomputed at event
    4, on a base of 1000 bytes with nothing else in memory: the peak of event 4 is 1010.
    """
    trace = Trace(
        base_bytes=1000,
        resident_bytes=0,
        events=(
            _op((0,), 1, 100),
            _op((0,), 2, 10),
            Need(value=0, pinned_until=2),
            Need(value=0, pinned_until=3),
            Need(value=2, pinned_until=4),
        ),
        buffers=(_buffer(50, -1, 5, 3), _buffer(100, 0, 0, 3), _buffer(10, 1, 1, 4)),
        saves=(Save(value=1, event=0), Save(value=2, event=1), Save(value=0, event=1), Save(value=0, event=1)),
        other_bytes=(0,) * 5,
        spike_bytes=(0,) * 5,
        backward_event=2,
    )
    problem = Problem(trace=trace, base_bytes=1000)
    decisions = {(1, 0): Away(Action.RECOMPUTE, 0), (2, 0): Away(Action.RECOMPUTE, 0)}
    assert Naive(problem, decisions).run().peaks[4] == 1010
    assert play(problem, decisions).peak_bytes_at[4] == 1010


@settings(max_examples=200)
@given(plans(moving=False))
def test_the_referee_agrees_with_a_naive_one_at_every_event(planned: Planned) -> None:
    """A naive implementation of the rules finds the same highest point at each event."""
    problem, decisions = planned
    assert play(problem, decisions).peak_bytes_at.tolist() == Naive(problem, decisions).run().peaks


@given(plans(moving=False))
def test_the_referee_agrees_with_a_naive_one_on_the_peak(planned: Planned) -> None:
    """Both implementations find the same highest point of the whole unit."""
    problem, decisions = planned
    assert play(problem, decisions).peak_bytes == max(Naive(problem, decisions).run().peaks)


@given(plans(moving=False))
def test_the_referee_agrees_with_a_naive_one_on_seconds(planned: Planned) -> None:
    """Both count the same seconds of replays."""
    problem, decisions = planned
    assert play(problem, decisions).extra_seconds == Naive(problem, decisions).run().seconds


@given(plans(moving=False))
def test_the_referee_agrees_with_a_naive_one_on_what_it_records(planned: Planned) -> None:
    """Both record the same operators and capture the same values."""
    problem, decisions = planned
    timeline, naive = play(problem, decisions), Naive(problem, decisions)
    assert timeline.recorded == naive.replayed
    assert timeline.captured == naive.captured


@given(plans())
def test_playing_is_deterministic(planned: Planned) -> None:
    """The same decisions in another order give the same bytes and seconds."""
    problem, decisions = planned
    first, second = play(problem, decisions), play(problem, dict(reversed(decisions.items())))
    assert first.peak_bytes_at.tolist() == second.peak_bytes_at.tolist()
    assert first.extra_seconds == pytest.approx(second.extra_seconds)


@given(plans())
def test_no_decisions_beat_the_bound_on_the_peak(planned: Planned) -> None:
    """peak_bound is at most the peak of any decisions, and at each event the forced bytes are at most the bytes in memory."""
    problem, decisions = planned
    timeline = play(problem, decisions)
    assert peak_bound(problem).peak_bytes <= timeline.peak_bytes
    assert (forced_live(problem) <= timeline.peak_bytes_at).all()


@given(problems())
def test_the_account_of_the_minimum_adds_up_to_it(problem: Problem) -> None:
    """The parts add up to peak_bound to the byte, none is negative, and the values named belong to the parts."""
    account = Front(problem).minimum
    assert account.bytes == peak_bound(problem).peak_bytes
    parts = dict(account.parts)
    assert all(size > 0 for size in parts.values())
    for part in parts:
        assert sum(x.bytes for x in account.largest if x.part == part) <= parts[part]
    assert {x.part for x in account.largest} <= set(parts)
    assert account.moved(7).bytes == account.bytes + 7
    assert [x.bytes for x in account.largest] == sorted((x.bytes for x in account.largest), reverse=True)


def test_the_account_of_the_minimum_names_what_is_there() -> None:
    """A value that the operator reads, one that the script holds, one that cannot come back, a gradient, and what it makes."""
    ops = [_op((0,), 1, 100), replace(_op((0,), 2, 40), replayable=False), _op((1,), 3, 30)]
    backward = [replace(_op((1,), 4, 20), phase=Phase.BACKWARD), replace(_op((1, 4), 5, 500), phase=Phase.BACKWARD)]
    trace = Trace(
        base_bytes=BASE_BYTES, resident_bytes=600, events=(*ops, *backward, Need(value=2, pinned_until=5)),
        buffers=(
            replace(_buffer(8, -1, 6, -1), counted=False), _buffer(100, 0, 4, -1), _buffer(40, 1, 1, 5), _buffer(30, 2, 5, -1),
            _buffer(20, 3, 6, -1), _buffer(500, 4, 4, -1),
        ),
        saves=(Save(value=2, event=1),), other_bytes=(0, 0, 0, 0, 7, 0), spike_bytes=(0,) * 6, backward_event=3,
    )  # fmt: skip
    problem = Problem(trace=trace, base_bytes=BASE_BYTES)
    assert dict(Front(problem).minimum.parts) == {
        "parameters, buffers and optimizer states": 600, "outputs and workspace of the operator": 500,
        "other memory from before the forward": BASE_BYTES - 600, "read by the operator": 120,
        "can be neither recomputed nor offloaded": 40, "held by the script": 30, "made outside any operator": 7,
    }  # fmt: skip
    later = replace(trace, events=(*trace.events[:4], replace(backward[1], reads=(1,)), trace.events[5]))
    assert dict(Front(replace(problem, trace=later)).minimum.parts)["gradients"] == 20


@given(plans())
def test_no_decisions_beat_the_bound_on_time(planned: Planned) -> None:
    """UnitTimeBound at the peak that the decisions reach is at most the seconds that they cost."""
    problem, decisions = planned
    timeline = play(problem, decisions)
    assert UnitTimeBound(problem).at(timeline.peak_bytes) <= timeline.extra_seconds + ROUNDING


@FEW
@given(problems())
def test_every_state_of_the_walk_has_the_referees_figures(problem: Problem) -> None:
    """The peak and seconds that the greedy walk gives for a state are those of the referee for its decisions."""
    for state in walk(problem, seconds=WALK_SECONDS):
        timeline = play(problem, state.decisions)
        assert timeline.peak_bytes == state.timeline.peak_bytes
        assert timeline.extra_seconds == state.timeline.extra_seconds


@FEW
@given(problems())
def test_the_front_is_monotone(problem: Problem) -> None:
    """Along the front, a lower peak always costs more seconds; it begins at no cost with at most the baseline's peak."""
    front = walk(problem, seconds=WALK_SECONDS)
    for above, below in zip(front, front[1:], strict=False):
        assert above.timeline.peak_bytes > below.timeline.peak_bytes
        assert above.timeline.extra_seconds < below.timeline.extra_seconds
    assert front[0].timeline.peak_bytes <= problem.plain_peak
    assert front[0].timeline.extra_seconds == 0
    assert pareto(front) == front


@FEW
@given(problems(), st.floats(0, 1))
def test_lightened_states_hold_the_budget_and_cost_no_more(problem: Problem, share: float) -> None:
    """All are within the budget, and the best one costs no more than the cheapest state that fits, by the referee, too."""
    front = walk(problem, seconds=WALK_SECONDS)
    lowest = front[-1].timeline.peak_bytes
    budget = lowest + int(share * (problem.plain_peak - lowest))
    cheapest = min((s for s in front if s.timeline.peak_bytes <= budget), key=lambda s: s.cost)
    found = lightened(problem, front, budget, seconds=WALK_SECONDS)
    assert all(s.timeline.peak_bytes <= budget for s in found)
    best = min(found, key=lambda s: s.cost)
    assert best.timeline.extra_seconds <= cheapest.timeline.extra_seconds
    assert play(problem, best.decisions).extra_seconds == best.timeline.extra_seconds


@FEW
@given(problems(), st.floats(0, 1))
def test_backtracked_states_are_ever_lower_by_the_referee(problem: Problem, share: float) -> None:
    """Each state is below the walk and the state before, by the referee, and none comes after the budget is met."""
    front = walk(problem, seconds=WALK_SECONDS)
    lowest, bound = front[-1].timeline.peak_bytes, peak_bound(problem).peak_bytes
    budget = bound + int(share * (lowest - bound))
    found = backtracked(problem, front, budget, seconds=WALK_SECONDS)
    assume(lowest > bound)
    for state in found:
        assert lowest > budget
        assert state.timeline.peak_bytes < lowest
        lowest = state.timeline.peak_bytes
        assert play(problem, state.decisions).peak_bytes == lowest


def test_fewer_operators_are_run_again_where_each_costs_more() -> None:
    """Two values of one size: one comes from three short operators in a row, the other from one that takes as long as four.

    By the operators' own seconds the three are cheaper; what the interception adds to each makes the one cheaper.
    """
    away = 7
    ops = [_op((0,), 1, 0), _op((1,), 2, 0), _op((2,), 3, 0), replace(_op((0,), 4, 0), seconds=4.0)]
    made = (_buffer(100, 0, 1, -1), _buffer(100, 1, 2, -1), _buffer(100, 2, 3, 6), _buffer(100, 3, 3, 5), _buffer(100, 4, 4, -1))
    trace = Trace(
        base_bytes=BASE_BYTES, resident_bytes=0,
        events=(*ops, replace(_op((0,), 5, 0), phase=Phase.BACKWARD), Need(value=4, pinned_until=5), Need(value=3, pinned_until=6)),
        buffers=(_buffer(8, -1, away, -1), *made),
        saves=(Save(value=3, event=2), Save(value=4, event=3)),
        other_bytes=(0,) * away, spike_bytes=(0, 0, 0, 0, 200, 0, 0), backward_event=4,
    )  # fmt: skip
    for each, chosen in ((0.0, 3), (1.0, 4)):
        problem = Problem(trace=trace, base_bytes=BASE_BYTES, replay_seconds=each)
        state = Front(problem).at(problem.plain_peak - 90).state
        assert state is not None
        assert {v for v, _ in state.decisions} == {chosen}
        assert state.timeline.extra_seconds == pytest.approx(3.0 if chosen == 3 else 5.0)


def test_backtracking_keeps_a_value_whose_inputs_weigh_more() -> None:
    """The cheaper of two values is computed from three others that cannot be recomputed: only the dearer one may be dropped.
    """
    size, late = 1 << 20, 12

    def op(write: int, reads: tuple[int, ...], seconds: float, inside: int = size, *, replayable: bool = True) -> Op:
        return Op(site=Site("net", f"op{write}", 0), phase=Phase.FORWARD, seconds=seconds, inside_bytes=inside, reads=reads,
                  writes=(write,), replayable=replayable)  # fmt: skip

    drawn = [op(v, (), 1.0, replayable=False) for v in (1, 2, 3)]
    events: list[Op | Need] = [*drawn, op(4, (1, 2, 3), 0.01), op(5, (0,), 10.0), op(6, (0,), 1.0, 3 * size, replayable=False)]
    events += [Need(value=4, pinned_until=6), Need(value=5, pinned_until=7)]

    def buffer(born: int, held_until: int, released: int = -1) -> Buffer:
        return Buffer(bytes=size, born=born, slot=0, held_until=held_until, released=released, counted=born >= 0, movable=False)

    buffers = [buffer(-1, late), *(buffer(v, 3) for v in range(3)), buffer(3, 4, 6), buffer(4, 4, 7), buffer(5, 5)]
    trace = Trace(base_bytes=BASE_BYTES, resident_bytes=0, events=tuple(events), buffers=tuple(buffers),
                  saves=(Save(value=4, event=3), Save(value=5, event=4)), other_bytes=(0,) * len(events),
                  spike_bytes=(0,) * len(events), backward_event=6)  # fmt: skip
    problem = Problem(trace=trace, base_bytes=BASE_BYTES)
    budget = problem.plain_peak - size
    assert walk(problem, seconds=WALK_SECONDS)[-1].timeline.peak_bytes > budget
    solution = Front(problem, seconds=600, program_seconds=0.0).at(budget)
    assert solution.state is not None
    assert set(solution.state.decisions) == {(5, 0)}


@FEW
@given(problems())
def test_no_state_of_the_walk_is_below_the_bounds(problem: Problem) -> None:
    """No state has a lower peak than peak_bound, or costs less than UnitTimeBound says for any budget that it fits."""
    front = walk(problem, seconds=WALK_SECONDS)
    assert peak_bound(problem).peak_bytes <= front[-1].timeline.peak_bytes
    for budget in (s.timeline.peak_bytes for s in front):
        least = UnitTimeBound(problem).at(budget)
        fitting = [s for s in front if s.timeline.peak_bytes <= budget]
        assert all(least <= s.timeline.extra_seconds + ROUNDING for s in fitting)


@FEW
@given(plans(), st.floats(0, 1))
def test_no_decisions_beat_the_bound_of_the_programs(planned: Planned, share: float) -> None:
    """Any decisions add at least the seconds that the linear programs prove for the peak that they reach."""
    problem, decisions = planned
    timeline = play(problem, decisions)
    budget = timeline.peak_bytes + int(share * max(0, problem.plain_peak - timeline.peak_bytes))
    _, proven = Relaxed(problem).at(budget, seconds=2.0)
    assert proven.seconds <= timeline.extra_seconds + ROUNDING


@FEW
@given(problems(), st.floats(0, 1), st.integers(0, 100))
def test_retiming_keeps_bytes_and_never_gives_a_dearer_plan(problem: Problem, share: float, by: int) -> None:
    """Front.retimed: with other seconds the peaks are the same, and the plan for the current budget costs no more than the
    decisions in force.
    """
    front = Front(problem, seconds=WALK_SECONDS)
    lowest = front.states[-1].timeline.peak_bytes
    budget = lowest + int(share * (problem.plain_peak - lowest))
    state = front.at(budget).state
    assert state is not None
    events = tuple(replace(e, seconds=float((7 * i + by) % 9)) if isinstance(e, Op) else e
                   for i, e in enumerate(problem.trace.events))  # fmt: skip
    other = replace(problem, trace=replace(problem.trace, events=events))
    in_force = State.of(other, state.decisions)
    assert (in_force.timeline.peak_bytes_at == state.timeline.peak_bytes_at).all()
    answer = front.retimed(other, in_force).at(budget)
    assert answer.state is not None
    assert answer.state.timeline.peak_bytes <= budget
    assert answer.state.timeline.extra_seconds <= in_force.timeline.extra_seconds
    assert answer.bound_seconds <= answer.state.timeline.extra_seconds + ROUNDING


@FEW
@given(problems())
def test_units_that_begin_search_for_ever_fewer_budgets(problem: Problem) -> None:
    """Front.at_start: of n budgets that states already found hold, log2(n) + 1 get a search; all plans are within theirs."""
    front = Front(problem, seconds=WALK_SECONDS)
    lowest = front.states[-1].timeline.peak_bytes
    budgets = range(problem.plain_peak, lowest - 1, -max(1, (problem.plain_peak - lowest) // 20))
    searched: list[int] = []
    search = front._search
    front._search = lambda budget, **how: (searched.append(budget), search(budget, **how))[1]  # type: ignore[method-assign]
    for budget in budgets:
        solution = front.at_start(budget)
        if budget >= max(lowest, front.bound.peak_bytes):
            assert solution.state is not None
            assert solution.state.timeline.peak_bytes <= budget
            assert solution.bound_seconds <= solution.state.timeline.extra_seconds + ROUNDING
    assert len(searched) <= 2 * len(budgets).bit_length()  # a second one is for a budget that counts as the same


@FEW
@given(problems(), st.floats(0, 1))
def test_programs_run_where_they_may_save_time(problem: Problem, share: float) -> None:
    """A unit that begins does without them only if the plan found costs hardly more than any plan must."""
    front = Front(problem, seconds=WALK_SECONDS, program_seconds=1.0)
    lowest = front.states[-1].timeline.peak_bytes
    budget = lowest + int(share * (problem.plain_peak - lowest))
    solution = front.at_start(budget)
    if solution.state is not None and "_relaxed" not in vars(front) and budget < problem.plain_peak:
        possible = UnitTimeBound(problem).at(budget)
        best = min(s.timeline.extra_seconds for s in front.states if s.timeline.peak_bytes <= budget)
        assert best - possible < WORTHWHILE_SHARE * problem.seconds


@FEW
@given(problems(), st.floats(0, 1))
def test_programs_run_later_where_a_search_was_hasty(problem: Problem, share: float) -> None:
    """A hasty search runs none; asked again without haste, the same budget gets a plan that costs no more, and a bound."""
    front, thorough = (Front(problem, seconds=WALK_SECONDS, program_seconds=1.0) for _ in range(2))
    lowest = front.states[-1].timeline.peak_bytes
    budget = lowest + int(share * (problem.plain_peak - lowest))
    hasty = front.at_start(budget, hasty=True)
    assert "_relaxed" not in vars(front)
    again = front.at_start(budget)
    assert ("_relaxed" in vars(front)) == (thorough.at_start(budget) is not None and "_relaxed" in vars(thorough))
    if hasty.state is not None:
        assert again.state is not None
        assert again.state.cost <= hasty.state.cost
    relaxed = vars(front).get("_relaxed")
    front.at_start(budget)
    assert vars(front).get("_relaxed") is relaxed


@FEW
@given(problems())
def test_a_lower_budget_never_gives_a_faster_plan(problem: Problem) -> None:
    """Plans of Front.at are within the budget and get no slower with more of it; infeasible means below the bound."""
    front = Front(problem, seconds=WALK_SECONDS)
    cost = float("inf")
    for budget in range(BASE_BYTES, problem.plain_peak + 20, max(10, (problem.plain_peak - BASE_BYTES) // 6)):
        solution = front.at(budget)
        assert (solution.status is Status.INFEASIBLE) == (solution.bound.peak_bytes > budget)
        if solution.state is not None:
            assert solution.state.timeline.peak_bytes <= budget
            assert solution.bound_seconds <= solution.state.timeline.extra_seconds + ROUNDING
            assert solution.state.timeline.extra_seconds <= cost
            cost = solution.state.timeline.extra_seconds


@given(problems())
def test_recomputing_a_value_that_cannot_be_replayed_is_refused(problem: Problem) -> None:
    """A value whose operator, or an ancestor of it, cannot be replayed may not be dropped."""
    for v, buffer in enumerate(problem.trace.buffers):
        if buffer.released >= 0 and not problem.remakeable[v]:
            with pytest.raises(StructureError, match="cannot be recomputed"):
                play(problem, {(v, len(problem.needs[v])): Away(Action.RECOMPUTE, 0)})


@given(problems(moving=False))
def test_offloading_without_a_second_board_is_refused(problem: Problem) -> None:
    """Without a bandwidth nothing can be offloaded."""
    for v, buffer in enumerate(problem.trace.buffers):
        if buffer.released >= 0:
            with pytest.raises(StructureError, match="cannot be offloaded"):
                play(problem, {(v, problem.gap_starts[v]): Away(Action.MOVE, 0)})


@given(problems())
def test_a_value_the_script_holds_may_not_be_away(problem: Problem) -> None:
    """It cannot be away through gaps in which the script holds it."""
    for v, buffer in enumerate(problem.trace.buffers):
        for gap in range(problem.gap_starts[v] if buffer.released >= 0 else 0):
            with pytest.raises(StructureError, match="held by the script"):
                play(problem, {(v, gap): Away(Action.RECOMPUTE, 0)})


@given(problems())
def test_a_value_never_saved_may_not_be_away(problem: Problem) -> None:
    """Only values that autograd saved can be given back to it."""
    for v, buffer in enumerate(problem.trace.buffers):
        if buffer.released < 0:
            with pytest.raises(StructureError, match="never saved"):
                play(problem, {(v, 0): Away(Action.RECOMPUTE, 0)})


@given(plans())
def test_offloading_in_a_later_gap_requires_the_first_one(planned: Planned) -> None:
    """A value that was not written to the second board in its first gap cannot be there later."""
    problem, decisions = planned
    for v in {v for (v, _), away in decisions.items() if away.action is Action.MOVE}:
        first = problem.gap_starts[v]
        rest = {(v, gap): Away(Action.MOVE, 0) for gap in range(first + 1, len(problem.needs[v]) + 1)}
        if rest:
            with pytest.raises(StructureError, match="was not written"):
                play(problem, rest)


@given(plans())
def test_pinned_values_are_never_recomputed(planned: Planned) -> None:
    """If all values are pinned (foreign code may write to them), none can be recomputed, and the bound is the baseline's peak.
    """
    problem, _ = planned
    everything = frozenset(range(len(problem.trace.buffers)))
    tied = replace(problem, pinned=everything)
    assert not any(tied.remakeable)
    assert peak_bound(replace(tied, bandwidth=None)).peak_bytes == problem.plain_peak


@given(problems(), st.integers(0, 60), st.booleans())
def test_prefetches_are_of_absent_moved_values_and_raise_no_peak(drawn: Problem, spike: int, slow: bool) -> None:
    """Each begins after an earlier need, at most once per fetch. Adding its bytes up to the need that it is for does not raise
    the peak.
    """
    speed = 0.1 if slow else 8.0
    trace = drawn.trace
    spikes = (trace.spike_bytes[0] + spike, *trace.spike_bytes[1:]) if trace.events else ()  # a peak that leaves room elsewhere
    buffers = tuple(replace(b, movable=b.counted) for b in trace.buffers)
    problem = replace(
        drawn, bandwidth=Bandwidth(write=4.0, read=speed, read_fresh=speed),
        trace=replace(trace, spike_bytes=spikes, buffers=buffers),
    )
    decisions = {
        (v, gap): Away(Action.MOVE, len(trace.events))
        for v, b in enumerate(buffers)
        if b.released >= 0 and problem.can_move(v)
        for gap in range(problem.gap_starts[v], len(problem.needs[v]) + 1)
    }
    timeline = play(problem, decisions)
    ahead = fetches_ahead(problem, timeline)
    wanted = sorted((problem.needs[r.value][r.need][0], v) for r in timeline.remakes for v in r.fetched)
    height = timeline.peak_bytes_at.copy()
    begun = []
    for (value, need), fetched in ahead.items():
        start = problem.needs[value][need][0]
        for v in fetched:
            end = min(e for e, u in wanted if u == v and e > start)
            assert decisions[v, problem.gap_starts[v]].action is Action.MOVE
            assert all(timeline.absent(v, e) for e in range(start, end))
            height[start:end] += problem.trace.buffers[v].bytes
            begun.append((end, v))
    assert len(begun) == len(set(begun))
    assert set(begun) <= set(wanted)
    assert height.max(initial=0) <= timeline.peak_bytes
    target(float(len(begun)))
