"""Laws of the search for the smallest budget, on scripts that are made up: at most ten runs, one per cent, whatever the first guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowtide.size.minimum import CLOSE, MOST_RUNS, lever_sets, search
from lowtide.size.trial import Asked, Ran

PLAIN = 1_000_000_000


def _ran(asked: Asked, ended: str, plan: int | None) -> Ran:
    return Ran(
        asked=asked,
        ended=ended,
        message="",
        steps=({"seconds": 1.0, "peak_bytes": asked.budget_bytes},) * asked.steps,
        resident_bytes=0,
        plan=None if plan is None else {"lowest_peak_bytes": plan, "baseline_peak_bytes": PLAIN, "bound": {"peak_bytes": plan}},
        levers=(),
    )


@given(st.integers(PLAIN // 10, PLAIN), st.floats(0.7, 1.4), st.integers(0, 2))
def test_the_minimum_is_found_within_a_per_cent(truth: int, off: float, late: int) -> None:
    """The plan's floor is a guess; the long run may fail where short ones pass."""
    guess = min(int(truth * off), PLAIN)

    def run(asked: Asked) -> Ran:
        needed = truth * (1 + CLOSE) ** late if asked.steps == 50 else truth
        return _ran(asked, "ok" if asked.budget_bytes >= needed or not asked.cap_bytes else "memory", guess)

    plain = _ran(Asked(steps=6, budget_bytes=PLAIN), "ok", None)
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


def test_a_script_without_a_plan_says_so() -> None:
    plain = _ran(Asked(steps=6, budget_bytes=PLAIN), "ok", None)
    found = search("none", frozenset(), frozenset(), plain, lambda asked: _ran(asked, "error", None), offload=True)
    assert found.minimum_bytes is None
    assert "no plan was made" in found.reason


@pytest.mark.parametrize(("allow", "without", "names"), [
    ((), (), ["no levers", "exact levers"]),
    (("chunked-loss",), (), ["no levers", "exact levers", "all levers"]),
    ((), ("update-in-backward", "sliced-update"), ["no levers"]),
])
def test_sets_of_levers(allow: tuple[str, ...], without: tuple[str, ...], names: list[str]) -> None:
    assert list(lever_sets(frozenset(allow), frozenset(without))) == names
