"""Reports of a leak study: in the terminal, and as one HTML page."""

from __future__ import annotations

import itertools
import shlex
from typing import Any, Final

import numpy as np
from rich.markup import escape
from rich.table import Table

from lowtide.base.units import format_bytes, format_seconds
from lowtide.probe.marks import MarkSource
from lowtide.report.pages import render
from lowtide.report.terminal import console
from lowtide.studies.leak.ablate import Ablation
from lowtide.studies.leak.findings import MEANING, SINGULAR, LeakFindings
from lowtide.studies.leak.study import Study
from lowtide.studies.leak.verdict import Verdict, threshold_of
from lowtide.studies.leak.watch import Run

_COLOUR: Final = {Verdict.LEAK: "red", Verdict.CLEAN: "green", Verdict.INCONCLUSIVE: "yellow"}
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_WIDTH: Final = 40
"""Width of a curve in characters."""
BUCKETS: Final = {
    "python": "Python's arenas",
    "heap_in_use": "heap in use",
    "heap_free": "free heap",
    "anonymous_maps": "anonymous maps",
    "files": "files",
    "shared": "shared memory",
    "stacks": "stacks",
}


def _longer(run: Run, steps: int) -> str:
    """Advice on how to get more steps out of a process."""
    if run.ended != "itself":
        return f"use --steps {steps}"
    what = f"the program ended by itself after {run.steps}"
    return f"{what}: let it run longer{', or shorten a tick (--every)' if run.kind is MarkSource.CLOCK else ''}"


def sentence(study: Study) -> str:
    """The verdict in one sentence that agrees with the figures."""
    verdict, culprit = study.verdict, study.verdict.culprit
    limit = f"{format_bytes(study.tolerance_bytes)} a step"
    if culprit is None:
        return "inconclusive: no step was seen"
    low, high = (
        format_bytes(culprit.low) if np.isfinite(culprit.low) else "-",
        format_bytes(culprit.high) if np.isfinite(culprit.high) else "-",
    )
    what = MEANING[culprit.name].partition(":")[0]
    grows = "grows" if culprit.name in SINGULAR else "grow"
    rate = f"{format_bytes(culprit.trend.rate)} a step ({low} to {high})"
    if verdict.verdict is Verdict.LEAK:
        return f"leak: {what} {grows} by {rate}, above the tolerance of {limit}"
    if verdict.verdict is Verdict.CLEAN:
        return f"clean: {what} {grows} by {rate}, below the tolerance of {limit}"
    if not np.isfinite(culprit.low):
        return f"inconclusive: {verdict.steps} steps are too few to tell; {_longer(study.run, verdict.more_steps)}"
    threshold = threshold_of(culprit.name, study.tolerance_bytes, study.run.children)
    least = limit if threshold == study.tolerance_bytes else f"{format_bytes(threshold)} a step, which would be a leak,"
    if verdict.disagree:
        why = "but the processes disagree"
    elif culprit.name == "segments":
        why = "but all programs on this machine share them"
    elif culprit.low <= threshold:
        why = f"and {least} lies within that range"
    elif culprit.verdict is Verdict.LEAK and culprit.name in ("maps", "files"):
        why = "but this is address space, most of which is not touched"
    else:
        why = f"above {least.rstrip(',')}, but not steadily"
    if not verdict.more_steps:
        return f"inconclusive: {what} {grows} by {rate}, {why}"
    enough = f"about {verdict.more_steps} steps would tell; {_longer(study.run, verdict.more_steps)}"
    return f"inconclusive: {what} {grows} by {rate}, {why}; {enough}"


def show(found: LeakFindings) -> None:
    """Print the summary of a study."""
    study, books, spread, suspects = found.study, found.books, found.spread, found.suspects
    out, verdict, run = console(), study.verdict, study.run
    head, _, rest = sentence(study).partition(":")
    out.print(f"[bold {_COLOUR[verdict.verdict]}]{head}[/]:{rest}")
    for note in verdict.notes:
        out.print(f"  {note}")
    series = found.curves[study.runs.index(run)]
    held, resident = series.get("held"), series.get("resident")
    for name, values in (("held", held), ("resident", resident)):
        if values is not None:
            known = values[np.isfinite(values)]
            out.print(f"  {name:9s} {_curve(values)} {format_bytes(known[0])} to {format_bytes(known[-1])}")
    if spread is not None:
        out.print(f"growth of resident memory per step, KiB ({run.steps} steps)")
        table = Table()
        for column in ("min", "Q1", "median", "Q3", "max", "steps/s" if found.samples_per_step == 1 else "samples/s"):
            table.add_column(column, justify="right")
        kib = [f"{x / 1024:,.1f}" for x in (spread.minimum, spread.q1, spread.median, spread.q3, spread.maximum)]
        table.add_row(*kib, "-" if found.samples_per_second is None else f"{found.samples_per_second:,.1f}")
        out.print(table)
    if books is not None:
        out.print(f"where resident memory grew, steps {books.first} to {books.last}")
        table = Table()
        table.add_column("")
        table.add_column("growth", justify="right")
        table.add_column("per step", justify="right")
        steps = books.last - books.first
        for name, size in books.buckets.items():
            if size or name == "heap_in_use":
                table.add_row(BUCKETS[name], format_bytes(size), format_bytes(size / steps))
        table.add_row(
            "unexplained", format_bytes(books.residual_bytes), format_bytes(books.residual_bytes / steps), style="dim"
        )
        table.add_row("resident", format_bytes(books.resident_bytes), format_bytes(books.resident_bytes / steps), style="bold")
        out.print(table)
        if books.trimmed_bytes > books.resident_bytes / 4 and books.buckets["heap_free"] > books.buckets["heap_in_use"]:
            out.print(f"  malloc_trim(0) returned {format_bytes(books.trimmed_bytes)} at the end")
    if suspects:
        out.print("what grows with the steps")
        table = Table()
        for column in ("kind", "what", "line", "held by"):
            table.add_column(column, overflow="fold")
        table.add_column("bytes/step", justify="right")
        table.add_column("count/step", justify="right")
        for s in suspects:
            weight = "" if s.bytes_per_step is None else format_bytes(s.bytes_per_step)
            table.add_row(s.kind, escape(s.name), escape(s.source), escape(s.holder), weight, f"{s.count_per_step:.1f}")
        out.print(table)

    if found.ablation is not None:
        _show_parts(found.ablation)


def _show_parts(parts: Ablation) -> None:
    """Print what an ablation found, component by component."""
    out = console()
    what = "" if parts.counter == "held" else f" on {MEANING[parts.counter].partition(':')[0]}"
    out.print(f"[bold]by experiment{what}[/]: {escape(parts.text)}")
    table = Table()
    table.add_column("component")
    for column in ("added per step", "at least", "at most"):
        table.add_column(column, justify="right")
    for c in parts.contrasts:
        style = "bold red" if c.component == parts.culprit else ""
        bounds = [format_bytes(x) if np.isfinite(x) else "-" for x in (c.low, c.high)]
        table.add_row(escape(c.component), format_bytes(c.change), *bounds, style=style)
    out.print(table)


def _curve(values: Any) -> str:
    known = np.flatnonzero(np.isfinite(values))
    edges = np.linspace(0, len(values), _WIDTH + 1).astype(int)
    low, high = float(values[known].min()), float(values[known].max())
    text, last = "", _BLOCKS[1]
    for a, b in itertools.pairwise(edges):
        part = values[a:b][np.isfinite(values[a:b])]
        if len(part):
            last = _BLOCKS[1 + round((float(part.max()) - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 2))]
        text += last
    return text


def page(found: LeakFindings) -> str:
    """The HTML page: curves of every process, the table of growth, the accounts of resident memory, the suspects."""
    study, parts = found.study, found.ablation
    processes = [
        {
            name: [None if not np.isfinite(v) else int(v) for v in curves[name]] if name in curves else None
            for name in ("held", "heap", "python", "resident")
        }
        for curves in found.curves
    ]
    culprit = study.verdict.culprit
    data = {
        "processes": processes,
        "tolerance": study.tolerance_bytes,
        "start": 0 if culprit is None else culprit.trend.start,
        "rate": 0 if culprit is None else culprit.trend.rate,
    }
    if parts is not None:
        data["arms"] = [
            {"name": arm.name, "curve": [None if not np.isfinite(v) else int(v) for v in arm.curve]} for arm in parts.arms
        ]
    run = study.run
    return render(
        "leak",
        data,
        study=study,
        verdict=study.verdict,
        colour=_COLOUR[study.verdict.verdict],
        sentence=sentence(study),
        command=shlex.join(found.command),
        suspects=found.suspects,
        parts=parts,
        books=found.books,
        names=BUCKETS,
        spread=found.spread,
        run=run,
        counters=study.verdict.counters,
        meaning=MEANING,
        rate=found.samples_per_second,
        seconds=format_seconds(run.step_seconds),
    )
