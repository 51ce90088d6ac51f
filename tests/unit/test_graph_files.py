"""Graph files: one line says what is wrong with a file, and the classic strategies do what the literature says."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest

from lowtide.base.errors import GraphError
from lowtide.planning.search import classics
from lowtide.planning.search.exhaustive import extreme_order
from lowtide.planning.graph_arrays import game_of
from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json, load, to_json
from lowtide.planning.referee import play
from lowtide.planning.schedule import plain_row, unfold

GOOD: dict[str, Any] = {
    "nodes": [{"id": "a", "bytes": 4, "seconds": 1}, {"id": "b", "bytes": 2, "seconds": 1}],
    "links": [{"source": "a", "target": "b"}],
}


def _with(node: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    nodes = [*GOOD["nodes"], node] if node is not None else GOOD["nodes"]
    return {**GOOD, "nodes": nodes, **more}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "not a node-link graph"),
        ({"nodes": [], "links": []}, "the graph has no nodes"),
        (_with(links=[{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]), "cycle"),
        (_with(links=[{"source": "a", "target": "z"}]), "unknown node 'z'"),
        (_with(links=[{"source": "a", "target": "a"}]), "reads itself"),
        (_with({"id": "c", "bytes": -1}), "below zero"),
        (_with({"id": "c", "bytes": float("nan")}), "whole number"),
        (_with({"id": "c", "bytes": 1.5}), "whole number"),
        (_with({"id": "c", "bytes": 1 << 60}), "more than any machine"),
        (_with({"id": "c", "bytes": 1e300}), "more than any machine"),
        (_with({"id": "c"}), "whole number"),
        (_with({"id": "c", "bytes": True}), "whole number"),
        (_with({"id": "c", "bytes": 1, "seconds": float("inf")}), '"seconds"'),
        (_with({"id": "c", "bytes": 1, "seconds": "1"}), '"seconds"'),
        (_with({"id": "a", "bytes": 1}), "two nodes have the id 'a'"),
        (_with({"id": None, "bytes": 1}), "must be a number or a string"),
        (_with({"bytes": 1}), 'no "id"'),
        (_with(graph={"order": ["b", "a"]}), "before 'a'"),
        (_with(graph={"order": ["a"]}), "leaves out node 'b'"),
        (_with(graph={"order": ["a", "a", "b"]}), "twice"),
        (_with({"id": "c", "bytes": 3, "overwrites": "a"}), "cannot overwrite"),
        (_with({"id": "c", "bytes": 3, "view_of": "a"}), "no bytes of its own"),
        (_with({"id": "c", "bytes": 3, "made_with": "c"}), "names itself"),
        (_with({"id": "c", "bytes": 3, "keep": 1}), "true or false"),
        (_with(graph={"offload": {"write_bytes_per_second": 0, "read_bytes_per_second": 1}}), "one byte per second"),
        (_with(graph={"offload": {"write_bytes_per_second": 5e-324, "read_bytes_per_second": 1}}), "one byte per second"),
        (_with({"id": "c", "bytes": 10**400}), "more than any machine"),
        ({"nodes": [{"id": "w", "bytes": 1, "resident": True}, {"id": "c", "bytes": 1, "held_until": "w"}], "links": []},
         "not a resident node"),
        ({"nodes": [{"id": "a", "bytes": 1}, *({"id": i, "bytes": 1, "overwrites": "a"} for i in "cd")], "links": []},
         "both overwrite"),
        (_with({"id": "w", "bytes": 1, "resident": True, "held_until": "a"}), "is resident"),
        (_with(graph={"offload": {"speed": 1}}), "offload"),
    ],
)  # fmt: skip
def test_a_bad_graph_is_refused_in_one_line(data: Any, said: str) -> None:
    """The line names the file and the first thing that is wrong."""
    with pytest.raises(GraphError) as caught:
        from_json(data, source="g.json")
    text = str(caught.value)
    assert text.startswith("g.json: ")
    assert said in text
    assert "\n" not in text


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, binary content and an empty file are each refused with the reason."""
    (tmp_path / "x.json").write_bytes(b"\xff\x00{")
    (tmp_path / "empty.json").write_bytes(b" \n")
    said = {"none.json": "cannot read", ".": "cannot read", "x.json": "is not JSON", "empty.json": "is empty"}
    for name, text in said.items():
        with pytest.raises(GraphError, match=text):
            load(tmp_path / name)


def chain(n: int) -> Graph:
    """Operators f0 … fn, each reading the one before, and their backwards bn … b1."""
    forward, backward = [f"f{i}" for i in range(n + 1)], [f"b{i}" for i in range(n, 0, -1)]
    links = [{"source": a, "target": b} for a, b in zip(forward, forward[1:], strict=False)]
    before = forward[-1]
    for i, b in zip(range(n, 0, -1), backward, strict=True):
        links += [{"source": before, "target": b}, {"source": f"f{i - 1}", "target": b}]
        before = b
    return from_json({"nodes": [{"id": x, "bytes": 1, "seconds": 1} for x in forward + backward], "links": links})


def _played(graph: Graph, ops: tuple[int, ...]) -> tuple[int, float]:
    timeline = play(graph, unfold(graph, game_of(graph).row(ops)))
    return timeline.peak_bytes, timeline.seconds


@pytest.mark.parametrize("n", [4, 9, 25, 64])
def test_sqrt_n_peaks_near_two_roots_for_one_more_forward(n: int) -> None:
    """Chen et al. 2016: the peak is about 2 sqrt(n) values, and at most one more forward is run."""
    graph = chain(n)
    peak, seconds = _played(graph, classics.segments(game_of(graph)))
    assert peak <= 2 * n**0.5 + 3
    assert seconds <= len(graph.nodes) + n


@pytest.mark.parametrize(("strategy", "again"), [("keep-none", 17), ("sqrt-n", 4), ("greedy", 5)])
def test_a_value_the_script_holds_is_not_recomputed(strategy: str, again: int) -> None:
    """A value that the script holds (`held_until`) is in memory: no strategy runs its operator again until it is released."""
    n = 9
    told = to_json(chain(n))
    for node in told["nodes"][1 : n - 1]:
        node["held_until"] = told["nodes"][n + 4]["id"]
    graph = from_json(told)
    ops = classics.STRATEGIES[strategy](game_of(graph), 0)
    free = ops.index(n + 4)  # until it has run, what the script holds is there
    assert all(free < i for v in range(1, n - 1) for i in [i for i, op in enumerate(ops) if op == v][1:])
    assert len(ops) - len(graph.nodes) == again


@pytest.mark.parametrize(("n", "slots"), [(10, 3), (10, 1), (4, 4), (20, 4)])
def test_revolve_runs_as_few_forwards_as_possible(n: int, slots: int) -> None:
    """The number of forward runs equals the minimum, found by trying every place for every kept value."""
    from functools import cache

    @cache
    def least(length: int, free: int) -> int:
        if length <= 1:
            return 0
        if not free:
            return length * (length - 1) // 2
        return min(k + least(length - k, free - 1) + least(k, free) for k in range(1, length))

    graph = chain(n)
    ops = classics.revolve(game_of(graph), slots)
    peak, _ = _played(graph, ops)
    forward = sum(1 for o in ops if o <= n)
    assert forward == least(n, slots) + 2  # f0 and fn also run once
    assert peak <= slots + 4


def test_keep_none_holds_three_values_of_a_chain() -> None:
    """keep-none peaks at three values; keep-all holds the whole forward."""
    graph = chain(16)
    assert _played(graph, classics.keep_none(game_of(graph)))[0] == 3
    assert _played(graph, classics.keep_all(game_of(graph))) == (18, 33.0)


def test_revolve_refuses_a_graph_that_is_not_a_chain() -> None:
    """The error suggests sqrt-n instead."""
    with pytest.raises(GraphError, match="sqrt-n"):
        classics.revolve(game_of(from_json(GOOD)))


def test_extreme_orders_of_a_small_graph_have_known_peaks() -> None:
    """Two branches that join: to finish one before the other begins peaks at 10, the worst order at 17."""
    nodes = [{"id": x, "bytes": b, "seconds": 1} for x, b in (("a", 1), ("p", 8), ("q", 1), ("r", 8), ("s", 1), ("end", 1))]
    links = [("a", "p"), ("p", "q"), ("a", "r"), ("r", "s"), ("q", "end"), ("s", "end")]
    graph = from_json({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in links]})
    peaks = [play(graph, unfold(graph, plain_row(graph, extreme_order(graph, worst=w)))).peak_bytes for w in (False, True)]
    assert peaks == [10, 17]


def test_extreme_orders_match_the_referee_where_values_are_overwritten() -> None:
    """On random graphs with overwritten values the lowest and highest orders have the same peaks as all orders tried one by
    one. Where another operator still reads the old value, or it is kept, the new value needs bytes of its own.
    """
    chance, wrong = random.Random(0), []
    for seed in range(40):
        nodes: list[dict[str, Any]] = []
        for i in range(6):
            old = chance.choice([None, *nodes]) if chance.random() < 0.5 else None
            if old is not None and old["id"] not in {n.get("overwrites") for n in nodes}:
                nodes.append({"id": i, "bytes": old["bytes"], "seconds": 1, "overwrites": old["id"]})
            else:
                nodes.append({"id": i, "bytes": chance.randrange(1, 20), "seconds": 1, "keep": chance.random() < 0.2})
        links = {(n["overwrites"], n["id"]) for n in nodes if "overwrites" in n}
        links |= {(a, b) for b in range(1, 6) for a in range(b) if chance.random() < 0.4}
        graph = from_json({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in sorted(links)]})

        def peak(order: Sequence[int], graph: Graph = graph) -> int:
            return play(graph, unfold(graph, plain_row(graph, tuple(order)))).peak_bytes

        every = [p for p in itertools.permutations(range(6)) if all(p.index(a) < p.index(b) for a, b in links)]
        if (peak(extreme_order(graph)), peak(extreme_order(graph, worst=True))) != (min(map(peak, every)), max(map(peak, every))):
            wrong.append(seed)
    assert not wrong


def test_edges_are_read_as_links(tmp_path: Path) -> None:
    """Newer versions of networkx write "edges" for "links"."""
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"nodes": GOOD["nodes"], "edges": GOOD["links"]}))
    assert load(path).nodes[1].parents == (0,)


def test_classics_and_bounds_answer_without_the_compiled_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no compiler was available, the answer is a plan of the literature that fits, judged and bounded like any other."""
    from lowtide.planning.solver import solve

    monkeypatch.setattr(solve, "library", lambda: None)
    graph = chain(16)
    answer = solve.Solver(graph).at(9)
    assert answer.status in (solve.Status.FEASIBLE, solve.Status.OPTIMAL)
    assert answer.timeline.peak_bytes <= 9
    assert 0 < answer.time_bound.seconds <= answer.extra_seconds
    assert solve.Solver(graph, order=solve.Order.FREE).lowest(seconds=0.1).timeline.peak_bytes == 18


def test_overlapping_transfers_cost_nothing_in_bounds_without_the_compiled_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is written and read while long operators run: the schedule by hand adds no seconds, so no bound may say more.
    """
    from lowtide.planning.graph import Graph, Node, Offload
    from lowtide.planning.referee import play
    from lowtide.planning.schedule import Act, Move
    from lowtide.planning.solver import solve

    monkeypatch.setattr(solve, "library", lambda: None)
    once = {"move": False, "recompute": False}
    nodes = (
        Node(id="a", bytes=100, seconds=1.0, recompute=False), Node(id="b", bytes=100, seconds=100.0, **once),
        Node(id="c", bytes=100, seconds=100.0, parents=(1,), **once), Node(id="d", bytes=1, seconds=100.0, parents=(2,), **once),
        Node(id="e", bytes=1, seconds=100.0, parents=(3,), **once), Node(id="f", bytes=1, seconds=1.0, parents=(0, 4)),
    )  # fmt: skip
    tier = Offload(write_bytes_per_second=1.0, read_bytes_per_second=1.0, overlap=True)
    graph = Graph(nodes=nodes, order=tuple(range(6)), offload=tier)
    run, free = Act.COMPUTE, Act.FREE
    moves = ((run, 0), (Act.OFFLOAD, 0), (run, 1), (free, 0), (run, 2), (free, 1), (run, 3), (free, 2), (Act.FETCH, 0), (run, 4), (free, 3), (run, 5))
    by_hand = play(graph, tuple(Move(*move) for move in moves))
    assert (by_hand.seconds, by_hand.peak_bytes) == (graph.base_seconds, 200)
    answer = solve.Solver(graph).at(200, seconds=2.0)
    assert answer.time_bound.seconds <= by_hand.seconds - graph.base_seconds + 1e-9


def test_loading_the_compiled_search_keeps_subnormal_numbers() -> None:
    """Subnormal numbers are not flushed to zero in a process that has loaded the compiled search."""
    code = (
        "from lowtide.planning.search.annealing import library; library(); "
        "import numpy as np; x = np.full(4, 1e-310); assert (x / 2 > 0).all() and 1e-310 / 2 > 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
