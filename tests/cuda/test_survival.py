"""On a device: saving a checkpoint holds no second copy there, generators are restored, and a real shortage is survived."""

from __future__ import annotations

import gc

import pytest
import torch

import lowtide
from lowtide.checkpoint import Store

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GIB = 1 << 30


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_takes_no_memory_on_the_device(tmp_path, asynchronous):
    """The state is saved as it was when the save was asked for, also asynchronously."""
    gc.collect()  # the case before has as much
    state = {"x": [torch.full((1 << 26,), float(i), device="cuda") for i in range(4)]}  # 256 MiB each
    store = Store(tmp_path, asynchronous=asynchronous)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    store.save(state)
    for x in state["x"]:
        x.fill_(-1)
    store.wait()
    assert torch.cuda.max_memory_allocated() == before
    found = store.load()["x"]
    assert all((x == i).all() for i, x in enumerate(found))


def test_the_devices_generators_are_restored(tmp_path):
    model = torch.nn.Linear(4, 4, device="cuda")
    torch.rand(3, device="cuda")
    lowtide.checkpoint(tmp_path, {"model": model}, save=True)
    expected = torch.rand(100, device="cuda")
    lowtide.checkpoint.resume(tmp_path, {"model": model})
    assert torch.equal(torch.rand(100, device="cuda"), expected)


def test_a_real_shortage_on_a_device_is_survived_in_micro_batches():
    model = torch.nn.Sequential(torch.nn.Linear(64, 1 << 14), torch.nn.Tanh(), torch.nn.Linear(1 << 14, 1)).cuda()
    x = torch.randn(1 << 15, 64, device="cuda")
    limit = torch.cuda.memory_allocated() + 2 * GIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        step = lowtide.micro_batched(lambda batch: model(batch).square().mean(), model=model)
        step(x)  # the whole takes 2 GiB for each of two activations
        assert step.pieces >= 2
        assert step.failures >= 1
        grads = [p.grad.clone() for p in model.parameters()]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.allclose(p.grad, g, rtol=1e-3, atol=1e-6) for p, g in zip(model.parameters(), grads, strict=True))
