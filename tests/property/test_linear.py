"""Laws: a program that grows is solved as one that was whole from the start, and gives an answer of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowtide.pebble import linear
from lowtide.pebble.bound import Program


def _row(program: Program, rnd: np.random.Generator) -> None:
    """Covers some variables, new ones among them."""
    new = program.variable(len(program.cost), float(rnd.integers(1, 9)))
    others = rnd.choice(new + 1, size=min(4, new + 1), replace=False)
    program.row({int(j): float(rnd.integers(1, 5)) for j in {new, *others.tolist()}}, 1.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.sampled_from([0.0, 0.05, 1.0]))
def test_rows_and_variables_that_join_change_the_answer_as_if_they_had_been_there(seed, sizes, anew):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear, "_ANEW", anew)
        grown, whole = Program(), Program()
        grown.grows()
        states = [np.random.default_rng(seed), np.random.default_rng(seed)]
        for size in sizes:
            for program, state in zip((grown, whole), states, strict=True):
                for _ in range(size):
                    _row(program, state)
            one, other = (program.solve(60.0, whole=False) for program in (grown, whole))
            assert one.value == pytest.approx(other.value, abs=1e-9)
            assert one.ended
            for terms, low in zip(grown.rows, grown.low, strict=True):
                assert sum(a * one.x[j] for j, a in terms.items()) >= low - 1e-6


def test_what_cannot_be_is_told() -> None:
    program = Program()
    program.grows()
    program.row({program.variable("a", 1.0): 1.0}, 0.5)
    assert program.solve(60.0, whole=False).value == pytest.approx(0.5)
    program.row({program.variable("a"): 1.0}, 2.0)
    found = program.solve(60.0, whole=False)
    assert found.impossible
    assert found.x is None
