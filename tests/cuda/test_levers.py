"""Laws on a CUDA device: exact levers keep the bits and take their bytes off the peak; a chunked loss agrees; a trial's cap
holds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtide.studies.size.trial import TrialRequest, Target, run
from lowtide.studies.size.vary import ScriptSetting
from torch import nn
from torch.nn import functional as F

import lowtide

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _train(make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], loss_of: Any) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    gc.collect()
    held = torch.cuda.memory_allocated()  # by the run that this one is compared with
    model = make().cuda()
    opt = optimizer(model.parameters())
    found = []
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        opt.step()
        found.append(loss.detach().clone())
        del loss
    peak = torch.cuda.max_memory_allocated() - held
    return [*found, *(p.detach().clone() for p in model.parameters())], peak


def _wide() -> nn.Module:
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())), nn.Linear(1024, 8))


def _small_loss(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(16, 1024, device="cuda")), torch.randint(8, (16,), device="cuda"))


@pytest.mark.parametrize("foreach", [False, True])
def test_update_in_backward_keeps_bits_and_takes_gradients_off_the_peak(foreach: bool) -> None:  # noqa: FBT001
    torch.use_deterministic_algorithms(mode=True)

    def adamw(p: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, foreach=foreach)

    plain, before = _train(_wide, adamw, _small_loss)
    with lowtide.budget(None, allow=("update-in-backward",)):
        ours, after = _train(_wide, adamw, _small_loss)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert before - after > 0.7 * 6 * 1024 * 1024 * 4


def test_a_chunked_loss_agrees_and_never_holds_all_logits() -> None:
    """The peak falls by more than the size of the logits."""
    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 50_000, bias=False))

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(2048, 256, device="cuda")), torch.randint(50_000, (2048,), device="cuda"))

    plain, before = _train(head, torch.optim.SGD, loss)
    with lowtide.budget(None, allow=("chunked-loss",)):
        ours, after = _train(head, torch.optim.SGD, loss)
    assert before - after > 2048 * 50_000 * 4
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, plain, strict=True))


def test_a_capped_trial_ends_out_of_memory(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4096, 4096).cuda()\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(20):\n"
        "    opt.zero_grad(); model(torch.randn(4096, 4096, device='cuda')).sum().backward(); opt.step()\n"
    )
    target = Target(script=str(script), module=False, seconds=120)
    plain = run(target, ScriptSetting(arguments=()), TrialRequest(steps=3))
    assert plain.passes
    assert plain.peak_bytes > 4096 * 4096 * 4 * 2
    assert run(target, ScriptSetting(arguments=()), TrialRequest(steps=3, cap_bytes=plain.peak_bytes // 2)).ended == "memory"
