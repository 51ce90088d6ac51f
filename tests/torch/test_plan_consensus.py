"""Law: ranks with equal units run the first rank's plan where it fits; the others keep their own.

The process group is a fake: what a collective gathers or broadcasts is given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowtide.planning.unit.plan_file import plan_of
from lowtide.runtime.control import plan_consensus
from torch import nn

import lowtide


class Group:
    """Two ranks, of which this is one; what the other one sends is given."""

    def __init__(self, rank: int, other: Any = None) -> None:
        self.rank, self.other = rank, other

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return self.rank

    def all_gather_object(self, found: list[Any], mine: Any) -> None:
        found[self.rank], found[1 - self.rank] = mine, self.other

    def broadcast_object_list(self, shared: list[Any], src: int) -> None:
        if self.rank != src:
            shared[0] = self.other


def solved(monkeypatch: pytest.MonkeyPatch, layers: int, share: float) -> Any:
    """A recorded unit, and its plan at a share of the bytes that it adds."""
    monkeypatch.undo()
    torch.manual_seed(0)
    net = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(256, 256), nn.GELU())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with lowtide.budget("1GiB") as run:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(256, 256)).square().mean().backward()
            optimizer.step()
    (entry, *_) = run._runtime.knowledge.recordings
    problem = entry.problem
    lowest = entry.front.at(problem.plain_peak)
    assert lowest.state is not None
    room = int(problem.base_bytes + share * (problem.plain_peak - problem.base_bytes))
    return problem, entry.front.at(room)


@pytest.mark.parametrize(("mine", "theirs", "agreed"), [(3, 5, 3), (None, 5, 5), (None, None, None)])
def test_the_smallest_room_of_any_rank_counts(
    monkeypatch: pytest.MonkeyPatch, mine: int | None, theirs: int | None, agreed: int | None
) -> None:
    monkeypatch.setattr(plan_consensus, "dist", Group(0, theirs))
    assert plan_consensus.on_room(mine) == agreed


def test_consensus_is_wanted_only_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plan_consensus.wanted()
    monkeypatch.setattr(plan_consensus, "dist", Group(0))
    assert plan_consensus.wanted()


def test_the_first_ranks_plan_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tight = solved(monkeypatch, 6, 0.7)
    _, loose = solved(monkeypatch, 6, 0.9)
    assert tight.state.decisions
    monkeypatch.setattr(plan_consensus, "dist", Group(1, plan_of(problem, tight)))
    taken = plan_consensus.on_plan(problem, loose)
    assert taken is not None
    assert taken.decisions == tight.state.decisions
    assert taken.timeline.peak_bytes <= loose.budget_bytes


def test_a_rank_keeps_its_own_plan_where_the_first_ranks_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tight = solved(monkeypatch, 6, 0.7)
    _, loose = solved(monkeypatch, 6, 0.9)
    monkeypatch.setattr(plan_consensus, "dist", Group(1, plan_of(problem, loose)))
    assert plan_consensus.on_plan(problem, tight) is None


def test_a_rank_keeps_its_own_plan_where_its_unit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first rank has no plan."""
    problem, plan = solved(monkeypatch, 6, 0.7)
    other, others = solved(monkeypatch, 5, 0.7)
    monkeypatch.setattr(plan_consensus, "dist", Group(1, plan_of(other, others)))
    assert plan_consensus.on_plan(problem, plan) is None
    monkeypatch.setattr(plan_consensus, "dist", Group(1, None))
    assert plan_consensus.on_plan(problem, plan) is None, "the first rank has none"
