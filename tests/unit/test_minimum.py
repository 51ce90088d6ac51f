"""Laws of the search for the smallest budget, on simulated scripts: at most ten runs, within one percent, whatever the first
guess.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowtide.report.size import minimum_json, minimum_page
from lowtide.studies.size.minimum import CLOSE, MOST_RUNS, SURVIVES, MinimumSearch, MinimumStudy, covering, lever_sets, search
from lowtide.studies.size.trial import TrialRequest, TrialResult

PLAIN = 1_000_000_000


def _ran(asked: TrialRequest, ended: str, plan: int | None) -> TrialResult:
    return TrialResult(
        asked=asked,
        ended=ended,
        message="",
        steps=({"seconds": 1.0, "peak_bytes": asked.budget_bytes},) * asked.steps,
        resident_bytes=0,
        plan=None if plan is None else {"lowest_peak_bytes": plan, "baseline_peak_bytes": PLAIN, "bound": {"peak_bytes": plan}},
        levers=(),
    )


@given(st.integers(PLAIN // 10, PLAIN), st.floats(0.7, 1.4), st.integers(0, 2))
def test_the_minimum_is_found_within_one_percent(truth: int, off: float, late: int) -> None:
    """The plan's floor is only a guess, and the long run may need a higher budget than short ones. The minimum found is never
    too low, and, unless the runs are used up, a budget at most 1 % below it fails.
    """
    guess = min(int(truth * off), PLAIN)

    def run(asked: TrialRequest) -> TrialResult:
        needed = truth * (1 + CLOSE) ** late if asked.steps == 50 else truth
        return _ran(asked, "ok" if asked.budget_bytes >= needed or not asked.cap_bytes else "memory", guess)

    plain = _ran(TrialRequest(steps=6, budget_bytes=PLAIN), "ok", None)
    found = search("all", frozenset(), frozenset(), plain, run, offload=True)
    assert len(found.runs) <= MOST_RUNS
    if found.minimum_bytes is None:  # a guess so far off that ten runs do not bracket it
        assert off < 0.8
        return
    assert found.minimum_bytes >= truth
    if len(found.runs) < MOST_RUNS:
        assert found.fails_at_bytes is not None
        assert found.fails_at_bytes >= (1 - CLOSE) * found.minimum_bytes - 1
        assert found.survived is not None
        assert found.survived.passes


def test_a_script_without_a_plan_has_no_minimum_and_a_reason() -> None:
    plain = _ran(TrialRequest(steps=6, budget_bytes=PLAIN), "ok", None)
    found = search("none", frozenset(), frozenset(), plain, lambda asked: _ran(asked, "error", None), offload=True)
    assert found.minimum_bytes is None
    assert "no plan was made" in found.reason


@pytest.mark.parametrize(("allow", "without", "names"), [
    ((), (), ["no levers", "exact levers"]),
    (("chunked-loss",), (), ["no levers", "exact levers", "all levers"]),
    ((), ("move-gradients", "move-states", "sliced-update", "plan-checkpoints"), ["no levers"]),
])
def test_lever_sets_follow_what_is_allowed_and_excluded(allow: tuple[str, ...], without: tuple[str, ...], names: list[str]) -> None:
    """No levers, the exact ones unless all are excluded, and all allowed ones if these are more."""
    assert list(lever_sets(frozenset(allow), frozenset(without))) == names


def test_a_long_run_that_exits_by_itself_did_not_run_out_of_memory() -> None:
    """Its exit code used to count as an out-of-memory failure, and the budget was raised until the runs were used up."""
    truth = PLAIN // 2

    def run(asked: TrialRequest) -> TrialResult:
        enough = asked.budget_bytes >= truth or not asked.cap_bytes
        return _ran(asked, ("error" if asked.steps == SURVIVES else "ok") if enough else "memory", truth)

    plain = _ran(TrialRequest(steps=6, budget_bytes=PLAIN), "ok", None)
    found = search("all", frozenset(), frozenset(), plain, run, offload=True)
    assert found.minimum_bytes == truth
    assert found.survived is not None
    assert not found.survived.passes


def test_the_headline_is_the_smallest_minimum_of_all_lever_sets() -> None:
    """It used to be that of the widest set, which may need more."""
    plain = _ran(TrialRequest(steps=6, budget_bytes=PLAIN), "ok", None)

    def searched(name: str, truth: int) -> MinimumSearch:
        return search(name, frozenset(), frozenset(), plain,
                      lambda a: _ran(a, "ok" if a.budget_bytes >= truth or not a.cap_bytes else "memory", truth), offload=True)

    answer = minimum_json(MinimumStudy(
        script="train.py", plain=plain, declined={},
        sets=(searched("no levers", PLAIN // 2), searched("exact levers", PLAIN // 2 + 1000)),
    ))
    assert answer["minimum_bytes"] == PLAIN // 2
    assert answer["set"] == "no levers"


def test_runs_are_long_enough_to_reach_the_highest_step() -> None:
    """An evaluation came in the sixth step, and runs of four never reached it: the minimum then failed in the long run."""
    asked = TrialRequest(steps=12)
    steps = tuple({"seconds": 1.0, "peak_bytes": 800 if i % 6 == 5 else 100} for i in range(12))
    plain = TrialResult(asked=asked, ended="ok", message="", steps=steps, resident_bytes=0, plan=None, levers=())
    assert covering(plain, 4) == 7
    assert covering(plain, 9) == 9


def test_a_first_guess_far_too_low_is_followed_by_the_baseline_peak() -> None:
    """A plan's floor of a sixth of the true minimum still leads to it within 1 %."""
    def run(asked: TrialRequest) -> TrialResult:
        return _ran(asked, "ok" if asked.budget_bytes >= PLAIN * 0.99 or not asked.cap_bytes else "memory", PLAIN // 6)

    found = search("all", frozenset(), frozenset(), _ran(TrialRequest(steps=6, budget_bytes=PLAIN), "ok", None), run, offload=True)
    assert found.minimum_bytes is not None
    assert PLAIN * 0.99 <= found.minimum_bytes <= PLAIN


def test_a_run_that_crossed_its_budget_is_no_point_of_the_curve() -> None:
    asked = TrialRequest(steps=6, budget_bytes=PLAIN)
    crossed = replace(_ran(asked, "ok", None), asked=replace(asked, budget_bytes=123_456_789))
    within = _ran(replace(asked, budget_bytes=987_654_321), "ok", None)
    found = MinimumSearch(
        name="no levers", allow=frozenset(), without=frozenset(), minimum_bytes=987_654_321, fails_at_bytes=None,
        floor_bytes=None, runs=(crossed, within), survived=None,
    )
    page = minimum_page(MinimumStudy(script="train.py", plain=_ran(asked, "ok", None), sets=(found,), declined={}))
    assert "987654321" in page
    assert "123456789" not in page
