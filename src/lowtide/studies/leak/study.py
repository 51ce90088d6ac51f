"""Runs a program in several fresh processes and watches them until the answer is clear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.units import format_bytes
from lowtide.studies.leak.series import garbage_rate
from lowtide.studies.leak.verdict import TOLERANCE, Judgement, Verdict, judge, together
from lowtide.studies.leak.watch import Look, Progress, Run, Watch, Watched

STEPS: Final = 300
"""Steps of a process by default."""
PROCESSES: Final = 2
"""Processes that must agree; one more is started if they do not."""
LEVELS: Final = 30
"""How often garbage is collected in a process in which waiting garbage would be taken for growth."""
GARBAGE: Final = 0.5
"""Garbage in cycles that grows by more than this share of the tolerance prevents a clear answer."""
FIRST_AUDIT: Final = 0.2
"""Share of the steps after which the first audit is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The processes of one program, and their verdicts.

    Attributes:
        runs: the processes, in order.
        judgements: the judgement of each process that ran to a verdict.
        verdict: their joint judgement.
        tolerance_bytes: growth in bytes per step that was tolerated.
    """

    runs: tuple[Run, ...]
    judgements: tuple[Judgement, ...]
    verdict: Judgement
    tolerance_bytes: float

    @property
    def run(self) -> Run:
        """The process that was watched longest."""
        return max(self.runs, key=lambda r: r.steps)


def audits_of(steps: int) -> tuple[int, ...]:
    """Steps at which audits are taken: after warm-up, half-way (where a clear answer ends the process), and at the end."""
    return tuple(sorted({max(1, round(steps * FIRST_AUDIT)), max(1, steps // 2), steps}))


def collecting(watch: Watch) -> Watch:
    """The same watch, with garbage in cycles collected now and then, and what is held read just after."""
    return replace(watch, collect_every=max(1, watch.steps // LEVELS))


def study(
    command: Sequence[str],
    watch: Watch,
    *,
    tolerance: float = TOLERANCE,
    processes: int = PROCESSES,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    quiet: bool = True,
) -> Study:
    """Run a program in fresh processes until they agree.

    The first process may end half-way if the answer is clear by then; later ones run through, and they decide. If garbage in
    reference cycles makes up the growth or hides it (Python's collector runs ever more rarely as more objects live), the study
    begins anew with processes whose garbage is collected.

    Args:
        command: the program and its arguments.
        watch: how each process is watched.
        tolerance: growth in bytes per step that is tolerated.
        processes: how many must agree; one more is started if they do not.
        environment: the environment of the processes; None for this process's own.
        progress: receives processes and steps.
        quiet: whether the first process's output is captured (that of later ones always is).
    """
    told = progress or Progress()
    watch = replace(watch, audits=watch.audits or audits_of(watch.steps))
    runs: list[Run] = []
    judgements: list[Judgement] = []
    waiting = 0.0
    while len(runs) < processes or (len(runs) == processes > 1 and _open(judgements, watch.steps)):
        told.process()
        early = not runs and processes > 1 and watch.steps > 0
        with Watched(command, watch, environment=environment, quiet=quiet or bool(runs or waiting)) as process:
            run = process.wait(told, _half_way(watch, tolerance) if early else None)
        runs.append(run)
        if not run.steps or run.code or run.ended == "timeout":
            break
        found = judge(run, tolerance, collected_every=watch.collect_every)
        garbage = garbage_rate(run)
        if found.verdict is not Verdict.CLEAN and not watch.collect_every and garbage > GARBAGE * tolerance:
            watch, waiting = collecting(watch), garbage
            runs.clear()
            judgements.clear()
            continue
        judgements.append(_told(found, waiting, watch.collect_every))
    empty = Judgement(
        verdict=Verdict.INCONCLUSIVE, counters=(), culprit=None, steps=0, notes=(), bounded=False, more_steps=watch.steps
    )
    verdict = together(judgements, watch.steps) if judgements else empty
    return Study(runs=tuple(runs), judgements=tuple(judgements), verdict=verdict, tolerance_bytes=tolerance)


def _told(found: Judgement, waiting: float, every: int) -> Judgement:
    """Add a note on garbage that was collected to reach the answer."""
    if not waiting:
        return found
    word = (
        f"{format_bytes(waiting)} a step of garbage in reference cycles were collected every {every} steps for this verdict: "
        "by itself, Python collects less often the more objects live (call gc.collect() now and then)"
    )
    return replace(found, notes=(*found.notes, word))


def _open(judgements: Sequence[Judgement], steps: int) -> bool:
    """Whether another process is needed."""
    return together(judgements, steps).verdict is Verdict.INCONCLUSIVE or len({j.verdict for j in judgements}) > 1


def _half_way(watch: Watch, tolerance: float) -> Look:
    """A look half-way, which ends the process if the answer is clear by then."""

    def enough(rows: NDArray[np.int64]) -> bool:
        run = Run(rows=rows, kind=None, audits=(), census=(), code=0, ended="", seconds=0.0)
        return judge(run, tolerance, half=True, collected_every=watch.collect_every).verdict is not Verdict.INCONCLUSIVE

    return Look(max(1, watch.steps // 2), enough)
