"""How long the planner's walk takes on recorded units: by the compiled player, and by Python alone.

Each model is recorded once under a budget; both walks then take turns on the same problem, and must end in the same states.
One thread. Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import TRACES

import lowtide
import torch
from lowtide.planning.unit import native
from lowtide.planning.unit.greedy import walk
from lowtide.planning.unit.problem import Problem
from lowtide.planning.unit.solve import Front
from process import machine, with_counter

PATIENCE = 600.0
"""Seconds that no walk takes."""


def recorded(name: str) -> Problem:
    """The first unit that is recorded of a model under a budget of 70 % of its step's peak."""
    found: list[Problem] = []
    begin = Front.__init__

    def noting(self: Front, problem: Problem, **how: Any) -> None:
        found.append(problem)
        begin(self, problem, **how)

    torch.manual_seed(0)
    step = TRACES[name]()
    with mock.patch.object(Front, "__init__", noting), lowtide.budget("70%"):
        for _ in range(3):
            step()
    return found[0]


def timed(problem: Problem, *, compiled: bool) -> tuple[float, list[tuple[float, int]]]:
    """Seconds of laying the problem out and walking, and the states' costs."""
    fresh = replace(problem)  # nothing that was worked out before
    assert fresh.plain_peak == problem.plain_peak
    assert len(fresh.remakeable) == len(problem.trace.buffers)
    with mock.patch.object(native, "library", native.library if compiled else lambda: None):
        start = time.perf_counter()
        states = walk(fresh, seconds=PATIENCE)
        return time.perf_counter() - start, [state.cost for state in states]


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json")
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    with_counter()
    torch.set_num_threads(1)
    table = Table(title="seconds of the walk: median (least to most)")
    for column in ("", "events", "states", "compiled", "Python", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    figures: dict[str, Any] = {}
    for name in track(TRACES, description="walking", transient=True):
        problem = recorded(name)
        taken: dict[bool, list[float]] = {True: [], False: []}
        ends = []
        for turn in range(given.turns):
            for compiled in (True, False) if turn % 2 else (False, True):
                seconds, costs = timed(problem, compiled=compiled)
                taken[compiled].append(seconds)
                ends.append(costs)
        assert all(end == ends[0] for end in ends), f"{name}: the walks differ"
        events, states = len(problem.trace.events), len(ends[0])
        figures[name] = {"events": events, "states": states, "compiled": taken[True], "python": taken[False]}
        shown = [f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})" for t in (taken[True], taken[False])]
        ratio = statistics.median(taken[False]) / statistics.median(taken[True])
        table.add_row(name, f"{events:,}", str(states), *shown, f"{ratio:.0f}")
    Console(width=110).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "walks": figures}, indent=1))


if __name__ == "__main__":
    main()
