"""``lowtide plan``: the best schedule of a graph, or of a recorded step, within a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.base.errors import GraphError, UsageError
from lowtide.base.lever_catalogue import LEVERS, parse_levers
from lowtide.base.outputs import write, write_json
from lowtide.base.units import Auto, BudgetShare, Minimum, Rescue, Slowdown, parse_budget, parse_bytes
from lowtide.cli.launch import check_folder
from lowtide.cli.script import Finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lowtide.planning.graph import Graph, Offload
    from lowtide.planning.schedule import Row
    from lowtide.planning.solver.caching_allocator import Reserved
    from lowtide.planning.solver.solve import Answer, Solver
    from lowtide.recording.recorded_step import RecordedStep
    from lowtide.recording.rewrites.choose_levers import Planned

_SQLITE = b"SQLite format 3\0"
_ORDERS = ("best-order", "worst-order")
"""Strategies that choose the order of operators themselves, whatever order is given."""
_CURVE = 20
"""Number of budgets on a curve."""
_CURVE_TIME = 2.0
"""The search for a curve may take this many times as long as the search for one budget, which comes on top."""

_LARGEST_BLOCK = 1 << 30
"""Largest rounding that is accepted, bytes: no allocator rounds to larger blocks."""


@click.command()
@click.argument("graph", metavar="GRAPH.json|F.lowtide", type=click.Path(path_type=Path))
@click.option("--budget", metavar="SIZE", help="Bytes, a size such as 6GiB, or a share such as 50%.")
@click.option(
    "--order", type=click.Choice(["fixed", "free"]), default="fixed", show_default=True,
    help="Keep the given order of operators, or choose one.",
)
@click.option("--curve", is_flag=True, help="Plan for budgets from the peak down to the minimum, too.")
@click.option(
    "--strategy",
    metavar="NAME",
    default="search",
    show_default=True,
    help="search, or a classic strategy: keep-all, keep-none, sqrt-n, revolve, greedy, best-order, worst-order.",
)
@click.option(
    "--seconds", type=Finite(min=0.05), default=None,
    help="Time limit of the search.  [default: 8]",
)
@click.option("--offload", "speed", metavar="SIZE", help="Allow offloading, at SIZE bytes per second each way.")
@click.option("--host", metavar="SIZE", help="Most bytes that may be offloaded at a time.")
@click.option("--overlap/--no-overlap", default=None, help="Whether transfers overlap with computation.")
@click.option(
    "--rounding", metavar="BYTES", type=click.IntRange(min=1, max=_LARGEST_BLOCK), default=1,
    help="Block size of the allocator; 512 for CUDA.",
)
@click.option(
    "--allocator", type=click.Choice(["cuda"]), default=None,
    help="Apply the budget to what torch's allocator reserves on a device: blocks, and the segments they are cut from.",
)
@click.option(
    "--allow", multiple=True, metavar="NAME,...", help="Memory optimizations that a recording's plan may use (`all`, `exact`)."
)
@click.option("--step", type=int, default=None,
              help="Number of the recorded step, as in `lowtide report`.  [default: the step with the highest peak]")
@click.option("--check", "solution", metavar="SOLUTION.json", help="Verify a solution written by --json instead.")
@click.option("--json", "json_file", metavar="FILE", help="Write the plan as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page, which needs no network.")
def plan(
    *,
    graph: Path,
    budget: str | None,
    order: str,
    curve: bool,
    strategy: str,
    seconds: float | None,
    speed: str | None,
    host: str | None,
    overlap: bool | None,
    rounding: int,
    allocator: str | None,
    allow: tuple[str, ...],
    step: int | None,
    solution: str | None,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Plan what to keep, recompute or offload within a budget.

    Plans a graph (GRAPH.json) or a step of a recording (F.lowtide), and shows how far the plan is at most from the best one.
    """
    from lowtide.planning.solver import caching_allocator, solve

    for file in (json_file, html_file):
        check_folder(file)
    if json_file is not None and html_file is not None and Path(json_file).resolve() == Path(html_file).resolve():
        raise UsageError("--json and --html name the same file: give two files")
    source = _load(graph, step)
    if solution is not None:
        return _check(source, lambda g: _with_offload(g, speed, host, overlap), Path(solution))
    if allocator is not None:
        if curve or rounding > 1:
            raise UsageError("--allocator sets the block size and plans for one budget: leave out --rounding and --curve")
        rounding = caching_allocator.BLOCK_BYTES
    allowed = parse_levers(allow)
    if allowed and (source.step is None or budget is None or strategy != "search" or allocator is not None):
        raise UsageError("--allow needs a recording and --budget, and excludes --strategy and --allocator")

    def prepared(g: Graph) -> Graph:
        g = _with_offload(g, speed, host, overlap)
        return g.rounded(rounding) if rounding > 1 else g

    kept = solve.Order.FREE if strategy in _ORDERS else solve.Order(order)
    solver = solve.Solver(prepared(source.graph), order=kept)
    asked = _budget(budget, solver, source.resident)
    limit = solve.SECONDS if seconds is None else seconds
    points = _curve(solver, limit) if curve and not allowed else []
    held: caching_allocator.Reserved | None = None
    if allocator is None:
        answer = _answer(solver, asked, strategy, limit, points)
    elif asked is None:
        answer = _answer(solver, None, strategy, limit, points)
        held = caching_allocator.reserved(answer.graph, answer.schedule)
    else:
        answer, held = caching_allocator.within(
            asked, lambda room, share: _answer(solver, room, strategy, share * limit, points)
        )
    sets: list[Planned] = []
    chosen: Planned | None = None
    if source.step is not None:
        from lowtide.recording.rewrites.choose_levers import Planned

        plain = Planned(names=(), solver=solver, answer=None if asked is None else answer, own_seconds=0.0)
        compared = strategy == "search" and allocator is None
        sets, chosen = _chosen(source.step, plain, allowed, prepared, asked if compared else None, limit)
        if chosen.answer is not None:
            solver, answer = chosen.solver, chosen.answer
        if curve and allowed:
            points = _curve(solver, limit, known=[answer])
    if asked is not None and strategy == "search" and answer.peak_bound.bytes < solver.told_floor.bytes:
        answer = replace(answer, peak_bound=solver.told_floor)
    told = _Output(
        strategy=strategy, rounding=rounding, held=held, json_file=json_file, html_file=html_file,
        floor_with_moving=_floor_with_moving(source, solver),
    )
    _tell(solver, answer, points, sets if len(sets) > 1 else [], chosen, told)
    return 0 if answer.status.has_plan else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The contents of a file: its graph, the resident bytes that a budget share leaves out, and the step of a recording."""

    graph: Graph
    resident: int = 0
    step: RecordedStep | None = None


def _load(path: Path, step: int | None) -> _Source:
    from lowtide.planning.graph_json import load

    try:
        with path.open("rb") as file:
            recorded = file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise GraphError(f"cannot read {path}: {error.strerror}") from None
    if not recorded:
        if step is not None:
            raise UsageError("--step needs a recording: a graph has no steps")
        return _Source(graph=load(path))
    from lowtide.recording.graph import graph_of
    from lowtide.recording.peak_report import peak_report
    from lowtide.recording.reader import read
    from lowtide.recording.recorded_step import highest, laid_out

    steps = [s for s in laid_out(read(path)) if s.row.complete]
    found = highest(steps) if step is None else next((s for s in steps if s.row.step == step >= 0), None)
    if found is None:
        known = ", ".join(str(s.row.step) for s in steps if s.row.step >= 0)
        if not known:
            raise UsageError(f"{path} has no complete step with operators: record again without --level phases")
        raise UsageError(f"{path} has no operators of step {step}, only of steps {known} (the first ones and the highest)")
    report = peak_report(found)
    roles = report.by_role if report is not None else {}
    resident = sum(roles.get(r, 0) for r in ("parameter", "buffer", "optimizer_state"))
    return _Source(graph=graph_of(found), resident=resident, step=found)


def _chosen(
    step: RecordedStep, plain: Planned, allowed: frozenset[str], prepared: Callable[[Graph], Graph], budget: int | None,
    seconds: float,
) -> tuple[list[Planned], Planned]:
    """The step with each set of levers, and the fastest set that is allowed; without plans if there is no budget.

    The search for all sets together takes as long as the search without levers. The chosen set is searched for as long again
    if a gap remains between its plan and the bound.
    """
    from lowtide.planning.status import Status
    from lowtide.recording.rewrites.choose_levers import best, others
    from lowtide.report.terminal import console

    if budget is None:
        return [plain, *others(step, plain, prepared=prepared, answered=None)], plain
    with console().status("with memory optimizations") as status:

        def answered(solver: Solver, names: tuple[str, ...], share: float, rows: list[Row]) -> Answer:
            status.update(f"with {' and '.join(names)}")
            return solver.at(budget, seconds=share * seconds, seeds=rows)

        sets = [plain, *others(step, plain, prepared=prepared, answered=answered, allowed=allowed)]
        chosen = best(sets, allowed)
        first = chosen.answer
        if chosen is not plain and first is not None and first.status in (Status.FEASIBLE, Status.UNKNOWN):
            again = answered(chosen.solver, chosen.names, 1.0, [first.row] if first.status.has_plan else [])
            at = sets.index(chosen)
            sets[at] = chosen = replace(chosen, answer=chosen.solver.better(first, again))
    return sets, chosen


def _with_offload(graph: Graph, speed: str | None, host: str | None, overlap: bool | None) -> Graph:
    from lowtide.planning.graph import Offload

    board2: Offload | None = graph.offload
    if speed is not None:
        rate = float(parse_bytes(speed))
        board2 = Offload(write_bytes_per_second=rate, read_bytes_per_second=rate)
    if board2 is None:
        if host is not None or overlap is not None:
            raise UsageError("--host and --overlap need --offload")
        return graph
    if host is not None:
        board2 = replace(board2, host_bytes=parse_bytes(host))
    if overlap is not None:
        board2 = replace(board2, overlap=overlap)
    return replace(graph, offload=board2)


def _budget(text: str | None, solver: Solver, resident: int) -> int | None:
    """The budget, bytes. A share applies to the given order's peak above the resident bytes, which are added in full."""
    if text is None:
        return None
    asked = parse_budget(text)
    if isinstance(asked, Auto | Rescue | Minimum | Slowdown):
        raise UsageError(f"--budget {text} works only with `lowtide run`: give a size or a share")
    if isinstance(asked, BudgetShare):
        return resident + int(asked.fraction * (solver.given.peak_bytes - resident))
    return asked


def _check(source: _Source, prepared: Callable[[Graph], Graph], path: Path) -> int:
    from rich.progress import Progress

    from lowtide.planning.check.check import check, is_solution
    from lowtide.planning.graph_json import read_json
    from lowtide.report.terminal import console

    found = read_json(path, "solution")
    if not is_solution(found):
        raise UsageError(f"{path} is not a solution: give a file that `lowtide plan --json` wrote")
    graph, names = source.graph, found.get("with_levers", [])
    if names:
        graph = _with_levers(source, names, path)
    graph = prepared(graph)
    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task("checking")
        wrong = check(graph, found, progress=lambda done, of: bar.update(task, completed=done, total=of))
    for line in wrong[:20]:
        console().print(f"lowtide: {path.name}: {line}", markup=False)
    if not wrong:
        points = f", and {count} of a curve" if (count := len(found.get("curve", ()))) else ""
        console().print(f"lowtide: {path.name} holds: {found['status']}, schedule and bounds verified{points}")
    return 1 if wrong else 0


def _with_levers(source: _Source, names: object, path: Path) -> Graph:
    """The graph of the step with the levers that a solution uses."""
    from lowtide.recording.rewrites.levers import with_levers

    if source.step is None:
        raise UsageError(f"{path} is a plan with memory optimizations: give the recording it was made for")
    if not isinstance(names, list) or not all(isinstance(name, str) and name in LEVERS for name in names):
        raise UsageError(f"{path} names unknown memory optimizations (known: {', '.join(LEVERS)})")
    return with_levers(source.step, names)


def _curve(solver: Solver, seconds: float, known: Sequence[Answer] = ()) -> list[Answer]:
    from rich.progress import Progress

    from lowtide.report.terminal import console

    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task("curve", total=1.0)
        return solver.curve(
            _CURVE, seconds=_CURVE_TIME * seconds, known=known, progress=lambda share: bar.update(task, completed=share)
        )


def _answer(solver: Solver, budget: int | None, strategy: str, seconds: float, points: list[Answer]) -> Answer:
    from lowtide.base.units import format_seconds
    from lowtide.planning.schedule import plain_row
    from lowtide.planning.search import classics, exhaustive
    from lowtide.planning.search.annealing import AnnealedRow
    from lowtide.report.terminal import console

    game = solver.game
    if strategy in _ORDERS:
        return solver.follow(
            plain_row(solver.graph, exhaustive.extreme_order(solver.graph, worst=strategy == "worst-order")), budget
        )
    if strategy != "search":
        if strategy not in classics.STRATEGIES:
            known = ", ".join(["search", *classics.STRATEGIES, *_ORDERS])
            raise UsageError(f"unknown strategy {strategy!r}: choose from {known}")
        if not game.plain:
            return solver.follow(solver.row, budget)
        return solver.follow(game.row(classics.STRATEGIES[strategy](game, budget or 0)), budget)
    with console().status("searching") as status:

        def tell(found: AnnealedRow) -> None:
            if not found.over_bytes:
                extra = max(0.0, found.seconds - game.base_seconds)
                status.update(f"searching: {format_seconds(extra)} of extra time so far")

        if budget is None:
            return solver.lowest(seconds=seconds)
        seeds = [a.row for a in points if a.timeline.peak_bytes <= budget][:1]
        return solver.at(budget, seconds=seconds, seeds=seeds, progress=tell)


def _floor_with_moving(source: _Source, solver: Solver) -> int | None:
    """Proven minimum, bytes, of plans that may offload, as a run may; None for a graph, or if this plan may offload itself."""
    from lowtide.planning.solver.solve import Solver
    from lowtide.recording.peak_floor import with_board

    if source.step is None or solver.graph.offload is not None:
        return None
    return Solver(with_board(solver.graph)).told_floor.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """How an answer was made, and where it is written."""

    strategy: str
    rounding: int
    held: Reserved | None
    json_file: str | None
    html_file: str | None
    floor_with_moving: int | None


def _tell(
    solver: Solver, answer: Answer, points: list[Answer], sets: list[Planned], chosen: Planned | None, told: _Output
) -> None:
    from lowtide.planning.solver.figures import by_module, decides
    from lowtide.report.plan import PlanReport, page, plan_json, show_plan

    decided = answer.status.has_plan and answer.budget_bytes is not None and answer.schedule
    found = PlanReport(
        answer=answer,
        why=decides(solver, answer) if decided else None,
        modules=tuple(by_module(answer)) if answer.status.has_plan else (),
        strategy=told.strategy,
        rounding_bytes=told.rounding,
        reserved_bytes=None if told.held is None else told.held.peak_bytes,
        allocator="" if told.held is None else "cuda",
        curve=tuple(points),
        sets=tuple(sets),
        chosen=chosen,
        floor_with_moving_bytes=told.floor_with_moving,
    )
    if told.json_file is not None:
        write_json(told.json_file, plan_json(found))
    if told.html_file is not None:
        write(told.html_file, page(found, solver.follow(solver.row, None)))
    show_plan(found)
