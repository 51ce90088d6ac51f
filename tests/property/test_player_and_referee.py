"""Law: the player that the runtime follows counts for a unit's plan what the referee of graphs counts.

The unit becomes a graph, the needs at which something is recomputed or fetched become moves before them, and the referee plays
the schedule that unfolds from them. Two rules differ, and are handled separately here:

* The player runs an operator again beside those of its outputs that are still there; a graph's schedule first frees these, and
  is refused if the script holds one of them.
* The player runs an in-place operator on a clone of what others still read; a graph's schedule does so only if it is read
  again.

If neither occurs, both count the same bytes at every event. In all cases both take the same seconds, and the player never
stands lower than the referee: a bound proven on the graph holds for the unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from property.strategies import plans

from lowtide.base.errors import StructureError
from lowtide.base.trace import Op
from lowtide.planning import referee
from lowtide.planning.graph import Graph, Node
from lowtide.planning.schedule import Act, Move, unfold
from lowtide.planning.unit import simulate
from lowtide.planning.unit.lp_plan import layout
from lowtide.planning.unit.problem import Away, Key, Problem
from lowtide.planning.unit.simulate import UnitTimeline

Decisions = Mapping[Key, Away]


def kept(problem: Problem, decisions: Decisions, timeline: UnitTimeline) -> Graph:
    """The unit's graph with a node after every event (``after 3``) that reads what the player has in memory then."""
    graph = layout(problem).graph
    ends = simulate._Play(problem, decisions).ends
    events = len(problem.trace.events)
    present: list[list[int]] = [[] for _ in range(events)]
    for v, buffer in enumerate(problem.trace.buffers):
        for e in range(buffer.born + 1, min(ends.get(v, problem.end(v)), events - 1) + 1):
            if buffer.counted and not timeline.absent(v, e) and problem.overwritten.get(v) != e:
                present[e].append(v)
    nodes = list(graph.nodes)
    at = {str(node.id): i for i, node in enumerate(nodes)}
    for e, values in enumerate(present):
        parents = tuple(at[f"value {v}"] for v in values)
        nodes.append(Node(id=f"after {e}", bytes=0, seconds=0.0, parents=parents, recompute=False))
    order = [i for e in range(-1, events) for i in _of_event(nodes, e)]
    order = [i for i in range(len(graph.nodes)) if i not in set(order)] + order
    where = {old: new for new, old in enumerate(order)}
    moved = [
        replace(
            node, parents=tuple(where[p] for p in node.parents),
            made_with=None if node.made_with is None else where[node.made_with],
            overwrites=None if node.overwrites is None else where[node.overwrites],
            held_until=None if node.held_until is None else where[node.held_until],
        )
        for node in (nodes[i] for i in order)
    ]
    return Graph(nodes=tuple(moved), order=tuple(range(len(moved))), offload=graph.offload)


def _of_event(nodes: list[Node], event: int) -> list[int]:
    """An event, the values that it makes, and the node after it."""
    found = [i for i, node in enumerate(nodes) if str(node.id) == f"event {event}"]
    made = [i for i, node in enumerate(nodes) if found and node.made_with == found[0]]
    return [*found, *made, *(i for i, node in enumerate(nodes) if str(node.id) == f"after {event}")]


def refereed(problem: Problem, decisions: Decisions, timeline: UnitTimeline) -> tuple[list[int], float]:
    """The highest point within each event, and the total seconds, including writes of values that are never fetched."""
    graph = kept(problem, decisions, timeline)
    at = {str(node.id): i for i, node in enumerate(graph.nodes)}
    row: list[Move] = [Move(Act.COMPUTE, i) for i, node in enumerate(graph.nodes) if node.made_with is None and not node.resident
                       and str(node.id).startswith("value")]
    remakes = {problem.needs[r.value][r.need][0]: r for r in timeline.remakes}
    for e in range(len(problem.trace.events)):
        again = remakes.get(e)
        if again is not None:
            row += [Move(Act.FETCH, at[f"value {v}"]) for v in again.fetched]
            row += [Move(Act.COMPUTE, at[f"event {op}"]) for op in again.ops]
        row += [Move(Act.COMPUTE, at[f"event {e}"]), Move(Act.COMPUTE, at[f"after {e}"])]
    schedule = unfold(graph, tuple(row))
    played = referee.play(graph, schedule)
    after = {at[f"after {e}"] for e in range(len(problem.trace.events))}
    heights: list[int] = []
    high = graph.resident_bytes
    for t, move in enumerate(schedule):
        if move.act is Act.COMPUTE and move.node in after:
            heights.append(high)
            high = graph.resident_bytes
        elif move.act in (Act.COMPUTE, Act.UPDATE, Act.FETCH):
            high = max(high, int(played.bytes_at[t]))
    unread = timeline.moved_bytes - played.moved_bytes  # of values that are never fetched: a row writes only what it fetches
    assert unread >= 0
    return heights, played.seconds + (unread / problem.bandwidth.write if problem.bandwidth is not None else 0.0)


def again(problem: Problem, timeline: UnitTimeline) -> list[tuple[int, Op]]:
    """Operators that run again, each with the event before which it does so."""
    events = problem.trace.events
    found = []
    for remake in timeline.remakes:
        for at in remake.ops:
            op = events[at]
            assert isinstance(op, Op)
            found.append((problem.needs[remake.value][remake.need][0], op))
    return found


def makes_what_is_held(problem: Problem, timeline: UnitTimeline) -> bool:
    """Whether an operator runs again beside one of its own outputs that the script still holds."""
    buffers = problem.trace.buffers
    made = ((e, v) for e, op in again(problem, timeline) for v in (*op.writes, *(new for _, new in op.overwrites)))
    return any(buffers[v].held_until >= e and not timeline.absent(v, e) for e, v in made)


def differs(problem: Problem, timeline: UnitTimeline) -> bool:
    """Whether a replay runs an operator with several outputs or one that writes in place."""
    return any(op.overwrites or len(op.writes) > 1 for _, op in again(problem, timeline))


@given(plans())
def test_the_player_agrees_with_the_referee_on_seconds_and_bytes(plan: tuple[Problem, dict[Key, Away]]) -> None:
    """Seconds always agree. Bytes agree at every event, except that the player may stand higher where the two rules differ; a
    replay beside an output that the script holds is refused by the referee.
    """
    priced, decisions = plan
    problem = replace(priced, replay_seconds=0.0, fetch_seconds=0.0)  # a graph has no price of the interception
    timeline = simulate.play(problem, decisions)
    if makes_what_is_held(problem, timeline):
        with pytest.raises(StructureError, match="is held until"):
            refereed(problem, decisions, timeline)
        return
    heights, seconds = refereed(problem, decisions, timeline)
    assert seconds == pytest.approx(problem.seconds + timeline.extra_seconds)
    played = [int(x) for x in timeline.peak_bytes_at]
    if differs(problem, timeline):
        assert all(mine <= theirs for mine, theirs in zip(heights, played, strict=True))
    else:
        assert heights == played


@given(plans())
def test_peaks_agree_where_every_replayed_operator_has_one_output(plan: tuple[Problem, dict[Key, Away]]) -> None:
    problem, decisions = plan
    timeline = simulate.play(problem, decisions)
    assume(timeline.remakes and not differs(problem, timeline))
    heights, _ = refereed(problem, decisions, timeline)
    assert max(heights) == timeline.peak_bytes
