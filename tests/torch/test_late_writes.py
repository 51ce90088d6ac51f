"""Law: a script that begins to write in other places once a plan is in force trains with the same bits as without Lowtide.

Each script runs the same operators in every step; from step ``CHANGE`` on one of them writes elsewhere, where the plan's
replays would read. Memory that the dispatcher cannot see (numpy's) is never a source of replays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from lowtide.base.errors import ReplayError
import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from lowtide.runtime.storage.checksum import digest
from lowtide.runtime.online.eviction import Evictor
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.planning.unit.problem import Bandwidth
import torch.utils.dlpack
from torch import nn
from torch.autograd.graph import get_gradient_edge


STEPS, CHANGE, WIDTH, ROWS = 7, 4, 128, 512


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


def _blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(count)])


def _job(loss_of: Callable[[nn.Module, int], torch.Tensor]) -> zoo.Job:
    return zoo.simple(_blocks(), loss_of)


def other_target() -> zoo.Job:
    """The same in-place operator on another tensor."""

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH)
        p, q = torch.tanh(model[0](x)), torch.tanh(model[1](x))
        p, q = p + 1, q + 1
        (p, q)[i >= CHANGE].mul_(2)
        return (model[2](p).sin() + model[3](q).sin()).square().sum()

    return _job(loss_of)


def subclass_target() -> zoo.Job:
    """The same through an alias of another type."""

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH)
        p, q = model[0](x) + 1, model[1](x) + 1
        (p, q)[i >= CHANGE].as_subclass(Tagged).mul_(2)
        return (model[2](p).sin() + model[3](q).sin()).square().sum()

    return _job(loss_of)


def weight_between() -> zoo.Job:
    """A weight changed through ``.data`` between forward and backward."""

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        loss = model(torch.randn(ROWS, WIDTH)).square().sum()
        if i >= CHANGE:
            model[0][0].weight.data.mul_(0.9)
        return loss

    return _job(loss_of)


def activation_in_hook() -> zoo.Job:
    """An activation changed through ``.data`` by a gradient hook."""

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        h = model[0](torch.randn(ROWS, WIDTH))
        out = model[2](model[1](h))
        out.register_hook(lambda grad: (h.data.mul_(0.5) if i >= CHANGE else None, grad)[1])
        return model[3](out).square().sum()

    return _job(loss_of)


def buffer_in_hook() -> zoo.Job:
    """The batch's own buffer refilled by a gradient hook."""
    buffer = torch.empty(ROWS, WIDTH)

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        buffer.data.normal_()
        out = model(buffer.detach() * 1.0)
        if i >= CHANGE:
            out.register_hook(lambda grad: (buffer.data.fill_(3), grad)[1])
        return out.square().sum()

    return _job(loss_of)


def numpys_memory() -> zoo.Job:
    """A loader's array written between forward and backward."""
    array = np.zeros((ROWS, WIDTH), dtype=np.float32)
    shown = torch.from_numpy(array)

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        array[:] = torch.randn(ROWS, WIDTH).numpy()
        loss = model(shown * 1.0).square().sum()
        if i >= CHANGE:
            array[:] = 3
        return loss

    return _job(loss_of)


class Scaled(nn.Module):
    """Everything that autograd saves here is computed from the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([((batch * k).sin() * scale).mean(0) for k, scale in enumerate(self.scales, 1)]).sum(0)


def _refilled(write: Callable[[torch.Tensor], object]) -> Callable[[], zoo.Job]:
    """A batch in a buffer of torch's that is refilled, unseen by torch, before the backward has run."""

    def make() -> zoo.Job:
        batch = torch.empty(ROWS, WIDTH)

        def loss_of(model: nn.Module, i: int) -> torch.Tensor:
            batch.normal_()
            out = model(batch)
            if i >= CHANGE:
                write(batch)
            return out.square().sum()

        return zoo.simple(Scaled(), loss_of)

    return make


def _in_a_thread(batch: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: batch.data.fill_(3))
    thread.start()
    thread.join()


batch_by_numpy = _refilled(lambda batch: batch.numpy().fill(3))
batch_by_numpys_dlpack = _refilled(lambda batch: np.from_dlpack(batch).fill(3))
batch_by_dlpack = _refilled(lambda batch: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(batch)).fill_(3))
batch_in_a_thread = _refilled(_in_a_thread)
batch_by_storage = _refilled(lambda batch: batch.untyped_storage().fill_(3))


def _node_hook(register: Callable[[torch.Tensor, Callable[..., None]], object]) -> Callable[[], zoo.Job]:
    """A copy of the batch changed through ``.data`` by a hook on a node of autograd's graph."""

    def loss_of(model: nn.Module, i: int) -> torch.Tensor:
        batch = torch.randn(ROWS, WIDTH).clone()
        out = model(batch).square()

        def hook(*_: object) -> None:
            if i >= CHANGE:
                batch.data.fill_(3)

        register(out, hook)
        return out.sum()

    return lambda: zoo.simple(Scaled(), loss_of)


node_hook = _node_hook(lambda out, hook: out.grad_fn.register_hook(hook))
node_prehook = _node_hook(lambda out, hook: out.grad_fn.register_prehook(hook))
edge_hook = _node_hook(lambda out, hook: get_gradient_edge(out).node.register_prehook(hook))

SCRIPTS = {
    make.__name__: make
    for make in (other_target, subclass_target, weight_between, activation_in_hook, buffer_in_hook, numpys_memory)
} | {
    "batch_by_numpy": batch_by_numpy, "batch_by_numpys_dlpack": batch_by_numpys_dlpack, "batch_by_dlpack": batch_by_dlpack,
    "batch_in_a_thread": batch_in_a_thread, "batch_by_storage": batch_by_storage, "node_hook": node_hook,
    "node_prehook": node_prehook, "edge_hook": edge_hook,
}


UNSEEN = {"batch_in_a_thread", "batch_by_storage", "edge_hook"}
"""Their writes reach no operator that torch shows."""


@pytest.mark.long("0.85-True", "0.7-False")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.85, 0.7])
@pytest.mark.parametrize("name", SCRIPTS)
def test_writes_that_change_under_a_plan_keep_bits_or_stop_the_run(
    name: str, share: float, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only writes that torch cannot see may stop the run (ReplayError), and only where values must be recomputed; all others
    keep the bits.
    """
    make = SCRIPTS[name]
    if offload and share > 0.8:  # moving costs next to nothing, whatever this machine's disk is busy with
        monkeypatch.setattr(Evictor, "bandwidth", Bandwidth(write=1e12, read=1e12, read_fresh=1e12))
        monkeypatch.setattr(Evictor, "learn", lambda *_: None)
    reference = plain_of(make, STEPS)
    try:
        run = budgeted(make, above_of(reference, share), STEPS, offload=offload)
    except ReplayError:  # stopping is allowed, other bits are not
        assert name in UNSEEN, "only what torch cannot see stops a run"
        assert not (offload and share > 0.8), "there it is moved, and need not be made again"
        return
    finally:
        torch.ones((), requires_grad=True).backward()  # after an error the engine holds the graph until it runs again
    assert run.bits == reference.bits
    before = run.outcome.steps[CHANGE - 1]
    assert before.policy == "planned", "the writes change under a plan"
    assert before.recomputed_ops or before.offloaded_bytes


def test_a_digest_is_never_taken_from_an_earlier_tensor_at_the_address() -> None:
    """`PlannedMode` caches digests to detect late writes. A new tensor at the address of a freed one must not get the cached
    digest of that one.
    """
    mode = PlannedMode.__new__(PlannedMode)
    mode._witnessed = {}
    places = set()
    for i in range(20):
        tensor = torch.full((4096,), float(i))
        places.add(tensor.data_ptr())
        assert mode._witness(tensor) == digest(tensor)
        del tensor
    assert len(places) < 20
