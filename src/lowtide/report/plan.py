"""Reports of a plan: in the terminal, as JSON, and as one HTML page that needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.markup import escape
from rich.table import Table

from lowtide.base.units import format_bytes, format_seconds
from lowtide.planning.graph import Graph
from lowtide.planning.solver.figures import (
    Decides,
    ModuleFigures,
    curve_json,
    decides_json,
    modules_json,
    profile,
    shadow_prices,
    to_json,
)
from lowtide.planning.solver.solve import Answer
from lowtide.planning.status import Status
from lowtide.recording.rewrites.choose_levers import Planned
from lowtide.report.pages import render
from lowtide.report.terminal import console

_ROWS: Final = 12
"""Modules listed in the terminal; the page lists up to three times as many."""
_BAR: Final = 24
"""Characters of the longest bar of a curve."""
_MIB = 1 << 20
_POINTS: Final = 4000
"""Points that are drawn of a profile; a longer one is cut into that many stretches, each drawn by its highest point."""
_SAID: Final = {
    Status.OPTIMAL: "[green]optimal[/]: no plan is faster",
    Status.FEASIBLE: "feasible",
    Status.INFEASIBLE: "[red]infeasible[/]: no plan fits this budget",
    Status.UNKNOWN: "[red]no plan found[/], but none is ruled out",
}


def name_of(graph: Graph, v: int) -> str:
    """The name of a node in reports; a negative index means the end of the schedule."""
    if v < 0:
        return "the end"
    node = graph.nodes[v]
    return f"{node.id} ({node.module})" if node.module else str(node.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What ``lowtide plan`` says about a graph.

    Attributes:
        answer: the plan, or why there is none.
        why: what the plan's peak and cost depend on; None if no plan was made.
        modules: what the plan does in each module; empty if no plan was made.
        strategy: how the plan was searched for.
        rounding_bytes: sizes are rounded up to a multiple of this.
        reserved_bytes: bytes that the segments of an allocator take; None if not requested.
        allocator: the name of that allocator; empty if not requested.
        curve: plans at other budgets.
        sets: the plan with each set of levers, the first without any; empty if levers change nothing.
        chosen: the set of levers that ``answer`` uses; None without sets.
        floor_with_moving_bytes: lower bound on the peak of plans that may also offload; None if this plan may.
    """

    answer: Answer
    why: Decides | None
    modules: tuple[ModuleFigures, ...]
    strategy: str
    rounding_bytes: int
    reserved_bytes: int | None
    allocator: str
    curve: tuple[Answer, ...]
    sets: tuple[Planned, ...]
    chosen: Planned | None
    floor_with_moving_bytes: int | None


def plan_json(found: PlanReport) -> dict[str, Any]:
    """The JSON that ``lowtide plan --json`` writes."""
    answer, chosen = found.answer, found.chosen
    told: dict[str, Any] = to_json(answer, strategy=found.strategy, rounding_bytes=found.rounding_bytes)
    if found.allocator:
        told["allocator"] = found.allocator
        told["reserved_bytes"] = found.reserved_bytes if answer.status.has_plan else None
    if found.why is not None:
        told["decides"] = decides_json(answer.graph, found.why)
        told["modules"] = modules_json(found.modules)
    if found.sets:
        told["levers"] = [set_json(s, found.sets[0], chosen=s is chosen) for s in found.sets[1:]]
    if chosen is not None and chosen.names:
        told["with_levers"] = list(chosen.names)
        told["lever_seconds"] = chosen.own_seconds
    if found.curve:
        told["curve"] = curve_json(found.curve)
    if found.floor_with_moving_bytes is not None:
        told["floor_with_moving_bytes"] = found.floor_with_moving_bytes
    return told


def show_plan(found: PlanReport) -> None:
    """Print the plan: budget, peak, extra time and its bound, what limits it, its modules, levers, plans at other budgets."""
    answer, chosen, reserved = found.answer, found.chosen, found.reserved_bytes
    out, graph, timeline = console(), answer.graph, answer.timeline
    table = Table(title=escape(f"lowtide plan {graph.name}".rstrip()), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    kind = "given order" if answer.order == "fixed" else "any order"
    table.add_row("status", answer.status.value, _SAID[answer.status].partition(": ")[2] or f"{kind}, {found.strategy}")
    if answer.budget_bytes is not None:
        table.add_row("budget", format_bytes(answer.budget_bytes), f"{answer.budget_bytes:,} bytes")
    shown = answer.status.has_plan
    if chosen is not None and chosen.names:
        own = f"their own {format_seconds(chosen.own_seconds)} are not counted below" if chosen.own_seconds > 0 else ""
        table.add_row("with optimizations", "\n".join(chosen.names), own)
    if shown:
        table.add_row("peak", format_bytes(timeline.peak_bytes), f"without a plan {format_bytes(answer.given_peak_bytes)}")
        if reserved is not None:
            idle = max(0, reserved - timeline.peak_bytes)
            table.add_row("reserved", format_bytes(reserved), f"the allocator's segments, {format_bytes(idle)} of them idle")
    else:
        table.add_row("peak without a plan", format_bytes(answer.given_peak_bytes), "")
        if answer.status is Status.UNKNOWN:
            allows = "; --offload SPEED allows offloading, which `lowtide run` does by default"
            moving = "" if graph.offload is not None else allows
            table.add_row("lowest peak found", format_bytes(timeline.peak_bytes), f"--seconds searches longer{moving}")
    means = "recomputing" if graph.offload is None else "recomputing and offloading"
    meaning = {
        "stuck": f"{means} cannot go below this",
        "instant": f"{means} cannot go below this: a recomputed value needs its inputs",
        "order": f"{means} cannot go below this in any order: a recomputed value needs its inputs",
        "forced": "no order that runs every operator once goes below this",
        "cut": "no order that runs every operator once goes below this (minimum cut)",
    }
    table.add_row(
        "minimum",
        format_bytes(answer.peak_bound.bytes),
        f"{meaning[answer.peak_bound.method]} (at {escape(name_of(graph, answer.peak_bound.node))})",
    )
    if found.floor_with_moving_bytes is not None:
        table.add_row(
            "minimum with offloading", format_bytes(found.floor_with_moving_bytes),
            "with activations offloaded, as by `lowtide run` or --offload SPEED",
        )
    if shown:
        extra, least, base = answer.extra_seconds, answer.time_bound.seconds, graph.base_seconds or 1.0
        table.add_row(
            "extra time", format_seconds(extra), f"{answer.extra_fraction:.2%} of {format_seconds(graph.base_seconds)}"
        )
        proof = "" if answer.time_bound.solved or answer.status is Status.OPTIMAL else " (time limit)"
        table.add_row(
            "bound",
            format_seconds(least),
            f"{least / base:.2%}: no plan within the budget adds less{proof}; gap {max(0.0, extra - least) / base:.2%}",
        )
        if timeline.moved_bytes:
            table.add_row("offloaded", format_bytes(timeline.moved_bytes), f"{format_seconds(timeline.wait_seconds)} waited")
        again = sum(r - 1 for r in timeline.runs if r > 1)
        table.add_row("recomputed", f"{again} operators", f"searched for {answer.solve_seconds:.1f} s, {answer.rounds} rounds")
    out.print(table)
    if found.why is not None:
        _show_decides(answer, found.why)
        _show_modules(found.modules)
    if found.sets:
        _show_sets(found.sets, chosen)
    if found.curve:
        _show_curve(found.curve)


def _show_decides(answer: Answer, found: Decides) -> None:
    out, graph = console(), answer.graph
    out.print(f"tightest while {name_of(graph, found.tight_node)} runs", markup=False)
    if found.saves_seconds:
        out.print(f"{format_bytes(found.more_bytes)} more would save about {format_seconds(found.saves_seconds)}")
    if found.dear:
        listed = ", ".join(f"{name_of(graph, v)} ({format_seconds(s)} for {format_bytes(b)})" for v, b, s in found.dear[:3])
        out.print(f"costliest to restore: {listed}", markup=False)


def _show_modules(shares: Sequence[ModuleFigures]) -> None:
    if len(shares) < 2:
        return
    table = Table(title="by module, costliest first", title_justify="left")
    for head in ("module", "kept", "recomputed", "offloaded", "extra time"):
        table.add_column(head, justify="left" if head == "module" else "right")
    for s in shares[:_ROWS]:
        table.add_row(
            escape(s.module) or "(none)",
            format_bytes(s.kept_bytes),
            format_bytes(s.recomputed_bytes),
            format_bytes(s.moved_bytes),
            format_seconds(s.seconds),
        )
    if len(shares) > _ROWS:
        table.caption = f"and {len(shares) - _ROWS} more"
    console().print(table)


def set_json(found: Planned, plain: Planned, *, chosen: bool) -> dict[str, Any]:
    """A set of levers as JSON: its bytes and seconds, compared with the step without levers."""
    return {
        "names": list(found.names),
        "exact": found.exact,
        "peak_bytes": found.peak_bytes,
        "saving_bytes": plain.peak_bytes - found.peak_bytes,
        "floor_bytes": found.floor_bytes,
        "status": None if found.answer is None else found.answer.status.value,
        "extra_seconds": found.extra_seconds,
        "own_seconds": found.own_seconds,
        "chosen": chosen,
    }


def _within(found: Planned) -> str:
    """The extra time of a set of levers within the budget, as text."""
    if found.answer is None:
        return ""
    if found.extra_seconds is not None:
        return format_seconds(found.extra_seconds)
    return "cannot be held" if found.answer.status is Status.INFEASIBLE else "no plan found"


def _bits(found: Planned) -> str:
    return "the same" if found.exact else "rounded"


def _show_sets(sets: Sequence[Planned], chosen: Planned | None) -> None:
    """Print what levers would gain: each set's peak and floor, and its extra time within the budget."""
    asked = any(s.answer is not None for s in sets[1:])
    table = Table(title="with memory optimizations (`lowtide run --optimizations list` tries them)", title_justify="left")
    for head in ("optimizations", "baseline peak", "minimum", *(("extra time",) if asked else ()), "bits"):
        table.add_column(head, justify="left" if head in ("optimizations", "bits") else "right")
    for s in sets:
        name = " +\n".join(s.names) or "none"
        told = (_within(s),) if asked else ()
        table.add_row(
            f"[bold]{name} (this plan)[/]" if s is chosen and asked else name,
            format_bytes(s.peak_bytes), format_bytes(s.floor_bytes), *told, _bits(s),
        )
    if asked:
        table.caption = (
            "extra time is relative to the step without memory optimizations; of their own cost it includes only the second "
            "forward of the loss"
        )
    console().print(table)


def _show_curve(answers: Sequence[Answer]) -> None:
    """Print extra time against budget, with the proven bound next to it."""
    table = Table(title="extra time by budget", title_justify="left")
    for head in ("budget", "peak", "extra", "bound", "1 MiB more saves"):
        table.add_column(head, justify="right")
    table.add_column("")
    most = max((a.extra_fraction for a in answers if a.status.has_plan), default=0.0) or 1.0
    for a, price in zip(answers, shadow_prices(answers), strict=True):
        budget = format_bytes(a.budget_bytes or 0)
        least = a.time_bound.seconds / (a.graph.base_seconds or 1.0)
        if not a.status.has_plan:
            table.add_row(budget, "", a.status.value, f"{least:.2%}", "", "")
            continue
        full = round(_BAR * a.extra_fraction / most)
        sure = min(full, round(_BAR * least / most))
        bar = "█" * sure + "[dim]▒[/]" * (full - sure)
        saves = format_seconds(price * _MIB) if price else ""
        table.add_row(budget, format_bytes(a.timeline.peak_bytes), f"{a.extra_fraction:.2%}", f"{least:.2%}", saves, bar)
    console().print(table)


def page(found: PlanReport, plain: Answer) -> str:
    """The HTML page: memory along the plan and along the given order, the curve, what limits the plan, modules, levers.

    Args:
        found: what is reported.
        plain: the graph in its given order, without a plan.
    """
    answer, chosen = found.answer, found.chosen
    data = {
        "plain": _drawn(plain),
        "plan": _drawn(answer) if answer.status.has_plan and answer.row != plain.row else None,
        "budget": answer.budget_bytes,
        "floor": answer.peak_bound.bytes,
        "curve": [
            [
                a.budget_bytes,
                100 * a.extra_fraction if a.status.has_plan else None,
                100 * a.time_bound.seconds / (answer.graph.base_seconds or 1.0),
                None if price is None else 1000 * _MIB * price,
            ]
            for a, price in zip(reversed(found.curve), reversed(shadow_prices(found.curve)), strict=True)
        ],
    }
    return render(
        "plan",
        data,
        answer=answer,
        shown=answer.status.has_plan,
        strategy=found.strategy,
        reserved=found.reserved_bytes,
        decides=found.why,
        modules=found.modules[: 3 * _ROWS],
        name=lambda v: name_of(answer.graph, v),
        sets=[(s, _within(s), _bits(s)) for s in found.sets],
        own_seconds=0.0 if chosen is None else chosen.own_seconds,
        chosen=chosen,
    )


def _drawn(answer: Answer) -> list[list[float]]:
    """Seconds and bytes along a plan, thinned to at most ``_POINTS`` points."""
    seconds, size = profile(answer)
    edges = np.unique(np.linspace(0, len(size), min(len(size), _POINTS) + 1).astype(np.int64))
    keep = [a + int(size[a:b].argmax()) for a, b in itertools.pairwise(edges)]
    return [[round(float(seconds[k]), 9) for k in keep], [int(size[k]) for k in keep]]
