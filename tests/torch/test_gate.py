"""Law: operators that a plan leaves alone pass by the native gate, and nothing else differs from a run without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from harness import Budgeted, above_of, budgeted, kept, plain_of
from lowtide.runtime import gate
from lowtide.runtime.planned.mode import PlannedMode
from lowtide.runtime.units.recorded_unit import Timings
from torch import nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn import functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

STEPS = 8


class Layers(nn.Module):
    """Layers some of whose kernels call further operators (bags, deviations, conversions), with something done between."""

    def __init__(self, between: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 96)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96), nn.Dropout(0.1)) for _ in range(6))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bag(x)
        for layer in self.layers:
            x = layer(x) * 0.5 + x
        self.between(x)
        deviation, mean = torch.std_mean(x, dim=1)
        return ((x.double() - mean[:, None]).float() / deviation[:, None]).square().mean()


def layers(between: Callable[[torch.Tensor], None] = lambda _: None) -> zoo.Job:
    return zoo.simple(Layers(between), lambda m, _: m(torch.randint(0, 64, (2048, 4))))


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[PlannedMode]:
    """The planned modes of a test, in order. No unit is timed: timed ones have no gate, and how many are depends on the clock."""
    monkeypatch.setattr(Timings, "are_due", lambda *_: False)
    found: list[PlannedMode] = []
    make = PlannedMode.__init__

    def noted(self: PlannedMode, *args: Any, **how: Any) -> None:
        make(self, *args, **how)
        found.append(self)

    monkeypatch.setattr(PlannedMode, "__init__", noted)
    return found


def run(make: Callable[[], zoo.Job] = layers, share: float = 0.5, **how: Any) -> Budgeted:
    reference = plain_of(make, STEPS)
    found = budgeted(make, above_of(reference, share), STEPS, **how)
    assert found.bits == reference.bits
    return found


needs_gate = pytest.mark.skipif(gate.script_of([], [], [], []) is None, reason="the gate was not built")


@needs_gate
@pytest.mark.parametrize("offload", [True, False])
def test_operators_that_a_plan_leaves_alone_pass_unseen(offload: bool, modes: list[PlannedMode]) -> None:  # noqa: FBT001
    """All of them, whatever their kernels call inside, and each is counted."""
    found = run(offload=offload)
    assert kept(found)
    steady = [mode for mode in modes if mode.gate is not None][-1]
    script = steady.script
    alone = sum(act is None and not written for act, written in zip(script.acts[:-1], script.writes, strict=False))
    assert alone > len(script.acts) // 4
    assert steady.gate is not None
    assert (steady.gate.unseen, steady.at, steady.unplanned) == (alone, len(script.funcs) - 1, 0)


def test_without_a_gate_bits_and_peaks_are_the_same(monkeypatch: pytest.MonkeyPatch, modes: list[PlannedMode]) -> None:
    """As where it was not built, or was built for another version of torch."""
    monkeypatch.setattr(gate, "_NATIVE", None)
    found = run()
    assert kept(found)
    assert modes
    assert all(mode.gate is None for mode in modes)


@needs_gate
def test_printing_a_tensor_is_no_operator_of_the_unit(modes: list[PlannedMode]) -> None:
    """torch takes all modes off to print, and puts them back on: operators after that pass unseen, too."""
    printed: list[str] = []
    run(lambda: layers(lambda x: printed.append(repr(x))))
    assert len(set(printed)) > 1
    assert modes
    assert all(mode.unplanned == 0 and not mode.lost for mode in modes)
    steady = [mode for mode in modes if mode.gate is not None][-1]
    alone = [i for i, act in enumerate(steady.script.acts[:-1]) if act is None and not steady.script.writes[i]]
    assert steady.gate is not None
    assert steady.gate.unseen >= len(alone) - 8  # until autograd next saves a tensor


class _Counted(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@needs_gate
def test_a_mode_of_the_script_sees_its_operators_and_the_plan_goes_on(modes: list[PlannedMode]) -> None:
    """The mode is on for a part of the forward only."""
    seen: list[str] = []

    def between(x: torch.Tensor) -> None:
        with _Counted(seen):
            (x.detach() * 2).sum()

    reference = plain_of(layers, STEPS)
    run(lambda: layers(between))
    each = ["aten.detach.default", "aten.mul.Tensor", "aten.sum.default"]
    assert seen == each * (len(seen) // 3)
    assert len(seen) >= 3 * STEPS
    assert reference.bits
    assert all(mode.unplanned == 0 and not mode.lost for mode in modes)


@needs_gate
def test_flops_are_counted_as_without_lowtide() -> None:
    """FlopCounterMode is a mode around whole steps."""

    def counted(step: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            step()
        return int(counter.get_total_flops())

    torch.manual_seed(0)
    job = layers()
    plain = counted(lambda: job.step(0))
    flops: list[int] = []

    def make() -> zoo.Job:
        inner = layers()
        return zoo.Job(lambda i: _result(lambda: inner.step(i), flops, counted), inner.modules, inner.optimizers)

    reference = plain_of(layers, STEPS)
    found = budgeted(make, above_of(reference, 0.9), STEPS)
    assert found.bits == reference.bits
    assert min(flops) == plain  # a step under a plan recomputes besides


def _result(step: Callable[[], Any], flops: list[int], counted: Callable[[Callable[[], Any]], int]) -> Any:
    made: list[Any] = []
    flops.append(counted(lambda: made.append(step())))
    return made[0]


@needs_gate
def test_an_operator_that_fails_raises_what_it_raises_without_lowtide(modes: list[PlannedMode]) -> None:
    """The script catches the error and goes on; so does the plan."""
    messages: list[str] = []

    def between(x: torch.Tensor) -> None:
        try:
            torch.mm(x.detach(), x.detach())
        except RuntimeError as error:
            messages.append(str(error))

    run(lambda: layers(between))
    assert len(set(messages)) == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in messages[0]
    assert any(mode.gate is not None for mode in modes)
    assert not any(mode.lost for mode in modes)


@needs_gate
def test_an_operator_refused_memory_leaves_the_plan_with_equal_bits(modes: list[PlannedMode]) -> None:
    """Where the script suddenly holds memory of its own, operators that pass the gate are refused, too; then room is made."""
    held: list[torch.Tensor] = []
    calls: list[int] = []

    def between(_: torch.Tensor) -> None:
        calls.append(0)

    class Growing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(0)
            held[:] = [torch.zeros(300_000)] if len(calls) > 5 else []
            return super().forward(x)

    def make() -> zoo.Job:
        calls.clear()
        return zoo.simple(Growing(), lambda m, _: m(torch.randint(0, 64, (2048, 4))))

    found = run(make)
    assert found.peak_bytes <= found.budget_bytes + (64 << 10)
    assert any(mode.lost or mode.unplanned for mode in modes)


@needs_gate
def test_nothing_of_a_gate_is_on_after_a_budget(modes: list[PlannedMode]) -> None:
    """Neither after a run that ends, nor after one that fails in the middle of a planned forward."""
    run()
    assert modes
    keys = torch._C._dispatch_tls_local_include_set()

    def between(_: torch.Tensor) -> None:
        if modes and modes[-1].at > 10:
            assert "Fake" in str(torch._C._dispatch_tls_local_include_set())
            raise KeyError("in the middle of a planned forward")

    modes.clear()
    with pytest.raises(KeyError):
        budgeted(lambda: layers(between), above_of(plain_of(layers, STEPS), 0.5), STEPS)
    assert str(torch._C._dispatch_tls_local_include_set()) == str(keys)
    x = torch.ones(4, requires_grad=True)
    (F.gelu(x) * 2).sum().backward()
    assert x.grad is not None


@needs_gate
def test_an_operator_that_torch_dispatches_in_python_runs_beside_a_gate(modes: list[PlannedMode]) -> None:
    """It is first called in a planned step; Python knows no kernel for the gate's key."""
    results: list[int] = []
    calls: list[int] = []
    square = torch.ones(4, 4, dtype=torch.int8)

    def between(_: torch.Tensor) -> None:
        calls.append(0)
        if len(calls) > 5:
            results.append(int(out_dtype(torch.ops.aten.mm.default, torch.int32, square, square).sum()))

    def make() -> zoo.Job:
        calls.clear()
        return layers(between)

    run(make)
    assert set(results) == {64}
    assert any(mode.gate is not None and mode.unplanned for mode in modes)


@needs_gate
def test_a_function_is_traced_in_a_planned_forward_as_without_lowtide(modes: list[PlannedMode]) -> None:
    """torch keeps the modes that trace below all others, so Lowtide's stays on top of them."""
    graphs: list[str] = []

    def between(x: torch.Tensor) -> None:
        graph = make_fx(lambda a: torch.tanh(a) * 2 + 1)(x.detach()[:4]).graph
        graphs.append(" ".join(node.name for node in graph.nodes))

    run(lambda: layers(between))
    assert set(graphs) == {"a_1 tanh mul add output"}
    assert any(mode.gate is not None and mode.gate.unseen for mode in modes)


@needs_gate
def test_a_mode_whose_handler_ends_the_unit_goes_on_seeing_operators() -> None:
    """The optimizer steps within the script's mode."""
    seen: list[str] = []

    class Stepping(_Counted):
        step: Callable[[], None] | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if self.step is not None and len(self.seen) % 5 == 1:
                self.step()
            return out

    def make() -> zoo.Job:
        job = layers()
        (optimizer,) = job.optimizers

        def step(i: int) -> Any:
            loss = job.step(i)
            for parameter in job.modules[0].parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            mode = Stepping(seen)
            job.modules[0](torch.randint(0, 64, (2048, 4)))
            with mode:
                mode.step = optimizer.step
                torch.ones(3).mul(2).sum().cos().sin()
                mode.step = None
            return loss

        return zoo.Job(step, job.modules, job.optimizers)

    reference = plain_of(make, STEPS)
    plainly, seen[:] = list(seen[-5:]), []
    found = budgeted(make, above_of(reference, 0.6), STEPS)
    assert found.bits == reference.bits
    assert seen == plainly * STEPS


_ran: list[int] = []


@torch.library.custom_op("lowtide_tests::sometimes", mutates_args=())
def _sometimes(x: torch.Tensor) -> torch.Tensor:
    """Doubles; fails at its sixth call, after that has counted."""
    _ran.append(0)
    if len(_ran) == 6:
        raise ValueError("out of patience")
    return x * 2


@needs_gate
def test_a_kernel_in_python_that_fails_once_runs_once(modes: list[PlannedMode]) -> None:
    """Only what lacks memory is run again."""
    caught: list[str] = []

    def between(x: torch.Tensor) -> None:
        try:
            _sometimes(x.detach())
        except ValueError as error:
            caught.append(str(error))

    def make() -> zoo.Job:
        _ran.clear()
        caught.clear()
        return layers(between)

    run(make)
    assert (len(_ran), caught) == (STEPS, ["out of patience"])
    assert any(mode.gate is not None and mode.gate.unseen for mode in modes)
