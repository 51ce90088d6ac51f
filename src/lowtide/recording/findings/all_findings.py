"""Runs every finder on a recorded step, and orders the findings by what they save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from lowtide.recording.findings.evaluation import evaluation_graph
from lowtide.recording.findings.held import double_precision, graph_kept, held_results, model_copies, zeroed_gradients
from lowtide.recording.findings.loss_and_data import loss_block, resident_data, smaller_batch
from lowtide.recording.findings.optimizer import foreach_extra, optimizer_states
from lowtide.recording.findings.run import allocator_cache, backward_extra, cold_step, memory_floor, second_step
from lowtide.recording.reader import Recording
from lowtide.recording.recorded_step import RecordedStep, telling
from lowtide.recording.whatif import Case, Finding

LEVERS: Final = ("loss-block", "foreach", "resident-data", "smaller-batch")
"""Kinds of findings that suggest a way to use less memory; the others point out oversights, and come first."""


def findings(recording: Recording, recorded: Sequence[RecordedStep]) -> list[Finding]:
    """All findings of a recording: oversights, then levers, each group by its saving; findings without a saving last.

    Args:
        recording: the recording, for facts about the whole run.
        recorded: its steps, laid out.
    """
    steps = [s for s in recorded if s.row.step >= 0] or recorded
    step = telling(steps)
    if step is None:
        return []
    last = step.row.step == recording.steps[-1].step
    case = Case(
        recorded, step, int(recording.meta.get("cap_bytes") or 0), recording.meta.get("allocator") or {}, last=last,
        later_use=_later_use(recording.meta.get("later")),
        whole=bool(recording.meta.get("whole")),
    )
    found = [f for finder in FINDERS for f in finder(case)]
    return sorted(found, key=lambda f: (f.id in LEVERS, -f.saving_bytes) if f.saving_bytes else (True, 1))


def _later_use(found: object) -> dict[int, tuple[int, int]]:
    """By block number, the last step that read it and the last that wrote it; invalid rows of the file are skipped."""
    rows = found if isinstance(found, list) else []
    sound = (r for r in rows if isinstance(r, list) and len(r) == 3 and all(isinstance(x, int) for x in r))
    return {number: (read, written) for number, read, written in sound}


FINDERS: Final[tuple[Callable[[Case], Iterable[Finding]], ...]] = (
    zeroed_gradients, held_results, double_precision, graph_kept, model_copies, evaluation_graph, foreach_extra, loss_block,
    resident_data, smaller_batch, second_step, cold_step, allocator_cache, backward_extra, optimizer_states,
    memory_floor,
)


def would_fit(found: Iterable[Finding], cap_bytes: int) -> list[Finding]:
    """The findings that alone would have kept the step within a limit in bytes."""
    return [f for f in found if f.saving_bytes and f.changed_peak_bytes <= cap_bytes]
