"""The console for reports, on standard error, and the summary of ``lowtide run``."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowtide.base.lever_catalogue import CHECKPOINTS
from lowtide.base.messages import stream
from lowtide.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.runtime.run_figures import PlanFigures, RunOutcome


SETTLED = 2
"""Index of the first step for which a plan has been made."""
PARTS = 3
"""How many parts of the minimum are shown."""
WELL_ABOVE = 0.02
"""The lowest plan found is shown if it is above the minimum by more than this share of it."""
MISSED_SHARE, MISSED_OF_STEP = 0.2, 0.01
"""Measured extra time is shown beside predicted if the two differ by more than this share of it, and of the step."""


class _Patient(Console):
    """A console that goes quiet on a broken pipe; rich's own ends the process and redirects its standard output."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True


def console() -> Console:
    """A new console on standard error."""
    return _Patient(file=stream(), highlight=False)


def show_outcome(outcome: RunOutcome) -> None:
    """Print the summary at the end of ``lowtide run``."""
    out = console()
    reasons = "; ".join(outcome.unreached)
    if not outcome.steps:
        out.print(f"lowtide: no training step was seen: nothing was recorded, nothing was changed{reasons and ': ' + reasons}")
        return
    table = Table(title="lowtide run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    _add_peaks(table, outcome)
    plan = outcome.plan
    if plan is not None:
        engaged = any(lever.used and lever.name != CHECKPOINTS for lever in outcome.levers)
        told = "with the memory optimizations, without a plan" if engaged else "without Lowtide, as recorded"
        table.add_row("baseline peak", format_bytes(plan.baseline_peak_bytes), told)
        table.add_row("resident", format_bytes(plan.resident_bytes), "parameters, buffers, optimizer states")
        _add_minimum(table, plan)
    steps = [s for s in outcome.steps if s.policy != "online"] or list(outcome.steps)
    kinds = {p: sum(1 for s in outcome.steps if s.policy == p) for p in ("online", "planned", "plain")}
    told = ", ".join(f"{n} {p}" for p, n in kinds.items() if n)
    table.add_row("steps", str(len(outcome.steps)), told)
    if outcome.units_of_earlier_runs:
        table.add_row("recordings", "kept", "of an earlier run of this script (--no-cache begins without them)")
    seconds = statistics.median(s.seconds for s in steps)
    table.add_row("step time", format_seconds(seconds), "median")
    recomputed = statistics.median(s.recomputed_ops for s in steps)
    took = statistics.median(s.recompute_seconds for s in steps)
    table.add_row("recomputed", f"{recomputed:.0f} ops", f"{format_seconds(took)} a step")
    waited = statistics.median(s.offload_seconds for s in steps)
    moved = format_bytes(statistics.median(s.offloaded_bytes for s in steps))
    table.add_row("offloaded", moved, f"{format_seconds(waited)} a step, both ways")
    if plan is not None and plan.predicted_peak_bytes is not None and plan.extra_seconds is not None:
        planned = [s for s in outcome.steps if s.policy == "planned"]
        measured = planned[-1].peak_bytes if planned else outcome.steps[-1].peak_bytes
        unit = "step" if outcome.units == 1 else f"forward and backward, of which a step has {outcome.units}"
        table.add_row(
            "plan",
            format_bytes(plan.predicted_peak_bytes),
            f"predicted; measured {format_bytes(measured)}",
        )
        extra, share = plan.extra_seconds, abs(plan.extra_seconds) / max(plan.baseline_step_seconds, 1e-9)
        bound = f"by this model of time no plan needs less than {format_seconds(plan.bound_extra_seconds)}"
        if extra < 0:
            bound = "the script's own checkpoints recompute more than the budget needs"
        table.add_row(
            "saved time" if extra < 0 else "extra time",
            format_seconds(abs(extra)),
            f"predicted, {share:.1%} of the recorded {unit}; {bound}",
        )
        _add_measured(table, plan)
    for neighbour in outcome.neighbours:
        told = f"{'saved' if neighbour.extra_seconds < 0 else 'extra'} time, predicted, with that budget"
        table.add_row(f"with {format_bytes(neighbour.budget_bytes)}", format_seconds(abs(neighbour.extra_seconds)), told)
    if not outcome.asked:
        rescued = [s.rescued_ops for s in outcome.steps if s.rescued_ops]
        told = f"retries of operators that did not fit, in {len(rescued)} of {len(outcome.steps)} steps"
        table.add_row("rescued", str(sum(rescued)), told)
    for lever in outcome.levers:
        table.add_row("optimization", lever.name, lever.text if lever.used else f"not used: {lever.text}")
    out.print(table)
    _remark(out, outcome, reasons)


def _add_measured(table: Table, plan: PlanFigures) -> None:
    """What recomputing and offloading took in a step that was timed, where that differs much from what is predicted."""
    predicted, measured = plan.extra_seconds, plan.measured_extra_seconds
    if predicted is None or measured is None or predicted < 0:
        return
    if abs(measured - predicted) > max(MISSED_SHARE * predicted, MISSED_OF_STEP * plan.baseline_step_seconds):
        table.add_row("", format_seconds(max(0.0, measured)), "measured in the step timed last, interception included")


def _add_peaks(table: Table, outcome: RunOutcome) -> None:
    verdict = ""
    if outcome.budget_bytes and outcome.bound:
        verdict = "[red]over the budget[/]" if outcome.over else "[green]within the budget[/]"
    unset = "none" if outcome.in_force else "[red]not in force[/]"
    table.add_row("budget", *((format_bytes(outcome.budget_bytes), outcome.origin) if outcome.budget_bytes else (unset, "")))
    seen = "" if outcome.exact else " (only the tensors that Lowtide saw)"
    table.add_row("peak", format_bytes(max(s.peak_bytes for s in outcome.bound or outcome.steps)), verdict + seen)
    setup = outcome.setup_peak_bytes
    if setup > outcome.peak_bytes or 0 < outcome.budget_bytes < setup:
        table.add_row("set-up", format_bytes(setup), "peak before the first step, which no plan lowers")
    if outcome.of_first and outcome.budget_bytes:
        first = format_bytes(outcome.steps[0].peak_bytes)
        table.add_row("first step", first, "ran without the budget, which follows from it")


def _add_minimum(table: Table, plan: PlanFigures) -> None:
    """What no plan goes below, what is in memory then, and how low the plans found go where that is well above."""
    at = plan.minimum if plan.minimum is not None and plan.minimum.operator else None
    where = "" if at is None else f"; it is set by {escape(str(at))}, with"
    table.add_row("minimum", format_bytes(plan.bound_peak_bytes), f"recomputing and offloading cannot go below this{where}")
    for what, size in () if at is None else at.parts[:PARTS]:
        module = "" if at is None else at.module_of(what)
        table.add_row("", format_bytes(size), what + (module and f"; the largest is from {escape(module)}"))
    if plan.lowest_peak_bytes > (1 + WELL_ABOVE) * plan.bound_peak_bytes and plan.lowest_peak_bytes < plan.baseline_peak_bytes:
        table.add_row("lowest plan", format_bytes(plan.lowest_peak_bytes), "the lowest that was found; none lower is known")


def _remark(out: Console, outcome: RunOutcome, reasons: str) -> None:
    """Print what users should know even if they do not read the table."""
    over = outcome.over
    for step in over[:3]:
        out.print(
            f"[red]lowtide: step {step.index} peaked at {format_bytes(step.peak_bytes)}, "
            f"{format_bytes(step.exceeds(outcome.budget_bytes))} over the budget[/]"
        )
    early = [s for s in outcome.steps[: outcome.excused] if outcome.budget_bytes and s.peak_bytes > outcome.budget_bytes]
    if early and not outcome.of_first:
        highest = max(s.peak_bytes for s in early)
        out.print(
            f"lowtide: the first {outcome.excused} steps, which showed that the budget needs a memory optimization, peaked at "
            f"{format_bytes(highest)}; the later steps use it"
        )
    if outcome.in_force and over:
        out.print(f"[red]lowtide: the budget was not held in {len(over)} of {len(outcome.bound)} steps[/]")
    for name in outcome.unmet:
        out.print(f"[red]lowtide: --keep {escape(name)}: no module with that path was called; paths look like blocks.0[/]")
    if not outcome.in_force:
        why = reasons or "no backward used anything that a forward saved"
        out.print(f"[red]lowtide: the budget was never in force: {why}[/]")
    elif reasons and any(s.index >= SETTLED for s in over):
        out.print(f"[red]lowtide: out of Lowtide's reach in this script: {reasons}[/]")
    settled = outcome.steps[SETTLED:]
    online = sum(1 for s in settled if s.policy == "online")
    if outcome.plan is not None and 2 * online > len(settled):
        out.print(
            f"lowtide: {online} of {len(settled)} later steps ran without a plan (their operators or sizes were new): every "
            "operator in them was inspected, which takes time"
        )
