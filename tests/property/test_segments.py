"""Laws: a plan reserves under torch's caching allocator what a naive second allocator reserves, request by request.

A plan that must fit a device does, and the checker refuses every false figure about it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowtide.cli.main import main
from lowtide.planning.solver.figures import to_json
from lowtide.planning.check.check import check
from lowtide.planning.check.caching_allocator import Device
from lowtide.planning.graph import Graph, Node
from lowtide.planning.schedule import plain_row, unfold
from lowtide.planning.solver.caching_allocator import Allocator, reserved, within
from lowtide.planning.solver.solve import Solver
from lowtide.planning.status import Status

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.sampled_from((1, 512, 513, 300 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB - 1, 10 * MIB, 11 * MIB, 33 * MIB))


@settings(max_examples=300, deadline=None)
@given(
    limit=st.none() | st.integers(min_value=2 * MIB, max_value=90 * MIB),
    requests=st.lists(st.tuples(SIZES, st.floats(0, 1)), min_size=1, max_size=60),
)
def test_both_allocators_reserve_the_same_for_any_requests(limit: int | None, requests: list[tuple[int, float]]) -> None:
    fast, naive = Allocator(limit), Device(limit)
    held = []
    for size, chance in requests:
        if held and chance < 0.45:
            block, piece = held.pop(int(chance / 0.45 * len(held)))
            fast.give(block)
            naive.release(piece)
            continue
        block, piece = fast.take(size), naive.allocate(size)
        assert isinstance(block, int) == (piece is None)
        assert fast.reserved_bytes == naive.taken
        assert fast.peak_bytes == naive.peak
        if piece is None:
            assert block > 0
        else:
            held.append((block, piece))


def test_segment_sizes_are_those_of_torchs_source() -> None:
    """Bytes taken from the device for single requests (kSmallBuffer, kLargeBuffer, kRoundLarge)."""
    cases = ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34))
    for size, segment in cases:
        allocator = Allocator()
        allocator.take(size)
        assert allocator.reserved_bytes == segment * MIB, size
    allocator = Allocator()
    for _ in range(4):
        allocator.take(5 * MIB)  # four of them fill a segment of 20 MiB
    assert allocator.reserved_bytes == 20 * MIB
    allocator.take(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def _chain(length: int, size: int) -> Graph:
    """A forward and its backward: each backward operator reads the activation of its forward operator."""
    nodes = [Node(id=f"f{i}", bytes=size + 4096 * i, seconds=1.0, parents=(i - 1,) if i else ()) for i in range(length)]
    nodes += [
        Node(id=f"b{i}", bytes=size // 2, seconds=1.0, parents=(length + k - 1, i) if k else (i,), workspace_bytes=3 * MIB)
        for k, i in enumerate(reversed(range(length)))
    ]
    return Graph(name="chain", nodes=tuple(nodes), order=tuple(range(len(nodes))))


def test_a_plan_for_a_device_fits_its_reserved_bytes() -> None:
    """A plan for the same budget in allocated bytes does not fit once segments are counted. The plan for the device fits,
    costs no less than the bound for the allocated bytes, and the checker refuses a wrong figure of reserved bytes.
    """
    graph = _chain(14, 7 * MIB).rounded(512)
    solver = Solver(graph)
    plain = reserved(graph, unfold(graph, plain_row(graph)))
    assert plain.peak_bytes > solver.given.peak_bytes
    budget = int(0.55 * plain.peak_bytes)
    loose = solver.at(budget, seconds=600)  # so small a graph ends its search by itself
    answer, held = within(budget, lambda room, _: solver.at(room, seconds=600))
    assert reserved(graph, loose.schedule, budget).short_bytes, "what is allocated fits, what is reserved does not"
    assert answer.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert held.peak_bytes <= budget
    assert not held.short_bytes
    assert answer.extra_seconds >= loose.time_bound.seconds
    told = to_json(answer, rounding_bytes=512) | {"allocator": "cuda", "reserved_bytes": held.peak_bytes}
    assert check(graph, json.loads(json.dumps(told))) == []
    assert any("reserves" in line for line in check(graph, json.loads(json.dumps(told | {"reserved_bytes": held.peak_bytes - 512}))))
    tight = json.loads(json.dumps(to_json(loose, rounding_bytes=512) | {"allocator": "cuda", "reserved_bytes": budget}))
    assert any("exceed the budget" in line for line in check(graph, tight))


def test_a_device_below_the_floor_is_infeasible() -> None:
    solver = Solver(_chain(6, 7 * MIB).rounded(512))
    answer, _ = within(solver.floor.bytes - 512, lambda room, _: solver.at(room, seconds=600))
    assert answer.status is Status.INFEASIBLE


def _code(*words: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def test_the_command_counts_reserved_bytes_against_the_budget(tmp_path: Path) -> None:
    """`lowtide plan --allocator cuda` reports reserved bytes within the budget, `--check` verifies them, and `--curve` is
    refused with it.
    """
    graph = _chain(10, 7 * MIB)
    nodes = [
        {"id": n.id, "bytes": n.bytes, "seconds": n.seconds, "workspace_bytes": n.workspace_bytes} for n in graph.nodes
    ]
    links = [{"source": graph.nodes[p].id, "target": n.id} for n in graph.nodes for p in n.parents]
    (tmp_path / "g.json").write_text(json.dumps({"directed": True, "nodes": nodes, "links": links}))
    words = ["plan", str(tmp_path / "g.json"), "--allocator", "cuda", "--seconds", "600", "--json", str(tmp_path / "plan.json")]
    assert _code(*words, "--budget", "70MiB") == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["allocator"] == "cuda"
    assert found["peak_bytes"] < found["reserved_bytes"] <= 70 * MIB
    assert _code(*words, "--budget", "70MiB", "--html", str(tmp_path / "plan.html")) == 0
    assert "reserved on the device" in (tmp_path / "plan.html").read_text()
    assert _code("plan", str(tmp_path / "g.json"), "--check", str(tmp_path / "plan.json")) == 0
    assert _code(*words, "--curve") == 2
