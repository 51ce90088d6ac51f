"""The findings of a leak study as one frozen value, which every report renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lowtide.studies.leak.ablate import Ablation
from lowtide.studies.leak.books import Books, close
from lowtide.studies.leak.series import series_of
from lowtide.studies.leak.study import Study
from lowtide.studies.leak.trend import finite
from lowtide.studies.leak.watch import Run

SUSPECTS: Final = 12
"""Maximum number of suspects reported."""
LEAST: Final = 0.03
"""Suspects below this share of the growth, or of the largest suspect, are not reported."""
MEANING: Final = {
    "held": "held memory",
    "heap": "malloc's blocks in use: native memory, or large buffers that Python objects own",
    "python": "small Python objects",
    "maps": "anonymous maps outside malloc and Python",
    "files": "mapped files",
    "file_pages": "pages of mapped files, which the kernel can reclaim",
    "shared": "shared memory of the process",
    "segments": "files in /dev/shm",
    "workers": "child processes",
    "cuda_allocated": "CUDA memory in use",
    "cuda_reserved": "CUDA memory kept by torch's allocator",
    "resident": "pages kept resident: nothing held grows",
}
SINGULAR: Final = ("held", "shared", "cuda_allocated", "cuda_reserved")
"""Counters whose text in :data:`MEANING` is singular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Distribution of resident memory's growth from step to step, in bytes per step, over all steps but the first."""

    minimum: float
    q1: float
    median: float
    q3: float
    maximum: float

    def to_json(self) -> dict[str, float]:
        """The figures as JSON."""
        return {"min": self.minimum, "q1": self.q1, "median": self.median, "q3": self.q3, "max": self.maximum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Something that grows with the steps.

    Attributes:
        kind: ``tensor``, ``graph``, ``line``, ``container``, ``type`` or ``native``.
        name: what it is.
        source: the user's source line, if known; else empty.
        holder: a path to it from a name, if one was found; else empty.
        bytes_per_step: growth in bytes per step; None if objects were only counted.
        count_per_step: growth in objects, nodes or allocations per step.
    """

    kind: str
    name: str
    source: str
    holder: str
    bytes_per_step: float | None
    count_per_step: float


def spread_of(run: Run) -> Spread | None:
    """Growth of resident memory between readings, per step; None if there are too few readings."""
    resident = run.column("resident_bytes")
    at = np.flatnonzero(np.isfinite(resident))
    at = at[at >= 1]
    if len(at) < 2:
        return None
    changes = np.diff(resident[at]) / np.diff(at)
    found = [float(x) for x in np.quantile(changes, (0, 0.25, 0.5, 0.75, 1))]
    return Spread(minimum=found[0], q1=found[1], median=found[2], q3=found[3], maximum=found[4])


def suspects_of(run: Run, rate: float = 0.0) -> tuple[Suspect, ...]:
    """The suspects that a process's census found, the heaviest first.

    Args:
        run: a process with a census.
        rate: the growth to be explained, in bytes per step; suspects that are a small share of it are left out.
    """
    found: list[Suspect] = []
    for census in run.census:
        steps = census["steps"]
        found += [
            _weighed("tensor", t, steps, name=f"{t['name']}{' of ' + t['module'] if t['module'] else ''}")
            for t in census["tensors"]
        ]
        if census["graph"]:
            found.append(
                Suspect(
                    kind="graph",
                    name="nodes of a growing autograd graph",
                    source="",
                    holder=census["graph"]["holder"],
                    bytes_per_step=None,
                    count_per_step=census["graph"]["nodes"] / steps,
                )
            )
        found += [
            _weighed("line", x, steps, name=f"in {short(x['inside'])}" if x["inside"] else "allocations")
            for x in census["lines"]
        ]
        found += [_counted("container", c, steps) for c in census["containers"]]
        found += [_counted("type", t, steps) for t in census["types"]]
        found += [
            Suspect(
                kind="native",
                name=" < ".join(n["frames"][:4]),
                source=short(n["source"]),
                holder="",
                bytes_per_step=n["bytes"] / steps,
                count_per_step=n["count"] / steps,
            )
            for n in run.native
        ]
    least = LEAST * max([rate, *(s.bytes_per_step or 0.0 for s in found)])
    found = [s for s in found if s.bytes_per_step is None or s.bytes_per_step >= least]
    order = {"graph": 0, "tensor": 0, "line": 0, "native": 0, "container": 1, "type": 2}
    found.sort(key=lambda s: (order[s.kind], s.kind != "graph", -(s.bytes_per_step or 0), -s.count_per_step))
    chosen: list[Suspect] = []
    for rank, most in ((0, SUSPECTS // 2), (1, SUSPECTS // 4), (2, SUSPECTS // 4)):
        chosen += [s for s in found if order[s.kind] == rank][:most]
    return tuple(chosen)


def _weighed(kind: str, entry: dict[str, Any], steps: int, *, name: str) -> Suspect:
    return Suspect(
        kind=kind,
        name=name,
        source=short(entry["source"]),
        holder="",
        bytes_per_step=entry["bytes"] / steps,
        count_per_step=entry["count"] / steps,
    )


def _counted(kind: str, entry: dict[str, Any], steps: int) -> Suspect:
    return Suspect(
        kind=kind,
        name=entry["name"].removeprefix("builtins."),
        source="",
        holder=entry.get("holder", ""),
        bytes_per_step=None,
        count_per_step=entry["count"] / steps,
    )


def short(place: str) -> str:
    """A file and its line: relative to ``site-packages`` or to the working directory if it lies there, else its name only."""
    name, _, line = place.rpartition(":")
    path = Path(name)
    parts = path.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :]) + f":{line}"
    if path.is_relative_to(Path.cwd()):
        return f"{path.relative_to(Path.cwd())}:{line}"
    return f"{path.name}:{line}" if name else place


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakFindings:
    """The findings of a leak study of one program.

    Attributes:
        command: the program and its arguments.
        study: its processes, and their joint verdict.
        suspects: what grows with the steps; empty if no census was taken.
        ablation: which part grows, by experiment; None if no ablation was run.
        samples_per_step: number of samples in a step, for the throughput.
        books: where resident memory grew in the process that was watched longest; None if it has fewer than two audits.
        spread: growth of resident memory from step to step in that process; None if it has too few readings.
        curves: for each process, its counters step by step.
    """

    command: tuple[str, ...]
    study: Study
    suspects: tuple[Suspect, ...]
    ablation: Ablation | None
    samples_per_step: float
    books: Books | None
    spread: Spread | None
    curves: tuple[Mapping[str, NDArray[np.float64]], ...]

    @property
    def samples_per_second(self) -> float | None:
        """Median throughput of the process that was watched longest; None if its steps were not timed."""
        seconds = self.study.run.step_seconds
        return self.samples_per_step / seconds if seconds else None


def explain_study(
    command: Sequence[str], study: Study, suspects: tuple[Suspect, ...] = (), ablation: Ablation | None = None, *,
    samples_per_step: float = 1.0,
) -> LeakFindings:
    """Derive the findings of a study; see :class:`LeakFindings`."""
    return LeakFindings(
        command=tuple(command), study=study, suspects=suspects, ablation=ablation, samples_per_step=samples_per_step,
        books=close(study.run), spread=spread_of(study.run), curves=tuple(series_of(run) for run in study.runs),
    )


def to_json(found: LeakFindings) -> dict[str, Any]:
    """Every figure of a study as JSON, in bytes and seconds."""
    study, books, spread = found.study, found.books, found.spread
    verdict, run = study.verdict, study.run
    culprit = verdict.culprit
    return {
        "command": list(found.command),
        "verdict": verdict.verdict.value,
        "kind": None if culprit is None else culprit.name,
        "bytes_per_step": None if culprit is None else culprit.trend.rate,
        "interval_bytes": None if culprit is None else [finite(culprit.low), finite(culprit.high)],
        "tolerance_bytes": study.tolerance_bytes,
        "bounded": verdict.bounded,
        "notes": list(verdict.notes),
        "more_steps": verdict.more_steps,
        "disagree": verdict.disagree,
        "steps": run.steps,
        "steps_marked_by": None if run.kind is None else run.kind.name.lower(),
        "change_bytes": None if spread is None else spread.to_json(),
        "step_seconds": run.step_seconds,
        "samples_per_second": found.samples_per_second,
        "by_kind": None
        if books is None
        else {
            **books.buckets,
            "residual": books.residual_bytes,
            "resident_bytes": books.resident_bytes,
            "first_step": books.first,
            "last_step": books.last,
            "trimmed_bytes": books.trimmed_bytes,
        },
        "counters": {
            c.name: {
                "verdict": c.verdict.value,
                "bytes_per_step": c.trend.rate,
                "interval_bytes": [finite(c.low), finite(c.high)],
                "from_step": c.trend.start,
                "jump_bytes": c.trend.jump_bytes,
            }
            for c in verdict.counters
        },
        "suspects": [
            {
                "kind": s.kind,
                "name": s.name,
                "source": s.source,
                "holder": s.holder,
                "bytes_per_step": s.bytes_per_step,
                "count_per_step": s.count_per_step,
            }
            for s in found.suspects
        ],
        "processes": [
            {
                "steps": r.steps,
                "exit": r.code,
                "ended": r.ended,
                "seconds": r.seconds,
                "verdict": j.verdict.value if j is not None else None,
            }
            for r, j in zip(study.runs, [*study.judgements, *[None] * (len(study.runs) - len(study.judgements))], strict=True)
        ],
        "ablation": None if found.ablation is None else found.ablation.to_json(),
    }
