"""Laws: gradients are offloaded in the middle of a unit, or before a first update, where the budget is crossed otherwise.

Nothing is known yet of a first step, and nothing of a unit whose sizes are new. The bits are those of the baseline.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, heap, kept, plain_of
from lowtide.base.lever_catalogue import GRADIENTS
from lowtide.runtime.control.lever_set import LeverSet
from lowtide.runtime.device.file_tier import FileTier
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.single_update import KNOWN
from lowtide.runtime.updates.stand_in import StandIns
from lowtide.runtime.storage.views import bytes_of
from torch import nn

import lowtide

STEPS, WIDE, LAYERS = 6, 384, 6
PARAMETERS_BYTES = LAYERS * 4 * WIDE * (WIDE + 1)


def _net() -> nn.Module:
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDE, WIDE), nn.GELU())))


def _job(size_of: Callable[[int], int], *, clips: bool = False) -> zoo.Job:
    """Gradients are dropped after each step, before anything else reads them."""
    net = _net()
    optimizer = torch.optim.Adam(net.parameters())

    def step(i: int) -> torch.Tensor:
        loss = net(torch.randn(size_of(i), WIDE)).square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return zoo.Job(step, [net], [optimizer])


def of_one_size() -> zoo.Job:
    """Parameters, gradients and states outweigh what is saved."""
    return _job(lambda _: 16)


def of_new_sizes() -> zoo.Job:
    """Each batch is larger than the one before."""
    return _job(lambda i: 16 + 8 * i)


def clipped() -> zoo.Job:
    """All gradients are read before the update, one after the other."""
    return _job(lambda i: 64 + 32 * i, clips=True)


def accumulated() -> zoo.Job:
    """Gradients of a first batch exist while a second one runs; batches have new sizes."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(i: int) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(2):
            loss = net(torch.randn(64 + 32 * i + 16 * part, WIDE)).square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return zoo.Job(step, [net], [optimizer])


def _used(run: Any) -> bool:
    return any(lever.used for lever in run.outcome.levers if lever.name == GRADIENTS)


@pytest.mark.parametrize("make", [of_one_size, of_new_sizes])
def test_a_first_update_that_allocates_states_keeps_the_budget(make: Callable[[], zoo.Job]) -> None:
    """Parameters and two states each fit, with some of the gradients, not all: every step is within the budget."""
    reference = plain_of(make, STEPS)
    assert reference.above_bytes > 4 * PARAMETERS_BYTES
    run = budgeted(make, int(3.7 * PARAMETERS_BYTES), STEPS)
    assert run.bits == reference.bits
    assert kept(run), run.over
    assert _used(run)


@pytest.mark.parametrize(("make", "share"), [(of_new_sizes, 0.7), (of_new_sizes, 0.5), (accumulated, 0.5), (clipped, 0.5)])
def test_an_operator_that_fits_only_without_gradients_keeps_bits(
    make: Callable[[], zoo.Job], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave in the middle of a unit, in a backward or between two; nothing was foreseen."""
    monkeypatch.setattr(LeverSet, "wanted_by_update", lambda *_: frozenset())
    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, share), STEPS, keep_going=True)
    assert run.bits == reference.bits
    assert _used(run)
    if make is not clipped:  # all gradients at once do not fit
        assert [over for _, over in run.over[1:] if over > 0] == []


class _Wasteful(torch.autograd.Function):
    """Its backward takes twice as many bytes as all parameters."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """Copy the input."""
        return x.clone()

    @staticmethod
    def backward(_: Any, slope: torch.Tensor) -> torch.Tensor:
        """Copy the slope, with a buffer."""
        return slope + slope.new_zeros(2 * PARAMETERS_BYTES // 4)[: slope.numel()].reshape(slope.shape)


def test_a_budget_that_offloading_gradients_does_not_hold_is_refused_all_the_same() -> None:
    """By its bytes it might have done, and sizes are new in every step: the first step with it shows that it does not."""
    done = []

    def make() -> zoo.Job:
        net = _net()
        optimizer = torch.optim.Adam(net.parameters())

        def step(i: int) -> torch.Tensor:
            loss = _Wasteful.apply(net(torch.randn(16 + 8 * i, WIDE))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done.append(i)
            return loss.detach()

        return zoo.Job(step, [net], [optimizer])

    plain_of(make, STEPS)
    done.clear()
    with pytest.raises(lowtide.BudgetError, match="cannot be held"):
        budgeted(make, int(4.5 * PARAMETERS_BYTES), STEPS)
    assert len(done) <= 3


def test_without_the_memory_optimization_gradients_stay() -> None:
    reference = plain_of(of_new_sizes, STEPS)
    run = budgeted(of_new_sizes, above_of(reference, 0.5), STEPS, without=(GRADIENTS,), keep_going=True)
    assert run.bits == reference.bits
    assert not _used(run)


OPTIONS = ("", "momentum", "amsgrad", "centered", "nesterov")
UPDATES = [
    (kind, {**({name: True} if name not in ("", "momentum") else {}), **({"momentum": 0.9} if name in ("momentum", "nesterov") else {})})
    for kind in KNOWN for name in OPTIONS if not name or name in inspect.signature(kind).parameters
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), UPDATES, ids=lambda part: part.__name__ if isinstance(part, type) else ",".join(part))
def test_states_to_come_are_those_that_the_next_update_makes(kind: Any, more: dict[str, Any]) -> None:
    """To the byte, also if some parameters have states already or no gradient; nothing of the optimizer has changed."""
    parameters = [nn.Parameter(torch.randn(n, 8)) for n in (3, 5, 7)]
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], **more)
    for with_gradients in (1, 2):
        for parameter in parameters[:with_gradients]:
            parameter.grad = torch.ones_like(parameter)
        before, weights = dict(optimizer.state), [p.clone() for p in parameters]
        said = StandIns().state_bytes(optimizer)
        assert dict(optimizer.state) == before
        assert all(torch.equal(a, b) for a, b in zip(weights, parameters, strict=True))
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
        old = _state_bytes(optimizer)
        optimizer.step()
        assert said == _state_bytes(optimizer) - old
    assert StandIns().state_bytes(optimizer) == 0


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = (s for state in optimizer.state.values() for s in state.values())
    return sum(bytes_of(s) for s in states if isinstance(s, torch.Tensor) and s.dim())


WHO_HOLDS = ("hook", "alias", "nesterov", "address", "inference", "fork")


def _held(how: str) -> zoo.Job:
    """Two batches a step, of new sizes; gradients are read or held in an unusual way, from before they are first offloaded."""
    net = _net()
    seen: list[float] = []
    pointers: dict[int, Any] = {}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters())
    if how == "nesterov":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    if how == "hook":
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))  # type: ignore[union-attr]

    def held() -> torch.Tensor:
        first, second = net[0].weight, net[2].weight  # type: ignore[index]
        if how == "alias":
            second.grad = first.grad
        elif how == "address":
            pointers.setdefault(0, (first.grad, first.grad.data_ptr()))
            shown = (ctypes.c_float * 8).from_address(pointers[0][1])
            pointers[0] = (None, pointers[0][1])
            return torch.tensor(list(shown))
        elif how == "inference":
            with torch.inference_mode():
                return torch.tensor([float(p.grad.norm()) for p in net.parameters()])  # type: ignore[union-attr]
        elif how == "fork":
            _train_in_a_child(net)
        return torch.tensor(seen[-3:])

    def step(i: int) -> torch.Tensor:
        found = []
        for part in range(2):
            loss = net(torch.randn(64 + 32 * i + 16 * part, WIDE)).square().mean()
            loss.backward()
            found += [loss.detach().reshape(1), held()]
        optimizer.step()
        if how == "nesterov":
            found += [p.grad.norm().reshape(1) for p in net.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad(set_to_none=how != "address")
        return torch.cat(found)

    return zoo.Job(step, [net], [optimizer])


def _train_in_a_child(net: nn.Module) -> None:
    child = os.fork()
    if not child:
        try:
            for _ in range(2):
                net.zero_grad()
                (100 * net(torch.ones(64, WIDE)).square().mean()).backward()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("how", WHO_HOLDS)
def test_gradients_that_are_read_or_held_in_unusual_ways_keep_bits(how: str) -> None:
    """By a hook of the script's that runs before Lowtide's, by another parameter, by an update, by address, by a child."""
    reference = plain_of(functools.partial(_held, how), STEPS)
    run = budgeted(functools.partial(_held, how), above_of(reference, 0.45), STEPS, keep_going=True)
    assert run.bits == reference.bits
    assert how == "address" or _used(run)  # then all of them are read by address, by this test


ODD = ("tied", "unfrozen", "raising hook", "storage", "twice", "raising step", "data", "swapped", "threads")


def _odd_optimizer(how: str, net: nn.Sequential) -> torch.optim.Optimizer:
    if how == "tied":
        net[2].weight.data = net[0].weight.data
        return torch.optim.AdamW(net.parameters(), weight_decay=0.1, foreach=True)
    if how == "unfrozen":
        net[4].requires_grad_(requires_grad=False)
    if how == "twice":
        with warnings.catch_warnings(action="ignore"):
            return torch.optim.AdamW([net[0].weight, *net.parameters()])
    if how == "raising step":
        return torch.optim.Adam([{"params": list(net[:4].parameters())}, {"params": list(net[4:].parameters())}])
    return torch.optim.AdamW(net.parameters())


def _do_oddly(how: str, net: nn.Sequential, i: int) -> torch.Tensor:
    """What a script does with its parameters or gradients after a backward."""
    weight, other = net[0].weight, net[2].weight
    if how == "unfrozen" and i == 2:
        net[4].requires_grad_()
    elif how == "storage":
        storage = weight.grad.untyped_storage()
        net(torch.randn(32, WIDE)).square().mean().backward()
        return torch.empty(0).set_(storage).norm().reshape(1)
    elif how == "data":
        data, weight.data = weight.data, torch.ones(3, dtype=torch.float64)
        read = weight.grad.norm().reshape(1)
        weight.data = data
        return read
    elif how == "swapped":
        torch.utils.swap_tensors(weight, other)
    elif how == "threads":
        with ThreadPoolExecutor(4) as pool:
            norms = pool.map(lambda p: p.grad.norm().reshape(1), [*net.parameters()] * 3)
            return torch.cat(list(norms))
    return torch.zeros(1)


def _odd(how: str) -> zoo.Job:
    """A training whose parameters or steps are unusual."""
    net = _net()
    assert isinstance(net, nn.Sequential)
    optimizer = _odd_optimizer(how, net)
    fails = [False]

    def fail(_: torch.Tensor) -> None:
        if fails[0]:
            raise ArithmeticError

    if how == "raising hook":
        net[0].weight.register_post_accumulate_grad_hook(fail)

    def step(i: int) -> torch.Tensor:
        found = []
        for part in range(2):
            fails[0] = part == 1 and i > 0
            loss = net(torch.randn(64 + 32 * i + 16 * part, WIDE)).square().mean()
            with contextlib.suppress(ArithmeticError):
                loss.backward()
            found.append(loss.detach().reshape(1))
        found.append(_do_oddly(how, net, i))
        if how == "raising step":
            net[8].weight.grad = net[8].weight.grad.to_sparse()
            with contextlib.suppress(RuntimeError):
                optimizer.step()
            found += [p.grad.norm().reshape(1) for p in net[:6].parameters()]
        else:
            optimizer.step()
        found.append(torch.tensor([float(key) for key in optimizer.state_dict()["state"]]))
        optimizer.zero_grad()
        return torch.cat(found)

    return zoo.Job(step, [net], [optimizer])


@pytest.mark.long("twice", "raising step")
@pytest.mark.parametrize("how", ODD)
def test_unusual_parameters_and_steps_keep_bits_and_the_order_of_states(how: str) -> None:
    """Tied or listed twice, unfrozen late, swapped; a hook or a step that raises; gradients that several threads read."""
    reference = plain_of(functools.partial(_odd, how), STEPS)
    run = budgeted(functools.partial(_odd, how), above_of(reference, 0.45), STEPS, keep_going=True)
    assert run.bits == reference.bits
    assert _used(run)


def test_tied_parameters_are_updated_together_by_sliced_steps() -> None:
    """One after the other, their weights would decay at other moments."""
    reference = plain_of(functools.partial(_odd, "tied"), STEPS)
    run = budgeted(functools.partial(_odd, "tied"), above_of(reference, 0.45), STEPS, keep_going=True, without=(GRADIENTS,))
    assert run.bits == reference.bits


def test_models_that_are_gone_leave_no_offloaded_gradients() -> None:
    """A script that makes a model per fold would fill the tier."""
    lever = OffloadedGradients(FileTier().put)
    for _ in range(5):
        net = _net()
        optimizer = torch.optim.SGD(net.parameters())
        lever.engage([optimizer])
        net(torch.ones(2, WIDE)).sum().backward()
        assert 0 < len(lever._away) <= 2 * LAYERS
        del net, optimizer
        gc.collect()
        lever.unit_begins()
    assert not lever._away
    lever.remove(over=False)


def test_an_update_with_room_to_spare_offloads_nothing() -> None:
    reference = plain_of(of_one_size, STEPS)
    with lowtide.budget(heap().tensor_live + 2 * reference.above_bytes) as run:
        bits = zoo.run(of_one_size, STEPS)
    assert bits == reference.bits
    assert not any(lever.used for lever in run.outcome.levers)
