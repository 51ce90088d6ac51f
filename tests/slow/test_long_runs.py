"""Long versions of the laws; ``make test-slow`` runs them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import situations
import torch
import zoo
from harness import above_of, budgeted, heap, plain_of
from lowtide.runtime.record.step_retention import FIRST_STEPS, MOST_STEPS

import lowtide


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt_eager", "gru_seq2seq"])
def test_bits_and_budget_hold_over_forty_steps(name: str) -> None:
    reference = plain_of(zoo.MODELS[name], 40)
    run = budgeted(zoo.MODELS[name], above_of(reference, 0.75), 40)
    assert run.bits == reference.bits
    assert run.peak_bytes <= run.budget_bytes


def test_memory_does_not_grow_over_two_hundred_steps() -> None:
    make = situations.SITUATIONS["clipping"]
    above = above_of(plain_of(make, 7), 0.6)
    budgeted(make, above, 7)
    before = heap().tensor_live
    budgeted(make, above, 200)
    assert heap().tensor_live - before <= 64 << 10


def test_a_long_recording_keeps_a_bounded_number_of_steps(tmp_path: Path) -> None:
    """200 steps are counted, a bounded number keeps its entries, and the process does not grow."""
    make = situations.SITUATIONS["lengths_change"]
    torch.manual_seed(0)
    zoo.run(make, 3)
    gc.collect()
    before = heap().tensor_live
    with lowtide.record(tmp_path / "long") as run:
        zoo.run(make, 200)
    gc.collect()
    assert heap().tensor_live - before <= 64 << 10
    recording = run.recording
    assert len([row for row in recording.steps if row.step >= 0]) == 200
    kept = [row for row in recording.steps if row.entries is not None]
    assert FIRST_STEPS < len(kept) <= FIRST_STEPS + MOST_STEPS + 1
