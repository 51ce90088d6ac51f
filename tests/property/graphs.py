"""Small random graphs with everything that a graph can have, and all their schedules."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any

from hypothesis import strategies as st

from lowtide.planning.graph import Graph
from lowtide.planning.graph_json import from_json


@st.composite
def plain_graphs(draw: st.DrawFn, *, most: int = 7) -> Graph:
    """Nodes with bytes and seconds, links from lower to higher numbers."""
    n = draw(st.integers(2, most))
    nodes = [{"id": i, "bytes": draw(st.integers(0, 6)), "seconds": draw(st.integers(0, 4))} for i in range(n)]
    links = [{"source": a, "target": b} for b in range(n) for a in range(b) if draw(st.integers(0, 9)) < 4]
    return from_json({"nodes": nodes, "links": links})


@st.composite
def full_graphs(
    draw: st.DrawFn, *, most: int = 6, states: bool = False, overlap: bool = False, once: int = 1, held: bool = False
) -> Graph:
    """Graphs with views, in-place operators, several outputs, workspaces, resident values, and a second board.

    Args:
        draw: Hypothesis's function.
        most: maximum number of nodes.
        states: whether random states are held.
        overlap: whether transfers overlap with computing.
        once: number of operators out of six that may run only once.
        held: whether a script holds values.
    """
    n = draw(st.integers(2, most))
    nodes: list[dict[str, Any]] = []
    links = []
    for i in range(n):
        kind = draw(st.sampled_from(["plain", "plain", "plain", "view", "update", "member", "resident"])) if i else "plain"
        node: dict[str, Any] = {"id": f"n{i}", "bytes": draw(st.integers(0, 5)), "seconds": draw(st.integers(0, 4))}
        earlier = [m["id"] for m in nodes]
        leaders = [m for m in nodes if "made_with" not in m and not m.get("resident")]
        whole = [
            m
            for m in nodes
            if not m.get("resident") and "view_of" not in m and m["id"] not in {x.get("overwrites") for x in nodes}
        ]
        if kind == "resident":
            node |= {"resident": True, "seconds": 0}
            nodes.append(node)
            continue
        if kind == "member" and leaders:
            node |= {"made_with": draw(st.sampled_from(leaders))["id"], "seconds": 0}
            nodes.append(node)
            continue
        if kind == "view" and earlier:
            node |= {"view_of": draw(st.sampled_from(earlier)), "bytes": 0}
        elif kind == "update" and whole:
            old = draw(st.sampled_from(whole))
            node |= {"overwrites": old["id"], "bytes": old["bytes"]}
        node["workspace_bytes"] = draw(st.integers(0, 2))
        node["recompute"] = draw(st.integers(0, 5)) >= once
        node["move"] = draw(st.booleans())
        if states and draw(st.integers(0, 3)) == 0:
            node["state_bytes"] = draw(st.integers(1, 2))
        links += [
            {"source": a, "target": node["id"]} for a in earlier if draw(st.integers(0, 9)) < 3 and a != node.get("view_of")
        ]
        nodes.append(node)
    for node in nodes:
        if not node.get("resident") and draw(st.integers(0, 7)) == 0:
            node["keep"] = True
    for i, node in enumerate(nodes):
        later = [m["id"] for m in nodes[i + 1 :] if not m.get("resident")]
        if held and later and not node.get("resident") and draw(st.integers(0, 3)) == 0:
            node["held_until"] = draw(st.sampled_from(later))
    about: dict[str, Any] = {}
    if draw(st.booleans()):
        about["offload"] = {"write_bytes_per_second": draw(st.sampled_from([1.0, 4.0])), "read_bytes_per_second": 2.0}
        if overlap:
            about["offload"]["overlap"] = True
    return from_json({"nodes": nodes, "links": links, "graph": about})


def cheapest(graph: Graph, budget: int, *, fixed: bool) -> float | None:
    """Seconds of the cheapest of all schedules, found by trying every one; states of the board are sets, one move at a time.
    """
    nodes = graph.nodes
    ops = [v for v in graph.order if nodes[v].made_with is None and not nodes[v].resident]
    resident = {v for v, n in enumerate(nodes) if n.resident}

    def size(board: frozenset[int]) -> int:
        return sum(nodes[v].bytes for v in board | resident)

    def needed(v: int) -> set[int]:
        def bottom(p: int) -> int:
            below = nodes[p].view_of
            return p if below is None else bottom(below)

        return {q for p in nodes[v].parents for q in (p, bottom(p))}

    start = (frozenset[int](), frozenset[int](), frozenset[int]())
    best = {start: 0.0}
    tie = count()
    queue = [(0.0, next(tie), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        board, done, host = state
        if done >= set(ops) and all(v in board for v, n in enumerate(nodes) if n.keep and not n.resident):
            return cost
        following = [(cost, (board - {v}, done, host)) for v in board]
        if graph.offload is not None:
            for v in board - host:
                if nodes[v].move:
                    following.append((cost + nodes[v].bytes / graph.offload.write_bytes_per_second, (board, done, host | {v})))
            for v in host - board:
                after = board | {v}
                if size(after) <= budget:
                    following.append((cost + nodes[v].bytes / graph.offload.read_bytes_per_second, (after, done, host)))
        for i, v in enumerate(ops):
            made = {v} | {u for u, n in enumerate(nodes) if n.made_with == v}
            olds = {o for u in made if (o := nodes[u].overwrites) is not None}
            first = v not in done
            if made & board or not needed(v) <= board | resident or (not first and not nodes[v].recompute):
                continue
            if fixed and first and i and ops[i - 1] not in done:
                continue
            for left in (board, board - olds):
                after = frozenset(left | made)
                if size(after) + nodes[v].workspace_bytes <= budget:
                    following.append((cost + nodes[v].seconds, (after, done | {v}, host)))
        for total, after_state in following:
            if total < best.get(after_state, float("inf")):
                best[after_state] = total
                heapq.heappush(queue, (total, next(tie), after_state))
    return None
