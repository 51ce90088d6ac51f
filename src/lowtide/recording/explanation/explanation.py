"""What a recording says, as one frozen value (steps, peaks, findings, how it ended) that every report renders."""

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
"""A step without kept operators is mentioned if it peaks at more than this many times the explained peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideMemory:
    """What a process held on the heap outside torch's allocator, at the highest point of each phase.

    Attributes:
        highest_bytes: the most in any phase.
        phase: the phase with the most.
        step: its step.
        rise_bytes: how far that phase stands above the lowest one.
    """

    highest_bytes: int
    phase: str
    step: int
    rise_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Memory of the whole process, whatever framework it uses.

    Attributes:
        rows: one per step if the program marked steps, else one per second; at least one.
        marked: whether rows are steps.
        highest_bytes: the highest resident size, also outside marked steps.
        children_bytes: the most that the child processes held together.
        median_change_bytes: median change of the resident size from row to row; None with a single row.
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
        recording: the recording itself; reports read from it only what is stored there (``meta``, rows, the path).
        rows: the figures of the training steps, in order.
        setup: the figures of everything before the first training step; None if nothing was seen.
        steps: the steps whose operators were kept, including what came before the first training step.
        telling: the one of ``steps`` to explain: the last that ran out of memory, else the one with the highest peak.
        peak: the high-water mark of ``telling``.
        higher: a step that peaked above ``peak`` but whose operators were not kept; None without one.
        ended: where the process was when it was killed (SIGKILL, the out-of-memory killer); None if it wrote its end, or ran
            out of memory.
        outside: memory outside torch's allocator; None if it was not measured.
        process: memory of the whole process; None if it was not sampled.
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
        """The memory limit of the run; 0 without one."""
        return int(self.meta.get("cap_bytes") or 0)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What would lower the peak, best first. Computed on first access, because exports and differences do not need it."""
        return tuple(findings(self.recording, self.steps))

    @property
    def fitting(self) -> list[Finding]:
        """The findings that alone would have kept the step within the limit; empty without a limit."""
        return would_fit(self.findings, self.cap_bytes) if self.cap_bytes else []


def explain(recording: Recording) -> Explanation:
    """Derives everything that reports say about a recording.

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
