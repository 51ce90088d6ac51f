"""Decides whether a program leaks: compares each counter's trend with a tolerance, in one process and in several.

What a program holds is counted exactly (malloc's blocks, Python's blocks, mappings); resident memory is not, because pages
stay once they were touched. So a program leaks if a counter of what it holds certainly grows above the tolerance, or if
resident memory certainly grows although nothing held does. It is clean if all counters of what it holds certainly stay below
the tolerance. For child processes only pages are known, so more growth is tolerated there, and only growth that continues is
a leak. A counter that was read too rarely to say anything leaves doubt, whichever counter it is: a program is never called
clean because something was not measured.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lowtide.base.units import KIB, format_bytes
from lowtide.probe.marks import MarkSource
from lowtide.studies.leak.series import series_of
from lowtide.studies.leak.trend import Series, Trend, trend
from lowtide.studies.leak.watch import Run

TOLERANCE: Final = 1 * KIB
"""Bytes per step that are tolerated by default."""
RISK: Final = 0.01
"""Probability of a false leak, over all counters and looks of one process."""
DOUBT: Final = 0.02
"""Probability of calling a counter clean that grows at the tolerance."""
LOOKS: Final = 2
"""Number of times a process is judged: half-way, and at its end."""
FAST: Final = 2.0
"""Half-way, a leak is clear only if growth is certainly above this multiple of the tolerance."""
SLOWING: Final = 0.6
"""Growth slows down if the rate of its last third is below this share of the whole rate."""
MOST: Final = 0.75
"""If a part makes up more than this share of the sum's growth, the growth is named after the part."""
RETAINED: Final = 4.0
"""Resident growth that nothing held explains is a leak above this multiple of the tolerance."""
RETAINED_EACH: Final = 2.0
"""For child processes, this multiple of the tolerance for each of them, if that is more: clean ones were seen to take 0.2 to
0.7 KiB a step."""
SETTLED_STEPS: Final = 150
"""Minimum steps for a leak that is only retained memory: free memory in an allocator grows in clean programs, too, for some
hundred steps."""
STARTING_SECONDS: Final = 0.25
"""About the time that an interpreter takes to start; it grows meanwhile. Short steps (0.2 ms) do not wait for that to end."""
_KEPT: Final = ("resident", "cuda_reserved")
"""Counters of what an allocator keeps, whether it is in use or not."""
_PAGED: Final = (*_KEPT, "workers")
"""Counters of pages, which stay once they were touched."""
_OTHERS: Final = ("file_pages", "segments")
"""Counters of what the program does not hold: pages that the kernel reclaims, and ``/dev/shm`` files of all programs."""


class Verdict(enum.Enum):
    """The answer for a program."""

    LEAK = "leak"
    CLEAN = "clean"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One counter's growth, and what follows from it.

    Attributes:
        name: ``held`` (heap, Python and maps together), ``heap``, ``python``, ``maps``, ``files``, ``file_pages``,
            ``shared``, ``segments``, ``workers``, ``cuda_allocated``, ``cuda_reserved``, ``resident``.
        trend: its growth.
        low, high: bounds on its rate, in bytes per step.
        verdict: the verdict on this counter alone.
    """

    name: str
    trend: Trend
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement on one process, or on several together.

    Attributes:
        verdict: leak, clean or inconclusive.
        counters: every counter that could be read.
        culprit: the counter that the verdict is about: the one that certainly grows most; for a clean program, ``held``.
        steps: number of steps seen.
        notes: sentences that the user should read.
        bounded: whether there was growth that has flattened or is flattening.
        more_steps: total number of steps that would give a clear answer; 0 if the verdict is clear, or if more steps would not
            help.
        disagree: whether the verdict is inconclusive because processes of the program, each of them clear, disagree.
    """

    verdict: Verdict
    counters: tuple[Counter, ...]
    culprit: Counter | None
    steps: int
    notes: tuple[str, ...]
    bounded: bool
    more_steps: int
    disagree: bool = False

    def counter(self, name: str) -> Counter | None:
        """The counter of this name; None if it could not be read."""
        return next((c for c in self.counters if c.name == name), None)




def judge(run: Run, tolerance: float, *, half: bool = False, collected_every: int = 0) -> Judgement:
    """Judge one process.

    Args:
        run: the process.
        tolerance: growth in bytes per step that is tolerated.
        half: whether the process is only half-way, so that a leak must be clear already.
        collected_every: steps after which its garbage in cycles was collected; 0 if that was left to Python.
    """
    series = series_of(run, collected_every=collected_every)
    least = {name: threshold_of(name, tolerance, run.children) for name in series}
    counters = tuple(_judged(name, values, tolerance, least[name], len(series)) for name, values in series.items())
    by = {c.name: c for c in counters}
    leaks = [c for c in counters if c.verdict is Verdict.LEAK and _counts(c, by, tolerance, least[c.name])]
    early = [c for c in leaks if c.name == "workers" and _starting(c, run)]
    leaks = [c for c in leaks if c not in early]
    held = [c for c in leaks if c.name not in _KEPT]
    retained = [c for c in leaks if c not in held]
    unclear = [c for c in counters if c.verdict is not Verdict.CLEAN and c not in leaks]
    doubtful = early + [c for c in unclear if _decides(c, by, tolerance, least[c.name])]
    notes, bounded = _notes(run, by, tolerance)
    culprit: Counter | None
    more = 0
    if held:
        culprit = max((c for c in held if c.name != "held" or len(held) == 1), key=lambda c: c.trend.rate)
        culprit = part_of(culprit, by)
        verdict = Verdict.LEAK
        if culprit.trend.late_rate < SLOWING * culprit.trend.rate:
            bounded = True
            notes.append(
                f"growth slows down: {_per(culprit.trend.late_rate)} in the last third, {_per(culprit.trend.rate)} overall"
            )
        if half and (culprit.low < FAST * tolerance or bounded):
            verdict = Verdict.INCONCLUSIVE
        if culprit.name == "workers":
            notes += _members(run)
    elif doubtful:
        culprit, verdict = max(doubtful, key=lambda c: c.high), Verdict.INCONCLUSIVE
        notes += _unseen(doubtful, by)
        if culprit in early:
            notes.append("child processes grow, but they may only be starting: more steps are needed to tell")
            more = _starting(culprit, run)
        if culprit.name == "segments":
            notes.append("files in /dev/shm grow, but all programs on this machine share them: test again when no other runs")
    elif retained:
        culprit, more = max(retained, key=lambda c: c.trend.rate), SETTLED_STEPS if run.steps < SETTLED_STEPS else 0
        verdict = Verdict.INCONCLUSIVE if more else Verdict.LEAK
        notes.append("nothing that the program holds grows: the allocator retains freed memory"
                     + (", as in the first steps of clean programs" if more else ""))
    else:
        culprit, verdict = by.get("held"), Verdict.CLEAN
    if verdict is Verdict.INCONCLUSIVE and not more and culprit is not None and culprit.name != "segments":
        risk = RISK / LOOKS / len(counters)
        more = culprit.trend.steps_to_tell(least[culprit.name], risk, DOUBT)
    return Judgement(
        verdict=verdict,
        counters=counters,
        culprit=culprit,
        steps=run.steps,
        notes=tuple(notes),
        bounded=bounded,
        more_steps=more,
    )


def threshold_of(name: str, tolerance: float, children: int) -> float:
    """Bytes per step above which a counter's growth is a leak, in a program with this number of child processes."""
    if name == "workers":
        return max(RETAINED, RETAINED_EACH * children) * tolerance
    return RETAINED * tolerance if name in _KEPT else tolerance


def _starting(counter: Counter, run: Run) -> int:
    """Total steps needed to tell growth of child processes from their start-up; 0 if they were watched for long enough."""
    times = run.column("time_ns")[counter.trend.start :] / 1e9
    share = STARTING_SECONDS / max(float(times[-1] - times[0]), 1e-6)
    steps = max(SETTLED_STEPS, math.ceil(run.steps * share) if share > 1 else 0)
    return steps if steps > run.steps else 0


def _members(run: Run) -> list[str]:
    """Notes on which child processes grow, and on how to see what they keep."""
    grown = {}
    if len(run.audits) > 1:
        then = {m["pid"]: m["bytes"] for m in run.audits[0]["children"]}
        grown = {f"{m['name']} {m['pid']}": m["bytes"] - then.get(m["pid"], 0) for m in run.audits[-1]["children"]}
    largest = sorted(((size, name) for name, size in grown.items() if size > 0), reverse=True)[:MEMBERS]
    told = ", ".join(f"{name} by {format_bytes(size)}" for size, name in largest)
    since = f" (from step {run.audits[0]['step']} on: {told})" if told else ""
    return [
        f"the growth is in child processes{since}",
        "their lines and types are not searched: have the main process do their work (num_workers=0 of a loader)",
    ]


MEMBERS: Final = 4
"""Number of child processes that are named: those that grew most."""


def _unseen(doubtful: Sequence[Counter], by: dict[str, Counter]) -> list[str]:
    """A note on counters that were read too rarely, unless there are too few steps for any counter."""
    names = [c.name for c in doubtful if not math.isfinite(c.trend.error)]
    if not names or "held" in names or "held" not in by:
        return []
    return [f"measured too rarely to say whether it grows: {', '.join(_NAMES.get(name, name) for name in names)}"]


_NAMES: Final = {
    "workers": "memory of child processes",
    "python": "small Python objects",
    "maps": "anonymous maps",
    "resident": "resident memory",
    "cuda_allocated": "CUDA memory in use",
    "cuda_reserved": "CUDA memory kept by torch",
}


def _judged(name: str, values: Series, tolerance: float, threshold: float, counters: int) -> Counter:
    found = trend(values, tolerance)
    limit = tolerance if name in _KEPT else threshold  # `_counts` compares the kept ones with their threshold
    low, _ = found.interval(RISK / LOOKS / counters)
    _, high = found.interval(DOUBT)
    verdict = Verdict.INCONCLUSIVE
    if low > limit and found.steady_rate > limit:
        verdict = Verdict.LEAK
    elif high < limit:
        verdict = Verdict.CLEAN
    return Counter(name=name, trend=found, low=low, high=high, verdict=verdict)


def part_of(culprit: Counter, by: dict[str, Counter]) -> Counter:
    """Rename the growth of the sum ``held`` after the part that makes up most of it, if there is one."""
    if culprit.name == "held":
        for name in ("heap", "python"):
            part = by.get(name)
            if part is not None and part.trend.rate > MOST * culprit.trend.rate:
                return replace(culprit, name=name)
    return culprit


_PAGES: Final = {"maps": "resident", "files": "file_pages"}
"""Counters of address space, and the counters of their pages: address space that is never touched takes no memory."""


def _counts(counter: Counter, by: dict[str, Counter], tolerance: float, threshold: float) -> bool:
    """Whether a counter's growth is a leak.

    Growth of address space must be confirmed by its pages. Growth of pages must exceed the threshold and must not slow down.
    """
    if counter.name in _PAGES:
        pages = by.get(_PAGES[counter.name])
        return pages is None or pages.trend.rate > max(tolerance / 2, counter.trend.rate / 4)
    if counter.name in _OTHERS:
        return False
    if counter.name in _PAGED:
        return counter.low > threshold and counter.trend.late_rate > SLOWING * counter.trend.rate
    return True


def _decides(counter: Counter, by: dict[str, Counter], tolerance: float, threshold: float) -> bool:
    """Whether doubt about a counter makes the verdict on the program doubtful."""
    if not math.isfinite(counter.trend.error) and counter.name not in _OTHERS:
        return True
    if counter.name in _PAGES:
        pages = by.get(_PAGES[counter.name])
        return pages is None or pages.trend.rate > tolerance
    if counter.name == "file_pages":
        return False
    if counter.name in _PAGED:
        return counter.trend.steady_rate > threshold
    if counter.name == "segments":
        return counter.verdict is Verdict.LEAK
    return True


def _notes(run: Run, by: dict[str, Counter], tolerance: float) -> tuple[list[str], bool]:
    """Further notes for the user (growth that ended, jumps, garbage in cycles, clocked steps), and whether growth ended."""
    notes, bounded = [], False
    held = by.get("held")
    if held is not None and held.verdict is Verdict.CLEAN and held.trend.before_bytes > tolerance * held.trend.steps / 2:
        bounded = True
        notes.append(
            f"bounded: grew by {format_bytes(held.trend.before_bytes)} until step {held.trend.start}, and not since"
        )
    for counter in by.values():
        if counter.name in ("held", "heap", "python") and counter.trend.jump_bytes > tolerance * counter.trend.steps / 4:
            notes.append(
                f"{counter.name} jumped once, by {format_bytes(counter.trend.jump_bytes)} near step {counter.trend.jump_step}"
            )
            break
    copies = _copies(run, tolerance)
    if copies:
        notes.append(
            f"child processes get copies of pages that they shared when they were forked, {_per(copies)} (copy on write): "
            "in total at most what it was forked with, per process"
        )
    cycles = max((a["cycles_bytes"] for a in run.audits[1:]), default=0)
    if cycles > CYCLES:
        notes.append(f"up to {format_bytes(cycles)} waited in reference cycles for the garbage collector")
    if run.kind is MarkSource.CLOCK:
        notes.append(
            "the script marks no steps, so a step is a tick of the clock: call lowtide.step() in its loop, or give --step-line"
        )
    return notes, bounded


def _copies(run: Run, tolerance: float) -> float:
    """Bytes per step of pages that child processes shared when they were forked and no longer share; 0 if that is little."""
    if len(run.audits) < 2:
        return 0.0
    then, now = ({m["pid"]: m["unique_bytes"] - m["bytes"] for m in a["children"]} for a in (run.audits[0], run.audits[-1]))
    steps = run.audits[-1]["step"] - run.audits[0]["step"]
    found = sum(size - then[pid] for pid, size in now.items() if pid in then) / steps
    return found if found > threshold_of("workers", tolerance, run.children) else 0.0


CYCLES: Final = 1024 * KIB
"""Bytes of garbage in cycles above which there is a note on it."""


def _per(rate: float) -> str:
    return f"{format_bytes(rate)} a step"


def together(judgements: Sequence[Judgement], full_steps: int) -> Judgement:
    """The joint judgement on several processes of one program: those watched to the end decide, and must agree."""
    whole = [j for j in judgements if j.steps >= full_steps] or list(judgements)
    clear = {j.verdict for j in whole if j.verdict is not Verdict.INCONCLUSIVE}
    best = max(whole, key=lambda j: (j.verdict is not Verdict.INCONCLUSIVE, j.steps))
    if len(clear) == 1:
        return best
    if not clear:
        return best
    return Judgement(
        verdict=Verdict.INCONCLUSIVE,
        counters=best.counters,
        culprit=best.culprit,
        steps=best.steps,
        notes=best.notes,
        bounded=best.bounded,
        more_steps=2 * best.steps,
        disagree=True,
    )
