"""Law: an operator that runs again does so under the settings, and draws from the generator, of its first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from lowtide.runtime import numeric_settings
from lowtide.runtime.storage import value
from lowtide.runtime.monkeypatch import Wraps
from torch import nn

STEPS, WIDTH, ROWS = 6, 256, 512


def _blocks() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)])


def _deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = (x * 1.01).sin() + (x * 0.3).tanh()
    return x


@contextmanager
def _set(setter: Callable[[Any], object], within: object, after: object) -> Iterator[None]:
    setter(within)
    try:
        yield
    finally:
        setter(after)


def _tiny(model: nn.Module) -> torch.Tensor:
    small = (torch.randn(ROWS, WIDTH) * 1e-39).requires_grad_()
    return (_deep(small) * 1e38).sum() + model(torch.randn(ROWS, WIDTH)).square().mean()


def _divided(model: nn.Module) -> torch.Tensor:
    """A quotient of whole numbers has the default type."""
    x = model(torch.randn(ROWS, WIDTH, dtype=torch.float32))
    for i in range(2, 6):
        x = (x * (torch.randint(1, 9, (ROWS, WIDTH)) / i).float()).tanh()
    return x.square().mean()


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[nn.Module], torch.Tensor]]] = {
    "threads": (lambda: _set(torch.set_num_threads, 2, 1), lambda model: _deep(model(torch.randn(ROWS, WIDTH))).square().mean()),
    "precision": (lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"), lambda model: model(torch.randn(ROWS, WIDTH)).square().mean()),
    "library": (lambda: torch.backends.mkldnn.flags(enabled=False), lambda model: model(torch.randn(ROWS, WIDTH)).square().mean()),
    "default_dtype": (lambda: _set(torch.set_default_dtype, torch.float64, torch.float32), _divided),
    "denormals": (lambda: _set(torch.set_flush_denormal, True, False), _tiny),
}


TOLD: dict[str, Callable[[], object]] = {
    "threads": torch.get_num_threads, "precision": torch.get_float32_matmul_precision, "library": torch._C._get_mkldnn_enabled,
    "default_dtype": torch.get_default_dtype, "denormals": lambda: bool((torch.full((1,), 1e-39) * 1.0).any()),
}


@pytest.mark.long("0.7")
@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.parametrize("name", SETTINGS)
def test_replays_run_under_the_settings_of_the_first_run(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are changed between forward and backward. Each replay meets those of the forward, which is checked also on
    processors where they change no bits.
    """
    within, loss_of = SETTINGS[name]

    def make() -> zoo.Job:
        model = _blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(_: int) -> torch.Tensor:
            with within():  # type: ignore[attr-defined]
                loss = loss_of(model).float()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return zoo.Job(step, [model], [optimizer])

    reference = plain_of(make, STEPS)
    before = numeric_settings.current()
    outside = TOLD[name]()
    with within():  # type: ignore[attr-defined]
        inside = TOLD[name]()
    assert inside != outside
    met, call = set(), value.Record._draws_as_before

    def noting(*given: Any) -> Any:
        met.add(TOLD[name]())
        return call(*given)

    monkeypatch.setattr(value.Record, "_draws_as_before", noting)
    run = budgeted(make, above_of(reference, share), STEPS, offload=False)
    assert run.bits == reference.bits
    assert met == {inside}
    assert any(s.recomputed_ops for s in run.outcome.steps[2:])
    assert numeric_settings.current() == before


def test_a_changed_setting_is_seen_at_once_and_restored_after_use() -> None:
    wraps = Wraps()
    torch.set_float32_matmul_precision("highest")  # once set, the setting differs from one that was never set
    before = numeric_settings.current()
    numeric_settings.watch(wraps)
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(True)
        changed = numeric_settings.current()
        assert changed != before
        with numeric_settings.under(before):
            assert torch.get_float32_matmul_precision() == "highest"
        assert numeric_settings.current() == changed
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
        wraps.undo()
    assert numeric_settings.current() == before


@pytest.mark.parametrize("draw", [
    lambda x, g: torch.poisson(x.abs() + 1, generator=g),
    lambda x, g: torch.binomial(torch.full_like(x, 5.0), x.sigmoid(), generator=g),
    lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
    lambda x, g: torch.empty_like(x).exponential_(generator=g),
], ids=["poisson", "binomial", "bernoulli", "exponential"])  # fmt: skip
def test_replays_draw_the_same_numbers_from_the_scripts_generator(draw: Callable[..., torch.Tensor]) -> None:
    """Also where the operator takes the generator as one argument among others."""

    def make() -> zoo.Job:
        generator = torch.Generator().manual_seed(3)

        def loss_of(model: nn.Module, _: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for block in model.children():
                h = block(x)
                x = h * draw(h.detach(), generator).tanh()
            return x.square().mean()

        return zoo.simple(_blocks(), loss_of)

    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, 0.5), STEPS, offload=False)
    assert run.bits == reference.bits
    assert any(s.recomputed_ops for s in run.outcome.steps[2:])


@torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
def _noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws numbers, though nothing says so, and then lacks memory."""
    noise = torch.rand(x.shape)
    return (x + noise) * (noise + 1)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_an_extensions_operator_that_lacks_memory_draws_the_same_numbers_again(share: float) -> None:
    """Nobody knows whether an operator of another namespace draws."""

    def make() -> zoo.Job:
        def loss_of(model: nn.Module, _: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for block in model.children():
                h = block(x)
                x = h * _noisy(h.detach()).tanh()
            return x.square().mean()

        return zoo.simple(_blocks(), loss_of)

    reference = plain_of(make, STEPS)
    run = budgeted(make, above_of(reference, share), STEPS, offload=False)
    assert run.bits == reference.bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_refused_memory_never_makes_torch_switch_kernels(dtype: torch.dtype, share: float) -> None:
    """When memory is refused to oneDNN's matrix products, torch catches the error, takes another kernel and leaves oneDNN off;
    this must not happen at any of these budgets.
    """

    def make() -> zoo.Job:
        layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(4))

        def loss_of(_: nn.Module, number: int) -> torch.Tensor:
            x = torch.randn(32, 16, 64, dtype=dtype)
            for layer in layers:
                scores = torch.softmax(layer(x) @ x.transpose(1, 2), -1)
                x = (scores @ x).tanh()
            return x.float().square().mean()

        return zoo.simple(layers, loss_of)

    assert torch._C._get_mkldnn_enabled()
    reference = plain_of(make, STEPS)
    first = int(above_of(reference, share))
    for above in range(first, first + (64 << 10), 8 << 10):
        run = budgeted(make, above, STEPS, offload=False, keep_going=True)
        assert torch._C._get_mkldnn_enabled()
        assert run.bits == reference.bits
