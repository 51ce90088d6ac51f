"""Laws: what a plan says of a lever is what the lever does; levers and recomputing are chosen together, by their seconds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import heap
from lowtide.allowed import LEVERS, LOSS, PIECES, SLICES, UPDATE
from lowtide.choice import Planned, best, carried, others, sets_of
from lowtide.explain import Step, highest, steps_of
from lowtide.levers import levers_of, peak_of, with_levers
from lowtide.pebble.account import to_json
from lowtide.pebble.check import check
from lowtide.pebble.solve import Solver
from lowtide.store import read
from torch import nn
from torch.nn import functional as F

import lowtide

Loss = Callable[[nn.Module], torch.Tensor]


def _dense() -> nn.Module:
    return nn.Sequential(*(nn.Linear(384, 384) for _ in range(8)))


def _classes() -> nn.Module:
    return nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Linear(64, 4096, bias=False))


def _pictures() -> nn.Module:
    return nn.Sequential(
        *(m for i in range(4) for m in (nn.Conv2d(24 if i else 3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()))
    )


def _square(net: nn.Module) -> torch.Tensor:
    return net(torch.randn(16, 384)).square().mean()


def _words(net: nn.Module) -> torch.Tensor:
    words = torch.randint(4096, (1024,))
    return F.cross_entropy(net(words), words)


def _drawn(net: nn.Module) -> torch.Tensor:
    return net(torch.randn(16, 3, 64, 64)).square().mean()


def _train(make: Callable[[], nn.Module], loss_of: Loss, *, foreach: bool) -> None:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach)
    for _ in range(4):
        loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def _recorded(folder: Path, make: Callable[[], nn.Module], loss_of: Loss, *, foreach: bool) -> Step:
    with lowtide.record(folder / "run.lowtide"):
        _train(make, loss_of, foreach=foreach)
    steps = [s for s in steps_of(read(folder / "run.lowtide")) if s.row.complete and s.row.step > 0]
    found = highest(steps)
    assert found is not None
    return found


def _peak(make: Callable[[], nn.Module], loss_of: Loss, budget: int | None, *, foreach: bool, **how: object) -> int:
    """Of the last step of a run, above what was there."""
    gc.collect()
    outside = heap().tensor_live
    with lowtide.budget(outside + (budget or 4 << 30), **how) as run:  # type: ignore[arg-type]
        _train(make, loss_of, foreach=foreach)
    return run.outcome.steps[-1].peak_bytes - outside


CASES = {
    "update": (UPDATE, _dense, _square, False),
    "update of a list": (UPDATE, _dense, _square, True),
    "loss": (LOSS, _classes, _words, False),
    "pictures": (PIECES, _pictures, _drawn, False),
}


@pytest.mark.parametrize(("name", "make", "loss_of", "foreach"), CASES.values(), ids=CASES)
def test_a_lever_saves_in_a_run_what_the_plan_says(
    tmp_path: Path, name: str, make: Callable[[], nn.Module], loss_of: Loss, *, foreach: bool
) -> None:
    step = _recorded(tmp_path, make, loss_of, foreach=foreach)
    assert name in levers_of(step)
    said = peak_of(with_levers(step, ())) - peak_of(with_levers(step, (name,)))
    plain = _peak(make, loss_of, None, foreach=foreach)
    saved = plain - _peak(make, loss_of, None, foreach=foreach, allow=(name,))
    assert saved > 0.02 * plain or name == PIECES
    assert saved - 0.05 * plain < said < saved + 0.02 * plain


def test_slices_let_a_budget_be_held_that_the_plan_with_them_names(tmp_path: Path) -> None:
    step = _recorded(tmp_path, _dense, _square, foreach=True)
    plain, sliced = (peak_of(with_levers(step, names)) for names in ((), (SLICES,)))
    assert sliced < 0.9 * plain
    outside = plain - _peak(_dense, _square, None, foreach=True)  # what the recording counts besides
    budget = sliced - outside + (64 << 10)
    assert _peak(_dense, _square, budget, foreach=True, without=(UPDATE,)) <= budget


def test_a_step_whose_gradients_are_clipped_is_not_said_to_update_in_the_backward(tmp_path: Path) -> None:
    net = _dense()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with lowtide.record(tmp_path / "run.lowtide"):
        for _ in range(3):
            _square(net).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    step = highest([s for s in steps_of(read(tmp_path / "run.lowtide")) if s.row.complete])
    assert step is not None
    plain, changed = with_levers(step, ()), with_levers(step, (UPDATE,))
    assert peak_of(changed) >= peak_of(plain) - sum(n.bytes for n in plain.nodes if "block" in str(n.id)) // 20


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Step, list[Planned]]:
    """A language model's step at a budget between the floors with and without levers."""
    step = _recorded(tmp_path_factory.mktemp("planned"), _classes, _words, foreach=True)
    solver = Solver(with_levers(step, ()))
    budget = solver.told_floor.bytes + (solver.given.peak_bytes - solver.told_floor.bytes) // 5
    plain = Planned(names=(), solver=solver, answer=solver.at(budget, seconds=2), own_seconds=0.0)
    found = others(step, plain, prepared=lambda g: g, answered=lambda s, _, share, rows: s.at(budget, seconds=2 * share, seeds=rows))
    return step, [plain, *found]


def test_every_set_of_levers_has_a_plan_that_an_independent_checker_verifies(planned: tuple[Step, list[Planned]]) -> None:
    step, sets = planned
    assert {s.names for s in sets} == set(sets_of(levers_of(step)))
    for s in sets:
        assert s.answer is not None
        assert not check(with_levers(step, s.names), to_json(s.answer))


def test_more_levers_never_make_a_plan_slower_but_for_what_they_take_themselves(planned: tuple[Step, list[Planned]]) -> None:
    _, sets = planned
    for few in sets:
        for more in sets:
            if set(few.names) < set(more.names) and few.answer is not None and few.answer.status.has_plan:
                row = carried(more.solver, few.answer)
                if row is None or more.solver.follow(row, None).timeline.peak_bytes > (few.answer.budget_bytes or 0):
                    continue
                assert more.answer is not None
                assert more.answer.extra_seconds <= few.answer.extra_seconds * (1 + 1e-9)


def test_the_fastest_set_that_is_allowed_is_chosen(planned: tuple[Step, list[Planned]]) -> None:
    _, sets = planned
    assert best(sets, ()).names == ()
    assert set(best(sets, {UPDATE}).names) <= {UPDATE}
    chosen = best(sets, LEVERS)
    assert chosen.extra_seconds is not None
    least = min(s.extra_seconds for s in sets if s.extra_seconds is not None)
    assert chosen.extra_seconds <= least + 2e-3 * sets[0].solver.graph.base_seconds


def test_of_sets_that_cost_the_same_the_one_with_fewer_levers_is_chosen(planned: tuple[Step, list[Planned]]) -> None:
    _, sets = planned
    level = [replace(s, answer=sets[0].answer, own_seconds=0.0) for s in sets]
    assert best(level, LEVERS).names == ()


@pytest.mark.parametrize(("names", "sets"), [
    ((), 1), ((UPDATE,), 2), ((UPDATE, SLICES), 3), ((UPDATE, SLICES, LOSS), 6), ((SLICES, LOSS), 4), ((UPDATE, SLICES, LOSS, PIECES), 11),
])
def test_slices_are_never_planned_with_an_update_in_the_backward(names: tuple[str, ...], sets: int) -> None:
    found = sets_of(names)
    assert len(found) == len({frozenset(s) for s in found}) == sets
    assert not any({UPDATE, SLICES} <= set(s) for s in found)
