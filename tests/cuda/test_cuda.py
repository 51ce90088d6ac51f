"""The same laws on a CUDA device. Skipped where there is none; ``make test-cuda`` runs them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.runtime.control.budget_source import AUTO_MARGIN

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _train(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), Noise(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(steps):
        x, y = torch.randn(4096, 512, device="cuda"), torch.randint(0, 10, (4096,), device="cuda")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return found + [p.detach().cpu() for p in model.parameters()]


def _plain() -> tuple[list[torch.Tensor], int]:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    found = _train(6)
    return found, torch.cuda.max_memory_allocated()


class Noise(nn.Module):
    """Multiplies by random numbers of the device's own generator: the operator that draws reads no tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.9 + 0.2 * torch.rand(x.shape, device=x.device))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_training_on_cuda_keeps_bits_and_budget(share: float, offload: bool) -> None:
    reference, peak = _plain()
    gc.collect()
    with lowtide.budget(int(share * peak), offload=offload) as run:
        found = _train(6)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    over = [(s.index, s.policy, s.peak_bytes - run.outcome.budget_bytes) for s in run.outcome.steps[1:]]
    assert [o for o in over if o[2] > 0] == []


def test_a_failing_operator_is_retried_after_cuda_ran_out_of_memory() -> None:
    """Without a budget, under a limit of 85 % of the baseline's peak, the run ends with the baseline's bits."""
    reference, peak = _plain()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.85 * peak / total)
    try:
        with lowtide.budget(None) as run:
            found = _train(6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    assert any(s.rescued_ops for s in run.outcome.steps)


def test_one_oversized_batch_is_rescued_on_cuda_and_other_steps_are_left_alone() -> None:
    """Law: no budget; the step that does not fit ends with the baseline's bits, and steps that fit are not intercepted."""

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(24))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(8):
            batch = torch.randn(1 << (16 if step == 5 else 10), 512, device="cuda")
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    reference = train()
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_allocated() + (2 << 30)  # the large step takes more than 6 GiB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        with lowtide.budget("rescue") as run:
            found = train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    assert [s.index for s in run.outcome.steps if s.policy != "plain"] == [0, 1, 5]
    assert run.outcome.steps[5].rescued_ops


def test_offloaded_values_come_back_from_pinned_memory_with_equal_bits() -> None:
    from lowtide.runtime.device.pinned_tier import PinnedTier

    tier = PinnedTier(torch.device("cuda", 0))
    for _ in range(20):
        source = torch.randn(1 << 20, device="cuda")
        expected = source.clone()
        ticket = tier.put(source.untyped_storage())
        del source
        torch.randn(1 << 20, device="cuda")  # the freed block must not be given out before its copy is done
        back = torch.empty(0, device="cuda").set_(ticket.fetch())
        assert torch.equal(back, expected)


def test_prefetches_wait_for_their_copies_on_any_stream() -> None:
    """The fetched bytes are complete although the copying stream is busy, on the stream that began the fetch and on another.
    """
    from lowtide.runtime.device.pinned_tier import PinnedTier

    tier = PinnedTier(torch.device("cuda", 0))
    other = torch.cuda.Stream()
    for i in range(20):
        source = torch.randn(1 << 22, device="cuda")
        expected = source.clone()
        ticket = tier.put(source.untyped_storage())
        del source
        ticket.begin()
        busy = torch.randn(1 << 22, device="cuda") * 2  # work beside the copy, on a block that looks free
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            back = torch.empty(0, device="cuda").set_(ticket.fetch())
            assert torch.equal(back, expected)
        again = torch.empty(0, device="cuda").set_(ticket.fetch())
        assert torch.equal(again, expected)
        del busy


def test_planned_prefetches_on_cuda_change_no_bit() -> None:
    """If values are offloaded, some fetches begin early."""
    from lowtide.runtime.device import pinned_tier

    begun = []
    plain = pinned_tier._PinnedTicket.begin
    pinned_tier._PinnedTicket.begin = lambda self: (begun.append(self), plain(self))[1]
    try:
        reference = _train(6)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        _train(3)
        budget = start + int(0.7 * (torch.cuda.max_memory_allocated() - start))
        with lowtide.budget(budget) as run:
            found = _train(6)
    finally:
        pinned_tier._PinnedTicket.begin = plain
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))
    if not any(s.offloaded_bytes for s in run.outcome.steps[2:]):
        pytest.skip("the plan offloads nothing on this device: recomputing is cheaper")
    assert begun


def test_an_auto_budget_is_the_free_memory_less_a_margin() -> None:
    _train(1)
    free, total = torch.cuda.mem_get_info()
    expected = int(free * (1 - AUTO_MARGIN)) + torch.cuda.memory_allocated()
    with lowtide.budget("auto") as run:
        _train(2)
    assert abs(run.outcome.budget_bytes - expected) <= 0.01 * total


def test_the_scripts_own_peak_statistics_are_unchanged() -> None:
    """Lowtide resets the allocator's peaks for its own windows, and the script still reads its own."""

    def read() -> list[int]:
        torch.manual_seed(0)
        gc.collect()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(6):
            if step % 2:
                torch.cuda.reset_peak_memory_stats()
            model(torch.randn(256 * (step + 1), 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.cuda.max_memory_allocated() - start)
            found.append(torch.cuda.memory_stats()["allocated_bytes.all.peak"] - start)
        return found

    plain = read()
    assert read() == plain
    with lowtide.budget(1 << 34):
        ours = read()
    assert ours == plain


def test_host_tensors_keep_their_bits_under_a_devices_budget() -> None:
    """An embedding on the host feeds a model on the device: only tensors on the device are dropped or moved."""

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = nn.Sequential(nn.Linear(64, 512), nn.Tanh())
        model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(512, 512), nn.GELU()))).cuda()
        optimizer = torch.optim.AdamW([*table.parameters(), *model.parameters()])
        found = []
        for _ in range(6):
            loss = model(table(torch.randn(2048, 64)).cuda()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found + [p.detach().cpu() for p in (*table.parameters(), *model.parameters())]

    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    train()
    gc.collect()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain = train()
    budget = start + int(0.6 * (torch.cuda.max_memory_allocated() - start))
    gc.collect()
    with lowtide.budget(budget):
        ours = train()
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
