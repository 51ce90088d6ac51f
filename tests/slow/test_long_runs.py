"""Long versions of the laws; ``make test-slow`` runs them."""

from __future__ import annotations

import pytest
import situations
import zoo
from harness import above_of, budgeted, heap, plain_of


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt_eager", "gru_seq2seq"])
def test_bits_hold_over_forty_steps(name: str) -> None:
    reference = plain_of(zoo.MODELS[name], 40)
    run = budgeted(zoo.MODELS[name], above_of(reference, 0.75), 40)
    assert run.bits == reference.bits
    assert run.peak_bytes <= run.budget_bytes


def test_memory_does_not_creep_over_two_hundred_steps() -> None:
    make = situations.SITUATIONS["clipping"]
    above = above_of(plain_of(make, 7), 0.6)
    budgeted(make, above, 7)
    before = heap().tensor_live
    budgeted(make, above, 200)
    assert heap().tensor_live - before <= 64 << 10
