"""Whether a program leaks: each counter's trend against a tolerance, in one process, and in several together.

What a program holds is counted exactly (malloc's blocks, Python's, maps); what is resident is not, because pages that
were taken once stay. So a leak is a counter of what is held whose growth is above the tolerance for certain, or resident
memory that grows for certain although nothing held does; clean is when all counters of what is held stay below for certain.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lowtide.leak.trend import Series, Trend, like_sized, trend
from lowtide.leak.watch import Run
from lowtide.probe.marks import Kind
from lowtide.units import KIB, format_bytes

TOLERANCE: Final = 1 * KIB
"""Bytes per step that are let pass where nothing else is asked."""
RISK: Final = 0.01
"""Of a false leak, over all counters and looks of one process."""
DOUBT: Final = 0.02
"""Of calling a counter clean that grows at the tolerance."""
LOOKS: Final = 2
"""A process is judged half-way, and at its end."""
FAST: Final = 2.0
"""Half-way, a leak is clear only at so many times the tolerance."""
SLOWING: Final = 0.6
"""Growth whose last third is below this share of the whole slows down."""
MOST: Final = 0.75
"""A part that grows by this share of the sum is what the sum grows by."""
RETAINED: Final = 4.0
"""Resident growth that nothing held explains is a leak from so many times the tolerance on."""
SETTLED_STEPS: Final = 150
"""What an allocator holds free grows in clean programs, too, for some hundred steps: it is no leak in a shorter run."""
_KEPT: Final = ("resident", "cuda_reserved")
"""Counters of what an allocator keeps, whether it is held or not."""


class Verdict(enum.Enum):
    """What is known of a program."""

    LEAK = "leak"
    CLEAN = "clean"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """One counter's growth, and what follows from it.

    Attributes:
        name: ``held`` (heap, Python and maps together), ``heap``, ``python``, ``maps``, ``files``, ``file_pages``,
            ``shared``, ``segments``, ``workers``, ``cuda_allocated``, ``cuda_reserved``, ``resident``.
        low, high: bounds of bytes per step.
        verdict: by itself.
    """

    name: str
    trend: Trend
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one process, or several together, say.

    Attributes:
        verdict: leak, clean or inconclusive.
        counters: every counter that could be read.
        culprit: the counter that the verdict is about: the one that grows most for certain; of a clean program, what it holds.
        steps: steps seen.
        notes: sentences a user should read.
        bounded: whether growth was seen that has flattened, or is flattening.
        more_steps: how many steps in all would tell; 0 where the verdict is clear, or where more would not help.
        disagree: whether it is open because processes of the program, each clear by itself, disagree.
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
        """A counter by name."""
        return next((c for c in self.counters if c.name == name), None)


def series_of(run: Run, *, collected_every: int = 0) -> dict[str, Series]:
    """The counters that are judged, bytes per step of a process; those that it does not have are left out.

    Args:
        run: the process.
        collected_every: steps after which garbage in cycles was collected: what is held is not looked at between.
    """
    heap = like_sized(run.column("heap_bytes"), run.column("peak_bytes"))
    if not np.isfinite(heap).any():
        heap = run.column("used_bytes")
    python = _filled(run.column("python_bytes"))
    if not np.isfinite(python).any():
        python = run.column("python_blocks") * _BLOCK
    maps = run.column("private_bytes") - run.column("system_bytes") - _filled(run.column("arena_bytes"))
    shared = run.column("shared_bytes")
    virtual = run.column("virtual_bytes") - run.column("private_bytes") - np.nan_to_num(_filled(shared))
    held = heap + np.nan_to_num(python)
    found = {
        "held": held,
        "heap": heap,
        "python": python,
        "maps": maps,
        "files": virtual,
        "file_pages": run.column("file_bytes"),
        "shared": shared,
        "segments": run.column("segments_bytes"),
        "workers": _workers(run),
        "cuda_allocated": run.column("cuda_allocated_bytes"),
        "cuda_reserved": run.column("cuda_reserved_bytes"),
        "resident": run.column("anonymous_bytes") + shared,
    }
    known = {name: values for name, values in found.items() if np.isfinite(values).sum() > 2}
    if collected_every > 1:
        for values in (held, heap, python):
            values[np.arange(1, len(values) + 1) % collected_every != 0] = np.nan
    return known


def garbage_rate(run: Run) -> float:
    """Bytes per step of garbage in reference cycles, as the audits after the first found it waiting; 0 without audits."""
    audits = run.audits
    steps = audits[-1]["step"] - audits[0]["step"] if len(audits) > 1 else 0
    return sum(a["cycles_bytes"] for a in audits[1:]) / steps if steps else 0.0


WORKERS_DOUBT: Final = 4.0
"""Child processes that grew by so many times what is let pass, in the later of too few looks at them, are a doubt."""
_BLOCK: Final = 64
"""Bytes of a block of Python's small-object allocator where CPython does not tell."""


def _filled(values: Series) -> Series:
    """Between two readings, on the line between them; before the first and after the last, as these."""
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2:
        return values
    return np.interp(np.arange(len(values)), known, values[known])


def _workers(run: Run) -> Series:
    """Unique bytes of all child processes, at the step after each look."""
    values = np.full(run.steps, np.nan)
    if not len(run.children) or not run.children[:, 1].any():
        return values
    times = run.column("time_ns") / 1e9
    at = np.searchsorted(times, run.children[:, 0])
    inside = (at > 0) & (at < run.steps)
    values[at[inside]] = run.children[inside, 1]
    return values


def judge(run: Run, tolerance: float, *, half: bool = False, collected_every: int = 0) -> Judgement:
    """What one process says.

    Args:
        run: the process.
        tolerance: bytes per step that are let pass.
        half: whether the process goes on, so that only what is clear already counts.
        collected_every: steps after which its garbage in cycles was collected; 0 where that was left to Python.
    """
    series = series_of(run, collected_every=collected_every)
    counters = tuple(_judged(name, values, tolerance, len(series)) for name, values in series.items())
    by = {c.name: c for c in counters}
    grown = _late_growth(series["workers"]) if "workers" in series else 0.0
    leaks = [c for c in counters if c.verdict is Verdict.LEAK and _counts(c, by, tolerance)]
    held = [c for c in leaks if c.name not in _KEPT]
    retained = [c for c in leaks if c not in held]
    doubtful = [c for c in counters if c.verdict is not Verdict.CLEAN and c not in leaks and _decides(c, by, tolerance, grown)]
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
                f"growth slows down: {_per(culprit.trend.late_rate)} in the last third, {_per(culprit.trend.rate)} over all"
            )
        if half and (culprit.low < FAST * tolerance or bounded):
            verdict = Verdict.INCONCLUSIVE
    elif doubtful:
        culprit, verdict = max(doubtful, key=lambda c: c.high), Verdict.INCONCLUSIVE
        if culprit.name == "segments":
            notes.append("files in /dev/shm grow, but they are of all programs on this machine: look when no other runs")
    elif retained:
        culprit, more = max(retained, key=lambda c: c.trend.rate), max(0, SETTLED_STEPS - run.steps)
        verdict = Verdict.INCONCLUSIVE if more else Verdict.LEAK
        notes.append("nothing that the program holds grows: what it frees is not given back (retention by the allocator)"
                     + (", as in the first steps of clean programs" if more else ""))
    else:
        culprit, verdict = by.get("held"), Verdict.CLEAN
    if verdict is Verdict.INCONCLUSIVE and not more and culprit is not None and culprit.name != "segments":
        risk = RISK / LOOKS / len(counters)
        more = culprit.trend.steps_to_tell(threshold_of(culprit.name, tolerance), risk, DOUBT)
    return Judgement(
        verdict=verdict,
        counters=counters,
        culprit=culprit,
        steps=run.steps,
        notes=tuple(notes),
        bounded=bounded,
        more_steps=more,
    )


def threshold_of(name: str, tolerance: float) -> float:
    """Bytes per step from which on a counter's growth is a leak."""
    return RETAINED * tolerance if name in _KEPT else tolerance


def _judged(name: str, values: Series, tolerance: float, counters: int) -> Counter:
    found = trend(values, tolerance)
    low, _ = found.interval(RISK / LOOKS / counters)
    _, high = found.interval(DOUBT)
    verdict = Verdict.INCONCLUSIVE
    if low > tolerance and found.steady_rate > tolerance:
        verdict = Verdict.LEAK
    elif high < tolerance:
        verdict = Verdict.CLEAN
    return Counter(name=name, trend=found, low=low, high=high, verdict=verdict)


def part_of(culprit: Counter, by: dict[str, Counter]) -> Counter:
    """Where the sum alone grows for certain: that growth, by the name of the part that makes up most of it."""
    if culprit.name == "held":
        for name in ("heap", "python"):
            part = by.get(name)
            if part is not None and part.trend.rate > MOST * culprit.trend.rate:
                return replace(culprit, name=name)
    return culprit


_PAGES: Final = {"maps": "resident", "files": "file_pages"}
"""Address space, and the counter of its pages: what is never touched takes no memory."""


def _counts(counter: Counter, by: dict[str, Counter], tolerance: float) -> bool:
    """Whether a counter's growth is a leak: address space and pages need what bears them out."""
    if counter.name in _PAGES:
        pages = by.get(_PAGES[counter.name])
        return pages is None or pages.trend.rate > max(tolerance / 2, counter.trend.rate / 4)
    if counter.name in ("file_pages", "segments"):  # the kernel takes the ones back; the others are of all programs
        return False
    if counter.name in _KEPT:
        return counter.low > threshold_of(counter.name, tolerance) and counter.trend.late_rate > SLOWING * counter.trend.rate
    return True


def _decides(counter: Counter, by: dict[str, Counter], tolerance: float, grown: float) -> bool:
    """Whether doubt about a counter is doubt about the program."""
    if counter.name in _PAGES:
        pages = by.get(_PAGES[counter.name])
        return pages is None or pages.trend.rate > tolerance
    if counter.name == "file_pages":
        return False
    if counter.name in _KEPT:
        return counter.trend.steady_rate > threshold_of(counter.name, tolerance)
    if counter.name == "segments":
        return counter.verdict is Verdict.LEAK
    if counter.name == "workers":
        return counter.trend.steady_rate > tolerance or grown > WORKERS_DOUBT * tolerance
    return True


def _late_growth(values: Series) -> float:
    """Bytes per step that child processes grew by in the later half of the looks at them; 0 where it was not all upwards."""
    known = np.flatnonzero(np.isfinite(values))
    late = known[len(known) // 2 :]
    if len(late) < 2 or (np.diff(values[late]) < 0).any():
        return 0.0
    return float(values[late[-1]] - values[late[0]]) / int(late[-1] - late[0])


def _notes(run: Run, by: dict[str, Counter], tolerance: float) -> tuple[list[str], bool]:
    """What else a user should know: bounds reached, jumps, garbage in cycles, clocked steps."""
    notes, bounded = [], False
    if len(run.children) and run.children[:, 1].any() and "workers" not in by:
        notes.append("child processes were looked at too few times to say whether they grow: give more --steps")
    held = by.get("held")
    if held is not None and held.verdict is Verdict.CLEAN and held.trend.before_bytes > tolerance * held.trend.steps / 2:
        bounded = True
        notes.append(
            f"bounded: grew by {format_bytes(held.trend.before_bytes)} until step {held.trend.start}, and no more since"
        )
    for counter in by.values():
        if counter.name in ("held", "heap", "python") and counter.trend.jump_bytes > tolerance * counter.trend.steps / 4:
            notes.append(
                f"{counter.name} jumped once, by {format_bytes(counter.trend.jump_bytes)} near step {counter.trend.jump_step}"
            )
            break
    cycles = max((a["cycles_bytes"] for a in run.audits[1:]), default=0)
    if cycles > CYCLES:
        notes.append(f"up to {format_bytes(cycles)} waited in reference cycles for the garbage collector")
    if run.kind is Kind.CLOCK:
        notes.append(
            "the script marks no steps, so a step is a tick of the clock: call lowtide.step() in its loop, or give --step-line"
        )
    return notes, bounded


CYCLES: Final = 1024 * KIB
"""Garbage in cycles that is worth a note."""


def _per(rate: float) -> str:
    return f"{format_bytes(rate)} a step"


def together(judgements: Sequence[Judgement], full_steps: int) -> Judgement:
    """What several processes of one program say: those that were watched to the end decide, and must agree."""
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
