"""Reports of a recording and of a difference between two: in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowtide.base.trace import Phase
from lowtide.base.units import KIB, MIB, format_bytes, format_seconds
from lowtide.recording.explanation.difference import ByteChange, Difference
from lowtide.recording.explanation.explanation import Explanation, ProcessMemory
from lowtide.recording.file_format import PhaseFigures, ProcessRow, StepRow
from lowtide.recording.peak_report import PeakReport
from lowtide.report.terminal import console

COLOURS: Final = {
    "parameter": "#4e79a7", "buffer": "#76b7b2", "gradient": "#f28e2b", "optimizer_state": "#59a14f", "input": "#9c755f",
    "activation": "#e15759", "output": "#ff9da7", "temporary": "#edc948", "workspace": "#b07aa1", "cache": "#bab0ac",
    "unknown": "#7f7f7f",
}
"""One colour per role, the same in every picture."""
_BAR: Final = 64
_STEPS_SHOWN: Final = 4
_LOG_ROWS: Final = 24
_STEP_WIDTH: Final = 34
"""Width, in terminal columns, of a step's number, peak and time."""
_PHASE_WIDTH: Final = 16
"""Maximum width, in terminal columns, of a phase's end and highest point."""
_MOMENT_SECONDS: Final = 1e-3
_ORDER: Final = ("zero_grad", "forward", "loss", "backward", "optimizer", "evaluation", "data")


def to_json(found: Explanation) -> dict[str, Any]:
    """The JSON that ``lowtide report --json`` writes."""
    return {
        "meta": dict(found.meta),
        "steps": [_step_json(row) for row in found.rows],
        "setup": None if found.setup is None else _step_json(found.setup),
        "peak": None if found.peak is None else found.peak.to_json(),
        "ended": None if found.ended is None else found.ended.to_json(),
        "findings": [f.to_json() for f in found.findings],
        "process": [asdict(row) for row in found.recording.process],
    }


def _step_json(row: StepRow) -> dict[str, Any]:
    return {
        "index": row.step, "seconds": row.seconds, "peak_bytes": row.peak_bytes, "complete": row.complete,
        "phases": [
            {"name": p.name, "seconds": p.seconds, "start_bytes": p.start_bytes, "end_bytes": p.end_bytes,
             "peak_bytes": p.peak_bytes, "high_water_bytes": p.high_water_bytes, "outside_bytes": p.outside_bytes}
            for p in row.phases
        ],
    }


def _is_idle(phase: PhaseFigures) -> bool:
    """Whether a data phase is only the moment between two others: shorter than 1 ms, and without a peak of its own."""
    flat = phase.peak_bytes <= max(phase.start_bytes, phase.end_bytes)
    return phase.name == Phase.DATA and phase.seconds < _MOMENT_SECONDS and flat


def show_recording(found: Explanation, out: Console | None = None) -> None:
    """Print the summary of ``lowtide record`` and ``lowtide report``."""
    out = out or console()
    if found.rows:
        out.print(_phase_table(found.rows, out.width))
    elif found.process is None or found.meta.get("torch"):
        out.print("lowtide: no training step was seen" + ("" if found.setup is None else
                  f"; the script peaked at {format_bytes(found.setup.peak_bytes)}"))
    if found.outside is not None:
        out.print(
            f"[dim]outside torch's allocator (Python, autograd's graph, LAPACK, MKL): highest "
            f"{format_bytes(found.outside.highest_bytes)} in {found.outside.phase} of step {found.outside.step}, "
            f"{format_bytes(found.outside.rise_bytes)} above the lowest phase[/]"
        )
    if found.process is not None:
        out.print(_process_line(found.process) if found.rows else _process_table(found.process, found.meta.get("guard")))
    if found.peak is not None:
        out.print(_peak_block(found, found.peak))
    if found.ended is not None:
        out.print(_ended_block(found.ended))
    if stopped := found.meta.get("stopped"):
        out.print(f"lowtide: the recording stopped before the script did: {stopped}", markup=False)
    if error := found.meta.get("error"):
        out.print(Text.assemble("the script ended with ", (" ".join(str(error).split()), "bold")))
    if found.findings:
        out.print(_findings_block(found))
    if found.meta.get("level") == "phases":
        out.print("[dim]recorded at --level phases: record at --level ops to see what the bytes are[/]")


def _phase_table(steps: Sequence[StepRow], width: int) -> Table:
    """The first steps and the highest one; in a narrow terminal, only the highest point of each phase."""
    shown = steps if len(steps) <= _STEPS_SHOWN else [*steps[: _STEPS_SHOWN - 1], max(steps, key=lambda s: s.peak_bytes)]
    present = {p.name for row in shown for p in row.phases if not _is_idle(p)}
    names = [n for n in _ORDER if n in present]
    rows = dict.fromkeys(row.step for row in shown)
    both = width >= _STEP_WIDTH + _PHASE_WIDTH * len(names)
    what = "end of phase / highest in phase" if both else "highest in phase"
    of_all = f", {len(rows)} of {len(steps)} steps: the first and the highest" if len(rows) < len(steps) else ""
    small = max((row.peak_bytes for row in shown), default=0) < MIB
    factor, unit = (KIB, "KiB") if small else (MIB, "MiB")
    table = Table(title=f"phases: {what} ({unit}){of_all}", title_justify="left", header_style="bold", box=SIMPLE_HEAD,
                  pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right")
    table.add_column("peak", justify="right", style="bold")
    table.add_column("time", justify="right", no_wrap=True)
    for row in rows:
        figures = next(r for r in shown if r.step == row)
        cells = []
        for name in names:
            of_name = [p for p in figures.phases if p.name == name]
            end, highest_ = (of_name[-1].end_bytes, max(p.peak_bytes for p in of_name)) if of_name else (0, 0)
            ending, highest_in = f"{end / factor:,.1f}", f"{highest_ / factor:,.1f}"
            cells.append("" if not of_name else f"{ending} / {highest_in}" if both else highest_in)
        label = str(row) + ("" if figures.complete else " (unfinished)")
        table.add_row(label, *cells, f"{figures.peak_bytes / factor:,.1f}", format_seconds(figures.seconds))
    return table


def _process_line(process: ProcessMemory) -> str:
    """The memory of the process in one line, for recordings that also have torch's own figures."""
    workers = f", child processes {format_bytes(process.children_bytes)}" if process.children_bytes else ""
    return f"[dim]process: highest resident {format_bytes(process.highest_bytes)}{workers}[/]"


def _process_table(process: ProcessMemory, guard: Mapping[str, Any] | None) -> Group:
    """The log by step or by second: highest resident size, its change, loss, rate."""
    rows, by_time = process.rows, not process.marked
    columns: dict[str, Callable[[ProcessRow], str]] = {
        "second" if by_time else "step": lambda r: f"{r.start:.0f}" if by_time else str(r.step),
        "highest resident": lambda r: format_bytes(r.highest_bytes),
        "change": lambda r: _signed(r.change_bytes),
        "unique": lambda r: format_bytes(r.unique_bytes) if r.unique_bytes else "",
        "heap peak": lambda r: format_bytes(r.heap_peak_bytes) if r.heap_peak_bytes else "",  # 0: not counted
        "children": lambda r: format_bytes(r.children_bytes) if r.children_bytes else "",
        "loss": lambda r: "" if r.loss is None else f"{r.loss:.4g}",
        "rate": lambda r: "" if by_time else f"{1 / max(r.seconds, 1e-9):.2f}/s",
    }
    told_of = {name: cell for name, cell in columns.items() if any(map(cell, rows))}
    table = Table(title="by second" if by_time else "by step", title_justify="left", header_style="bold", box=SIMPLE_HEAD,
                  pad_edge=False)
    for name in told_of:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    shown = rows if len(rows) <= _LOG_ROWS else [*rows[: _LOG_ROWS // 2], None, *rows[-_LOG_ROWS // 2 :]]
    for row in shown:
        table.add_row(*(["..."] if row is None else [cell(row) for cell in told_of.values()]))
    told = Text(f"highest resident {format_bytes(process.highest_bytes)}")
    if process.median_change_bytes is not None:
        told.append(f"; median change per {'second' if by_time else 'step'} {format_bytes(process.median_change_bytes)}")
    if guard is not None:
        many = len(guard["generations"])
        processes = f"{many} process{'es' if many != 1 else ''}"
        told.append(f"\nguarded: {guard['text']}; {processes}, {format_seconds(guard['seconds'])} in total")
    return Group(table, told)


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else '-' if size < 0 else ''}{format_bytes(abs(size))}"


def bar(by_role: dict[str, int], total: int) -> Text:
    """Bytes by role as a bar, each role at least one cell wide."""
    text = Text()
    for role, size in by_role.items():
        text.append("█" * min(_BAR, max(1, round(_BAR * size / max(total, 1)))), style=COLOURS[role])
    return text


def _where(at: PeakReport) -> str:
    step = f"step {at.step}" if at.step >= 0 else "before the first step"
    return ", ".join(p for p in (step, at.phase, at.op, at.module, at.source) if p)


def _ended_block(ended: PeakReport) -> Group:
    head = Text.from_markup(
        f"[bold red]killed[/] (the recording has no end), with {format_bytes(ended.bytes)} live "
        f"({escape(_where(ended))})"
    )
    roles = dict(sorted(ended.by_role.items(), key=lambda x: -x[1]))
    told = ", ".join(f"{role.replace('_', ' ')} {format_bytes(size)}" for role, size in roles.items())
    return Group(Text(), head, bar(roles, ended.bytes), Text(told))


def _peak_block(found: Explanation, peak: PeakReport) -> Group:
    where = _where(peak)
    if peak.asked_bytes:
        limit = f" of {format_bytes(found.cap_bytes)}" if found.cap_bytes else ""
        head = Text.from_markup(
            f"[bold red]out of memory[/]: {format_bytes(peak.asked_bytes)} were requested while {format_bytes(peak.bytes)}"
            f"{limit} were live ({escape(where)})"
        )
    else:
        head = Text.from_markup(f"[bold]high-water mark {format_bytes(peak.bytes)}[/] ({escape(where)})")
        if found.higher is not None:
            peaked = format_bytes(found.higher.peak_bytes)
            head.append(f"\nstep {found.higher.step} peaked at {peaked}; its operators were not recorded")
    roles = dict(sorted(peak.by_role.items(), key=lambda x: -x[1]))
    legend = Table.grid(padding=(0, 2))
    for role, size in roles.items():
        legend.add_row(Text("■ ", style=COLOURS[role]) + Text(role.replace("_", " ")), format_bytes(size),
                       f"{size / max(peak.bytes, 1):.1%}")
    top = Table(title="largest at that moment", title_justify="left", header_style="bold")
    top.add_column("bytes", justify="right")
    for name in ("role", "what", "module", "source"):
        top.add_column(name, overflow="fold")
    for row in peak.top:
        held = f" held by {row['held_by']}" if row["held_by"] else ""
        what = escape(row["name"] + held)
        role = row["role"].replace("_", " ")
        top.add_row(format_bytes(row["bytes"]), role, what, escape(row["module"]), escape(row["source"]))
    return Group(Text(), head, bar(roles, peak.bytes), legend, Text(), top)


def _findings_block(explained: Explanation) -> Table:
    found, fits = explained.findings, {id(f) for f in explained.fitting}
    saving = next((f.step for f in found if f.saving_bytes), None)
    of_step = "" if saving is None else f" (savings at the peak of step {saving})"
    table = Table(title=f"findings{of_step}", title_justify="left", header_style="bold", show_lines=False)
    table.add_column("saves", justify="right")
    table.add_column("what", overflow="fold")
    for f in found:
        note = " [green](enough on its own)[/]" if id(f) in fits else ""
        table.add_row(format_bytes(f.saving_bytes) if f.saving_bytes else "", escape(f.text) + note)
    return table


def show_difference(found: Difference, out: Console | None = None) -> None:
    """Print what ``lowtide diff`` shows."""
    out = out or console()
    for name, command in (("before", found.before), ("after", found.after)):
        out.print(f"{name}: {escape(command)}")
    parts: dict[str, Mapping[str, ByteChange]] = {
        "peak": {"high-water mark": found.peak},
        "by role at the peak": {name.replace("_", " "): change for name, change in found.by_role.items()},
        "highest in each phase": {name.replace("_", " "): change for name, change in found.phases.items()},
        "what changed most": found.top,
    }
    for title, changes in parts.items():
        table = Table(title=title, title_justify="left", header_style="bold")
        table.add_column("", overflow="fold")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for name, change in changes.items():
            colour = "red" if change.bytes > 0 else "green" if change.bytes < 0 else "dim"
            sign = "+" if change.bytes > 0 else "-" if change.bytes < 0 else ""
            table.add_row(escape(name), format_bytes(change.before_bytes), format_bytes(change.after_bytes),
                          f"[{colour}]{sign}{format_bytes(abs(change.bytes))}[/]")
        out.print(table)
