"""What a recording says, as one frozen value: steps, peaks, findings and how it ended; every report renders this value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from lowtide.recording.file_format import ProcessRow, StepRow
from lowtide.recording.findings.all_findings import findings, would_fit
from lowtide.recording.peak_report import PeakReport, last_moment, peak_report
from lowtide.recording.reader import Recording
from lowtide.recording.recorded_step import RecordedStep, laid_out, telling
from lowtide.recording.whatif import Finding

_NEARLY_HIGHEST: Final = 1.001
"""A step whose operators were not kept is told of where it peaks at so many times what is explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideMemory:
    """What a process held outside torch's allocator, at the ends of phases.

    Attributes:
        highest_bytes: the most.
        phase: of the most.
        step: of the most.
        rise_bytes: of the most above the least.
    """

    highest_bytes: int
    phase: str
    step: int
    rise_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What the whole process held, in any framework.

    Attributes:
        rows: by step where the program marked steps, else by second; at least one.
        marked: whether rows are steps.
        highest_bytes: the highest resident size, between marks too.
        children_bytes: the most that its child processes held.
        median_change_bytes: of the resident size from row to row; None of a single row.
    """

    rows: tuple[ProcessRow, ...]
    marked: bool
    highest_bytes: int
    children_bytes: int
    median_change_bytes: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """What a recording says.

    Attributes:
        recording: what was read; reports ask it for nothing but facts about the run (``meta``).
        rows: the figures of the training steps, in order.
        setup: the figures of what came before the first of them; None where nothing was seen.
        steps: the steps whose operators were kept, what came before the first training step included.
        telling: the one of them that a reader asks about: the last that failed for want of memory, else the highest.
        peak: the high-water mark, in ``telling``.
        higher: a step that peaked above ``peak`` and whose operators were not kept; None where there is none.
        ended: where the process was when it was ended from outside (SIGKILL, the out-of-memory killer); None where its end
            was written.
        outside: memory outside torch's allocator; None where none was measured.
        process: memory of the whole process; None where it was not sampled.
    """

    recording: Recording
    rows: tuple[StepRow, ...]
    setup: StepRow | None
    steps: tuple[RecordedStep, ...]
    telling: RecordedStep | None
    peak: PeakReport | None
    higher: StepRow | None
    ended: PeakReport | None
    outside: OutsideMemory | None
    process: ProcessMemory | None

    @property
    def meta(self) -> Mapping[str, Any]:
        """Facts about the run."""
        return self.recording.meta

    @property
    def cap_bytes(self) -> int:
        """The limit under which it ran; 0 without one."""
        return int(self.meta.get("cap_bytes") or 0)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What would lower the peak, best first. Sought when first asked for: exports and differences do without."""
        return tuple(findings(self.recording, self.steps))

    @property
    def fitting(self) -> list[Finding]:
        """The findings each of which alone would have kept the step within the limit; none without a limit."""
        return would_fit(self.findings, self.cap_bytes) if self.cap_bytes else []


def explain(recording: Recording) -> Explanation:
    """What a recording says.

    Example:
        >>> explain(read("recording.lowtide")).peak.bytes  # doctest: +SKIP
        104857600
    """
    steps = laid_out(recording)
    rows = tuple(row for row in recording.steps if row.step >= 0)
    at = telling(steps)
    peak = None if at is None else peak_report(at)
    return Explanation(
        recording=recording,
        rows=rows,
        setup=next((row for row in recording.steps if row.step < 0), None),
        steps=tuple(steps),
        telling=at,
        peak=peak,
        higher=None if peak is None else _higher(recording, peak),
        ended=_ended(recording, steps),
        outside=_outside(rows),
        process=_process(recording),
    )


def _higher(recording: Recording, peak: PeakReport) -> StepRow | None:
    found = max(recording.steps, key=lambda row: row.peak_bytes)
    return found if found.entries is None and found.peak_bytes > _NEARLY_HIGHEST * peak.bytes else None


def _ended(recording: Recording, steps: Sequence[RecordedStep]) -> PeakReport | None:
    if not recording.meta.get("died") or not steps or steps[-1].row.complete or steps[-1].denied.any():
        return None
    return last_moment(steps[-1])


def _outside(rows: Sequence[StepRow]) -> OutsideMemory | None:
    found = [(p.outside_bytes, p.name, row.step) for row in rows for p in row.phases if p.outside_bytes]
    if not found:
        return None
    most, phase, step = max(found)
    return OutsideMemory(highest_bytes=most, phase=phase, step=step, rise_bytes=most - min(found)[0])


def _process(recording: Recording) -> ProcessMemory | None:
    if not recording.process:
        return None
    rows = tuple(r for r in recording.process if r.marked) or recording.process
    changes = sorted(r.change_bytes for r in rows[1:])
    return ProcessMemory(
        rows=rows,
        marked=rows[0].marked,
        highest_bytes=max(r.highest_bytes for r in recording.process),
        children_bytes=max(r.children_bytes for r in recording.process),
        median_change_bytes=changes[len(changes) // 2] if changes else None,
    )
