"""Of which steps a recording keeps all entries, and of which the figures alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, final

from lowtide.recording.file_format import StepRow
from lowtide.runtime.record.recording_state import RecordingState

FIRST_STEPS: Final = 3
"""Steps whose entries are always kept: the first allocates states and gradients, the second is warm, the third confirms."""
MOST_STEPS: Final = 16
"""Steps at most whose entries are kept, the unfinished one apart."""
HIGHER: Final = 1.005
"""Beyond the first steps, one that peaks so much higher than all that are kept is kept, too, and the one after it."""
HIGHER_STILL: Final = 1.02
"""Once that many are kept, a step must peak so much higher to take the place of the oldest beyond the first steps."""


@final
class StepRetention:
    """One per recorder."""

    def __init__(self, state: RecordingState) -> None:
        """No step is over."""
        self._state = state
        self._highest_bytes, self._highest_step = 0, -1
        self._kept: list[int] = []

    def steps(self) -> Iterator[int]:
        """Numbers of the steps whose entries are kept, or are to be."""
        yield from range(-1, FIRST_STEPS)
        yield from self._kept

    def put(self, row: StepRow) -> None:
        """A step is over: into the recording it goes, with its entries or without them."""
        step, writer = row.step, self._state.writer
        full = len(self._kept) + FIRST_STEPS >= MOST_STEPS
        higher = step >= FIRST_STEPS and row.peak_bytes > (HIGHER_STILL if full else HIGHER) * self._highest_bytes
        follows = step == self._highest_step + 1  # it tells what became of what the highest one left
        keeps = self._state.operators and (not row.complete or step < FIRST_STEPS or higher or follows)
        if keeps and step >= 0 and row.peak_bytes > self._highest_bytes:  # a setup may stand above every step
            self._highest_bytes, self._highest_step = row.peak_bytes, step
        if keeps and row.complete and step >= FIRST_STEPS:
            if full:
                writer.forget(self._kept.pop(0))
            self._kept.append(step)
        writer.step(row if keeps else replace(row, entries=None, carried=None))
