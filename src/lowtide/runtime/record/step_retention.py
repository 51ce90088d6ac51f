"""Decides which steps of a recording keep all their entries, and which keep only their figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, final

from lowtide.recording.file_format import StepRow
from lowtide.runtime.record.recording_state import RecordingState

FIRST_STEPS: Final = 3
"""Number of first steps whose entries are always kept: the first allocates optimizer states and gradients, the second is warm,
the third confirms it."""
MOST_STEPS: Final = 16
"""Maximum number of steps whose entries are kept; the setup (step -1) and an unfinished step come on top."""
HIGHER: Final = 1.005
"""After the first steps, a step is kept if it peaks 0.5 % higher than all kept steps; so is the step that follows it."""
HIGHER_STILL: Final = 1.02
"""Once the quota is full, a step must peak 2 % higher to replace the oldest kept step after the first ones."""


@final
class StepRetention:
    """Writes steps to a recording with or without their entries; one per recorder."""

    def __init__(self, state: RecordingState) -> None:
        """Start before any step is over."""
        self._state = state
        self._highest_bytes, self._highest_step = 0, -1
        self._kept: list[int] = []

    def steps(self) -> Iterator[int]:
        """Numbers of the steps whose entries are kept or, for the first steps, will be; the setup is -1."""
        yield from range(-1, FIRST_STEPS)
        yield from self._kept

    def put(self, row: StepRow) -> None:
        """Write a finished step to the recording, with its entries if they are kept."""
        step, writer = row.step, self._state.writer
        full = len(self._kept) + FIRST_STEPS >= MOST_STEPS
        higher = step >= FIRST_STEPS and row.peak_bytes > (HIGHER_STILL if full else HIGHER) * self._highest_bytes
        follows = step == self._highest_step + 1  # shows what became of the blocks that the highest step left
        keeps = self._state.operators and (not row.complete or step < FIRST_STEPS or higher or follows)
        if keeps and step >= 0 and row.peak_bytes > self._highest_bytes:  # the setup may peak above every step
            self._highest_bytes, self._highest_step = row.peak_bytes, step
        if keeps and row.complete and step >= FIRST_STEPS:
            if full:
                writer.forget(self._kept.pop(0))
            self._kept.append(step)
        writer.step(row if keeps else replace(row, entries=None, carried=None))
