"""Law: the summary of a run says what its figures mean, and nothing else."""

from __future__ import annotations

import pytest
from lowtide.live.outcome import LeverFigures, Outcome, StepFigures
from lowtide.report.terminal import show_outcome


def _step(index: int, policy: str, peak: int) -> StepFigures:
    return StepFigures(
        index=index, seconds=0.1, peak_bytes=peak, policy=policy, recomputed_ops=0, recompute_seconds=0.0, offloaded_bytes=0,
        offload_seconds=0.0, rescued_ops=0, overrun=False,
    )


@pytest.mark.parametrize(
    ("peaks", "used", "told"),
    [
        ([90, 120, 100, 100], True, True),
        ([90, 120, 100, 100], False, False),
        ([90, 90, 100, 100], True, False),
        ([90, 120, 100, 120], True, False),
    ],
)
def test_what_crossed_before_levers_were_pulled_is_told_as_that(
    peaks: list[int], used: bool, told: bool, capsys: pytest.CaptureFixture[str]  # noqa: FBT001
) -> None:
    steps = tuple(_step(i, "online" if i < 2 else "planned", p << 20) for i, p in enumerate(peaks))
    lever = LeverFigures(name="update-in-backward", used=used, text="")
    show_outcome(Outcome(budget_bytes=100 << 20, steps=steps, plan=None, exact=True, levers=(lever,), asked=True))
    said = " ".join(capsys.readouterr().err.split())
    assert ("before the levers were pulled" in said) == told
    assert ("from step 2 on all were within it" in said) == told
