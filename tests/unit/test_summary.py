"""Law: the figures of a run take few bytes per step and are read back unchanged; its summary says what they mean."""

from __future__ import annotations

import tracemalloc

import pytest
from lowtide.runtime.run_figures import POLICIES, LeverFigures, RunOutcome, StepFigures, Steps
from lowtide.report.terminal import show_outcome


def _step(index: int, policy: str, peak: int) -> StepFigures:
    return StepFigures(
        index=index, seconds=0.1, peak_bytes=peak, policy=policy, recomputed_ops=0, recompute_seconds=0.0, offloaded_bytes=0,
        offload_seconds=0.0, rescued_ops=0, overrun=False,
    )


def test_step_figures_take_at_most_80_bytes_and_come_back_unchanged() -> None:
    """3000 steps with distinct figures, also read by index and by slice."""
    steps = [
        StepFigures(
            index=i, seconds=0.1 * i, peak_bytes=(i << 32) + 1, policy=POLICIES[i % 3], recomputed_ops=i, recompute_seconds=i / 7,
            offloaded_bytes=i << 33, offload_seconds=i / 3, rescued_ops=i % 2, overrun=i % 5 == 0,
        )
        for i in range(3000)
    ]
    tracemalloc.start()
    book = Steps()
    for step in steps:
        book.append(step)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= 80 * len(steps)
    assert list(book) == steps
    assert book[-1] == steps[-1]
    assert book[1:5] == tuple(steps[1:5])
    with pytest.raises(IndexError):
        book[3000]


@pytest.mark.parametrize(
    ("peaks", "excused", "early", "over"),
    [
        ([90, 120, 100, 100], 2, True, []),
        ([90, 120, 100, 100], 0, False, [1]),
        ([90, 90, 100, 100], 2, False, []),
        ([90, 120, 100, 120], 2, True, [3]),
    ],
)
def test_steps_before_a_lever_was_used_are_excused(
    peaks: list[int], excused: int, early: bool, over: list[int], capsys: pytest.CaptureFixture[str]  # noqa: FBT001
) -> None:
    """A crossing in the steps before the budget was seen to need a memory optimization is reported separately and does not
    break the budget; any later crossing does.
    """
    steps = tuple(_step(i, "online" if i < 2 else "planned", p << 20) for i, p in enumerate(peaks))
    lever = LeverFigures(name="move-gradients", used=True, text="")
    outcome = RunOutcome(
        budget_bytes=100 << 20, steps=steps, plan=None, exact=True, levers=(lever,), asked=True, excused=excused
    )
    show_outcome(outcome)
    said = " ".join(capsys.readouterr().err.split())
    assert ("showed that the budget needs a memory optimization" in said) == early
    assert ("the budget was not held" in said) == bool(over)
    assert outcome.held == (not over)
    assert outcome.to_json(0)["over"] == over
