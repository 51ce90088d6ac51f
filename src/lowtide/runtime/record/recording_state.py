"""State shared by the parts of a recorder: the writer, the meter, and the current step and phase."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, final

from lowtide.base.trace import Phase
from lowtide.recording.file_format import PHASES, EntryKind
from lowtide.recording.writer import Writer
from lowtide.runtime.device.memory_meter import Meter

CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
"""Code of each phase in journal entries."""

Origin = tuple[int, int, int]
"""Name ids of an operator, its module and its source line."""

NOWHERE: Final[Origin] = (0, 0, 0)


@final
@dataclass(slots=True)
class RecordingState:
    """State shared by the parts of one recorder.

    Attributes:
        operators: whether operators are recorded, or only phases.
        active: whether entries are written.
        step: number of the current step; -1 before the first one.
        began: when the recording began, by ``time.perf_counter`` (seconds).
    """

    writer: Writer
    meter: Meter
    operators: bool
    active: bool = False
    step: int = -1
    phase: Phase = Phase.DATA
    began: float = field(default_factory=time.perf_counter)

    def now(self) -> float:
        """Seconds since the recording began."""
        return time.perf_counter() - self.began

    def write(
        self, kind: EntryKind, a: int = 0, b: int = 0, c: int = 0,
        *, flags: int = 0, size: int = 0, live: int = 0, peak: int = 0,
    ) -> None:
        """Write one entry to the journal, if the recorder is active."""
        if self.active:
            self.writer.journal.add(self.now(), kind, CODE[self.phase], flags, a, b, c, size, live, peak)
