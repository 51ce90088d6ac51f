"""What the planner reaches: public instances in free order, and graphs of growing size in fixed order.

    python benchmarks/planner.py --graphs FOLDER --json benchmarks/results/planner.json

Training steps of the models of ``traces.py`` are recorded and planned in eager's order; ``--traces`` names some of them.
FOLDER holds instances as node-link JSON; budgets and published figures are those of FastSA (NeurIPS 2023), table 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.planning.check.check import check
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json, load
from lowtide.planning.search.annealing import AnnealedRow
from lowtide.planning.solver.figures import to_json
from lowtide.planning.solver.solve import Order, Solver
from lowtide.recording.graph import graph_of, operator_of

CELLS: dict[str, dict[int, float | None]] = {
    "rl1": {90: 0.0, 80: 0.3, 70: 2.2, 60: None},
    "rl2": {90: 0.0, 80: 0.0, 70: None, 60: None},
    "rl3": {90: 0.03, 80: 2.3, 70: None, 60: None},
    "rl4": {90: 0.4, 80: 2.5, 70: None, 60: None},
    "fcn8": {80: 0.1, 70: 3.0},
    "resnet50": {90: 0.1, 80: 0.3, 70: 0.8, 50: None},
    "unet": {90: None, 80: None, 70: None, 60: None, 50: None},
    "mobilenet": {80: None, 60: None, 50: None},
    "vgg19": {90: None, 80: None},
    "segnet": {80: None, 50: None},
}
"""Per instance and share of the given order's peak, the least published extra time in percent."""
TRACES = ("gpt2", "bert", "llama", "vit", "resnet", "unet", "unrolled", "lstm")
SHARES = (50, 30)
"""Of what the given order adds to its floor: at half one instant decides, below it many do."""
LAYERED = ((100, 250, 500, 1000), (0.3, 0.6, 1.0), (1, 2))
"""Operators, widths and seeds of random layered graphs."""
SHARES_OF_LAYERED = (90, 80, 70, 50)
"""Of the given order's peak, in percent."""
HARD = {"resnet", "unrolled"}
"""Those of which several instants decide at the lowest share: there the time limit matters."""
LIMITS, TURNS = (2.0, 4.0, 8.0, 16.0), 3
"""Time limits in seconds, and searches with each."""
SIZES = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SHORT, LONG = (20_000, 3.0), 12.0
"""Graphs of up to that many operators are searched for so many seconds, longer ones for the second number."""


def blocks(n: int, seed: int = 1) -> Graph:
    """About n operators: a forward of repeated blocks with a skip, and its backward, in eager order."""
    rnd = np.random.default_rng(seed)
    kinds = [(int(rnd.integers(1, 9)) << 20, float(rnd.choice((1, 1, 2, 20))) * 1e-4) for _ in range(10)]
    depth = n // (2 * len(kinds))
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, Any]] = []

    def node(name: str, size: int, seconds: float, parents: list[str]) -> str:
        nodes.append({"id": name, "bytes": size, "seconds": seconds, "module": name.partition("/")[0]})
        links.extend({"source": p, "target": name} for p in dict.fromkeys(parents))
        return name

    last = node("input", 4 << 20, 0.0, [])
    forward: list[tuple[str, int, float, list[str]]] = []
    for b in range(depth):
        skip = last
        for k, (size, seconds) in enumerate(kinds):
            parents = [last, skip] if k == len(kinds) - 1 else [last]
            last = node(f"block{b}/f{k}", size, seconds, parents)
            forward.append((last, size, seconds, parents))
    gradient = node("loss", 4, 1e-4, [last])
    for name, size, seconds, parents in reversed(forward):
        gradient = node(name.replace("/f", "/b"), size, 2 * seconds, [gradient, name, *parents])
    return from_json({"graph": {"name": f"blocks {len(nodes)}"}, "nodes": nodes, "links": links})


def instances(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Every cell of the table whose instance is there."""
    rows = []
    for name, cells in CELLS.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        solver = Solver(load(path), order=Order.FREE)
        lowest = solver.lowest(seconds=seconds)
        given = solver.given.peak_bytes
        order = {"best_order_share": lowest.timeline.peak_bytes / given, "order_bound_share": lowest.peak_bound.bytes / given}
        for share, published in cells.items():
            answer = Solver(load(path), order=Order.FREE).at(given * share // 100, seconds=seconds)
            base = answer.graph.base_seconds
            row = {
                "graph": name,
                "budget_percent": share,
                "status": answer.status.value,
                "extra_percent": 100 * answer.extra_fraction,
                "bound_percent": 100 * answer.time_bound.seconds / base,
                "published_percent": published,
                "solve_seconds": answer.solve_seconds,
                "verified": check(answer.graph, to_json(answer)) == [],
                **order,
            }
            rows.append(row)
            print(
                f"{name:10} {share} %  extra {row['extra_percent']:7.3f} %  bound {row['bound_percent']:7.3f} %  "
                f"published {published}  {row['status']}, {row['solve_seconds']:.1f} s",
                flush=True,
            )
    return rows


def layered(n: int, width: float, seed: int) -> Graph:
    """A random layered graph of n operators, like those of Gagrani et al., "Neural topological ordering" (NeurIPS 2022).

    Layers have ``width * sqrt(n)`` operators on average, give or take three quarters. An operator reads one of the layer
    before, each other of them with a probability of 0.2, and with one of 0.14 one of any layer before that.
    """
    rnd = np.random.default_rng([n, round(100 * width), seed])
    layers: list[list[int]] = []
    links: list[tuple[int, int]] = []
    made = 0
    while made < n:
        count = min(n - made, max(1, round(width * n**0.5 * rnd.uniform(0.25, 1.75))))
        layer = list(range(made, made + count))
        for v in layer:
            if layers:
                before = layers[-1]
                sure = int(rnd.choice(before))
                links += [(u, v) for u in before if u == sure or rnd.random() < 0.2]
            if len(layers) > 1 and rnd.random() < 0.14:
                links.append((int(rnd.choice(layers[int(rnd.integers(len(layers) - 1))])), v))
        layers.append(layer)
        made += count
    nodes = [{"id": v, "bytes": int(rnd.integers(1, 5000)), "seconds": int(rnd.integers(0, 1000))} for v in range(n)]
    about = {"name": f"layered {n} {width} {seed}"}
    return from_json({"graph": about, "nodes": nodes, "links": [{"source": a, "target": b} for a, b in links]})


def layers(seconds: float) -> list[dict[str, Any]]:
    """Random layered graphs in free order, at shares of their given order's peak, down to the floor."""
    rows = []
    for n, width, seed in itertools.product(*LAYERED):
        graph = layered(n, width, seed)
        solver = Solver(graph, order=Order.FREE)
        given, floor = solver.given.peak_bytes, solver.told_floor.bytes
        for share in SHARES_OF_LAYERED:
            budget = given * share // 100
            if floor > budget:
                continue
            answer = Solver(graph, order=Order.FREE).at(budget, seconds=seconds)
            row = {
                "operators": n, "width": width, "seed": seed, "budget_percent": share, "status": answer.status.value,
                "extra_percent": 100 * answer.extra_fraction if answer.status.has_plan else None,
                "bound_percent": 100 * answer.time_bound.seconds / graph.base_seconds,
                "floor_percent": 100 * floor / given, "solve_seconds": answer.solve_seconds,
                "verified": check(answer.graph, to_json(answer)) == [],
            }  # fmt: skip
            rows.append(row)
            print(f"layered {n:5} {width} {seed}  {share} %  {row['status']:10} extra {row['extra_percent']}  "
                  f"bound {row['bound_percent']:.3f} %  floor {row['floor_percent']:.0f} %", flush=True)
    return rows


def scale(sizes: tuple[int, ...], share: int) -> list[dict[str, Any]]:
    """Repeated blocks at a share (in percent) of what the given order adds to its floor."""
    rows = []
    for n in sizes:
        graph = blocks(n)
        began = time.perf_counter()
        solver = Solver(graph)
        budget = solver.floor.bytes + (solver.given.peak_bytes - solver.floor.bytes) * share // 100
        fitting: list[float] = []

        def hear(found: AnnealedRow, began: float = began, fitting: list[float] = fitting) -> None:
            if not found.over_bytes:
                fitting.append(time.perf_counter() - began)

        answer = solver.at(budget, seconds=SHORT[1] if n <= SHORT[0] else LONG, progress=hear)
        row = {
            "operators": len(graph.nodes),
            "share_percent": share,
            "first_plan_seconds": fitting[0] if fitting else None,
            "seconds": time.perf_counter() - began,
            "status": answer.status.value,
            "extra_percent": 100 * answer.extra_fraction,
            "bound_percent": 100 * answer.time_bound.seconds / graph.base_seconds,
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        rows.append(row)
        print(f"{row['operators']:6} operators  {share} %  first plan {row['first_plan_seconds']} s  "
              f"{row['seconds']:6.1f} s  extra {row['extra_percent']:.3f} %  bound "
              f"{row['bound_percent']:.3f} %  {row['status']}  {row['resident_bytes'] >> 20} MiB", flush=True)
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Time and gap against the number of operators, as a picture (needs matplotlib)."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    every, rows = rows, [row for row in rows if row["share_percent"] == SHARES[0]]
    sizes = [row["operators"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for share, colour in zip(SHARES, ("#1f6fb2", "#b36b00"), strict=True):
        here = [row for row in every if row["share_percent"] == share]
        first = [row["first_plan_seconds"] for row in here]
        left.loglog([row["operators"] for row in here], first, "o-", color=colour, label=f"until the first plan, at {share} %")
    least = rows[-1]["first_plan_seconds"] / sizes[-1]
    left.loglog(sizes, [least * n for n in sizes], "--", color="#7b8794", label="in proportion to the operators")
    left.set_ylabel("seconds")
    left.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10])
    left.yaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s:g}"))
    left.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    left.legend(frameon=False)
    for share, colour in zip(SHARES, ("#1f6fb2", "#b36b00"), strict=True):
        here = [row for row in every if row["share_percent"] == share]
        operators = [row["operators"] for row in here]
        right.semilogx(operators, [row["extra_percent"] for row in here], "o-", color=colour, label=f"plan at {share} %")
        right.semilogx(operators, [row["bound_percent"] for row in here], "x--", color="#b42318", label=f"bound at {share} %")
    right.set_ylim(0, 1.2 * max(row["extra_percent"] for row in every))
    right.set_ylabel("extra time, % of the graph's")
    right.legend(frameon=False, loc="center right")
    for axis in (left, right):
        axis.set_xlabel("operators")
        axis.set_xticks(sizes, minor=False)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1000:.0f}k"))
        axis.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def recording(name: str) -> tuple[Graph, int]:
    """The last of four recorded steps of a model, and the bytes that were there before it."""
    from lowtide.recording.reader import read
    from lowtide.recording.recorded_step import laid_out
    from lowtide.studies.size.trial import Target, record
    from lowtide.studies.size.vary import ScriptSetting

    target = Target(script=str(Path(__file__).parent / "traces.py"), module=False, seconds=600)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.lowtide")
        record(target, ScriptSetting(arguments=(name,), sizes={}), 4, file)
        step = laid_out(read(file))[-1]
    return graph_of(step), step.row.start_bytes


def recorded(recordings: dict[str, tuple[Graph, int]], seconds: float) -> list[dict[str, Any]]:
    """Recorded steps in fixed order, at shares of what the last step adds to what was there before it."""
    rows = []
    for name, (graph, start) in recordings.items():
        solver = Solver(graph)
        given, base = solver.given.peak_bytes, solver.graph.base_seconds
        for share in (75, 50, 25):
            answer = solver.at(start + (given - start) * share // 100, seconds=seconds)
            row = {
                "recording": name,
                "operators": len(operator_of(graph)),
                "share_percent": share,
                "status": answer.status.value,
                "extra_percent": 100 * answer.extra_fraction,
                "bound_percent": 100 * answer.time_bound.seconds / base,
                "floor_percent": 100 * (answer.peak_bound.bytes - start) / (given - start),
                "solve_seconds": answer.solve_seconds,
            }
            rows.append(row)
            print(
                f"{name:10} {share} %  extra {row['extra_percent']:7.3f} %  bound {row['bound_percent']:7.3f} %  "
                f"floor {row['floor_percent']:.0f} %  {row['status']}, {row['solve_seconds']:.1f} s",
                flush=True,
            )
    return rows


def anytime(recordings: dict[str, tuple[Graph, int]]) -> list[dict[str, Any]]:
    """The same at the lowest share with ever higher limits, several searches of each in turns."""
    rows = []
    for name, (graph, start) in recordings.items():
        if name not in HARD:
            continue
        for turn, limit in itertools.product(range(TURNS), LIMITS):
            solver = Solver(graph)
            answer = solver.at(start + (solver.given.peak_bytes - start) * 25 // 100, seconds=limit)
            row = {
                "recording": name,
                "turn": turn,
                "limit_seconds": limit,
                "extra_percent": 100 * answer.extra_fraction,
                "bound_percent": 100 * answer.time_bound.seconds / graph.base_seconds,
                "solve_seconds": answer.solve_seconds,
            }
            rows.append(row)
            print(f"{name:10} {limit:4.1f} s  extra {row['extra_percent']:7.3f} %  bound {row['bound_percent']:7.3f} %  "
                  f"took {row['solve_seconds']:.2f} s", flush=True)
    return rows


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--traces", nargs="*", default=TRACES)
    parser.add_argument("--layered", action="store_true", help="plan random layered graphs, too: 13 minutes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    recordings = {name: recording(name) for name in given.traces}
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "instances": instances(given.graphs, given.seconds) if given.graphs else [],
        "layered": layers(given.seconds) if given.layered else [],
        "recordings": recorded(recordings, given.seconds),
        "anytime": anytime(recordings),
        "scale": [row for share in SHARES for row in scale(tuple(given.sizes), share)],
    }
    if given.picture:
        draw(found["scale"], given.picture)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
