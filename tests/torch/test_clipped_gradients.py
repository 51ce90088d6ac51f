"""Law: offloaded gradients are clipped and unscaled one by one, with the bits of torch's own call and never all resident."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lowtide
import pytest
import torch
import zoo
from harness import heap, live_now
from torch import nn

SIDE = 128
LAYERS = 6
EACH = 4 * SIDE * SIDE


def _net(*, mixed: bool = False) -> nn.Sequential:
    layers = [nn.Linear(SIDE, SIDE) for _ in range(LAYERS)]
    if mixed:
        layers[2] = layers[2].double()
    return nn.Sequential(*layers)


def _loss(model: nn.Sequential) -> torch.Tensor:
    x = torch.randn(8, SIDE)
    for layer in model:
        x = layer(x.to(layer.weight.dtype)).tanh()
    return x.square().sum()


def _train(clip: Callable[[nn.Module], Any], *, mixed: bool = False, scale: float = 1.0) -> list[bytes]:
    zoo.seed(0)
    model = _net(mixed=mixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    bits = []
    for _ in range(4):
        optimizer.zero_grad()
        (_loss(model) * scale).backward()
        total = clip(model)
        bits.append(b"" if total is None else zoo.bits(total))
        optimizer.step()
    return [*bits, *(zoo.bits(p) for p in model.parameters())]


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("lever", ["move-gradients", "move-states"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1, "inf", 3.5])
@pytest.mark.parametrize("most", [0.1, 1e6])
def test_norms_and_clipped_gradients_have_the_same_bits(most: float, norm_type: Any, foreach: bool | None, lever: str) -> None:
    def clip(model: nn.Module) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most, norm_type, foreach=foreach)

    plain = _train(clip)
    with lowtide.budget(None, allow=lever):
        assert _train(clip) == plain


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda m: torch.nn.utils.clip_grad_norm_((p for p in m.parameters() if p.dim() > 1), 0.1),
    "one": lambda m: torch.nn.utils.clip_grad_norm_(next(m.parameters()), 0.1),
    "twice": lambda m: torch.nn.utils.clip_grad_norm_([*m.parameters(), *m.parameters()], 0.1),
    "none": lambda m: torch.nn.utils.clip_grad_norm_([], 0.1),
    "module": lambda m: nn.utils.clip_grad.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True),
    "value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "apart": lambda m: torch.nn.utils.clip_grads_with_norm_(
        list(m.parameters()), 0.1, torch.nn.utils.get_total_norm([p.grad for p in m.parameters()])
    ),
    "each": lambda m: [torch.nn.utils.clip_grad_norm_(p, 0.05) for p in m.parameters()][0],
    "read between": lambda m: (
        next(m.parameters()).grad.mul_(2), torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1), next(m.parameters()).grad.add_(1)
    )[1],
}


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_clip_gives_the_same_bits(call: str, mixed: bool) -> None:  # noqa: FBT001
    """With parameters of two data types, too, whose gradients torch groups."""
    plain = _train(CALLS[call], mixed=mixed)
    with lowtide.budget(None, allow="move-gradients"):
        assert _train(CALLS[call], mixed=mixed) == plain


@pytest.mark.parametrize("clip", [
    lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9),
    lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.001),
], ids=["norm", "not needed", "value"])
def test_no_more_than_two_gradients_are_resident(clip: Callable[[nn.Module], Any]) -> None:
    """One is clipped while the last one leaves. Clipping all at once takes a dozen."""
    model = _net()
    with lowtide.budget(None, allow="move-gradients"):
        _loss(model).backward()
        before = live_now()
        heap().tensor_peak = heap().tensor_live
        clip(model)
        assert heap().tensor_peak - before <= 2 * EACH + EACH // 4
        before = live_now()
        norms = [p.grad.norm() for p in model.parameters()]  # they are all there
        assert len(norms) == 2 * LAYERS


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("too_large", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_unscaled_gradients_have_the_same_bits(by_hand: bool, too_large: bool) -> None:  # noqa: FBT001
    """Also where one of them is not finite, so that the step is left out and the scale falls."""

    def train() -> list[Any]:
        zoo.seed(0)
        model = _net()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        found: list[Any] = []
        for i in range(4):
            optimizer.zero_grad()
            scaler.scale(_loss(model) * (1e38 if too_large and i == 1 else 1)).backward()
            if by_hand:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return [*found, *(zoo.bits(p) for p in model.parameters())]

    plain = train()
    with lowtide.budget(None, allow="move-gradients") as run:
        assert train() == plain
        assert [x.name for x in run.outcome.levers if x.used] == ["move-gradients"]
    assert (plain[1] < plain[0]) is too_large


def test_unscaling_holds_two_gradients_at_most() -> None:
    model = _net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with lowtide.budget(None, allow="move-gradients"):
        scaler.scale(_loss(model)).backward()
        before = live_now()
        heap().tensor_peak = heap().tensor_live
        scaler.unscale_(optimizer)
        assert heap().tensor_peak - before <= 2 * EACH + EACH // 4
        assert {len(group["params"]) for group in optimizer.param_groups} == {2 * LAYERS}


def test_the_smallest_numbers_are_flushed_where_the_script_asks_for_it() -> None:
    """Then multiplying by a coefficient of 1 changes gradients, and is not left out."""
    def train() -> list[bytes]:
        zoo.seed(0)
        model = _net()
        torch.set_flush_denormal(True)
        (_loss(model) * 1e-42).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.set_flush_denormal(False)
        return [zoo.bits(p.grad) for p in model.parameters()]  # type: ignore[arg-type]

    try:
        plain = train()
        with lowtide.budget(None, allow="move-gradients"):
            assert train() == plain
    finally:
        torch.set_flush_denormal(False)


def test_a_norm_that_is_not_finite_raises_as_torch_does() -> None:
    def train() -> str:
        with pytest.raises(RuntimeError) as raised:
            _train(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True), scale=float("inf"))
        return str(raised.value)

    plain = train()
    with lowtide.budget(None, allow="move-gradients"):
        assert train() == plain


def test_an_empty_generator_is_warned_of_at_the_scripts_own_line() -> None:
    def where() -> tuple[str, int, str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0)
        return [(w.filename, w.lineno, str(w.message)) for w in seen][0]

    plain = where()
    with lowtide.budget(None, allow="move-gradients"):
        assert where() == plain


def test_torchs_functions_are_restored() -> None:
    names = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
    before = [getattr(owner, name) for owner in (torch.nn.utils, torch.nn.utils.clip_grad) for name in names if hasattr(owner, name)]
    with lowtide.budget("1GiB"):
        assert torch.nn.utils.clip_grad_norm_ is not before[0]
    after = [getattr(owner, name) for owner in (torch.nn.utils, torch.nn.utils.clip_grad) for name in names if hasattr(owner, name)]
    assert after == before
