"""Law: a unit whose operators are not recorded keeps budget and bits by offloading what autograd saves, and nothing else."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import situations
import torch
import zoo
from harness import FIRST_CALLS_BYTES, Budgeted, above_of, budgeted, live_now, plain_of
from lowtide.runtime import gate
from lowtide.runtime.control import interception
from lowtide.runtime.control.plan_choice import PlanChoice
from lowtide.runtime.control.unit_choices import Hold
from lowtide.runtime.online.mode import OnlineMode
from lowtide.runtime.online.saved_queue import SavedTensorQueue
from lowtide.runtime.record.saved_tensors import Kept, QueuedHandle
from lowtide.runtime.units.unit_mode import OnlineReason
from torch import nn

import lowtide

STEPS = 5
SIZE = 1 << 20
needs_gate = pytest.mark.skipif(gate.script_of([], [], [], []) is None, reason="the gate was not built")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading counts as fast, whatever a busy machine measures."""
    monkeypatch.setattr(interception, "FAST", 0.0)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit of a run but the first is held online and not recorded."""
    choose = PlanChoice.choose

    def hold(self: PlanChoice, unit: Any) -> Any:
        chosen = choose(self, unit)  # it reads the budget
        return chosen if unit.number == 1 else Hold(OnlineReason.WORN)

    monkeypatch.setattr(PlanChoice, "choose", hold)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that the online mode handles in units that are not recorded."""
    found: list[str] = []
    dispatch = OnlineMode.__torch_dispatch__

    def noted(self: OnlineMode, func: Any, *rest: Any) -> Any:
        if self.evictor.recorder.active and not self.evictor.recorder.notes:
            found.append(str(func))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(OnlineMode, "__torch_dispatch__", noted)
    return found


class Layers(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.LayerNorm(128)) for _ in range(8))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x) * 0.5 + x)
        return x.square().mean()


def layers(between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> zoo.Job:
    return zoo.simple(Layers(between), lambda m, _: m(torch.randn(1024, 128)))


def run(make: Callable[[], zoo.Job], share: float = 0.55, steps: int = STEPS) -> Budgeted:
    reference = plain_of(make, steps)
    found = budgeted(make, above_of(reference, share), steps)
    assert found.bits == reference.bits
    return found


def held_by_offloading(found: Budgeted) -> bool:
    tally = [(s.policy, s.recomputed_ops, s.offloaded_bytes > 0, s.overrun) for s in found.outcome.steps[1:]]
    return set(tally) == {("online", 0, True, False)} and found.peak_bytes <= found.budget_bytes + FIRST_CALLS_BYTES


@pytest.mark.usefixtures("unrecorded")
def test_saved_tensors_are_offloaded_and_nothing_is_recomputed() -> None:
    assert held_by_offloading(run(layers))


@pytest.mark.usefixtures("unrecorded")
def test_what_a_retained_graph_holds_is_no_part_of_the_next_units_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to count as memory that no plan lowers. Nor is it an error that the update writes to weights that it has saved."""
    began: list[Any] = []
    choose = PlanChoice.choose

    def noted(self: PlanChoice, unit: Any) -> Any:
        began.append(unit)
        return choose(self, unit)

    monkeypatch.setattr(PlanChoice, "choose", noted)

    def make() -> zoo.Job:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        graphs = []

        def step(_: int) -> Any:
            loss = model(torch.randn(1024, 128))
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            graphs[:] = [loss]
            return loss.detach()

        return zoo.Job(step, [model], [optimizer])

    reference = plain_of(make, STEPS)
    assert budgeted(make, above_of(reference, 0.8), STEPS).bits == reference.bits
    held = reference.above_bytes // 3
    assert all(unit.left.bytes > held for unit in began[2:])
    assert len({unit.base_bytes for unit in began[2:]}) == 1


def _later_inputs() -> zoo.Job:
    """The losses of several calls are added up; each call's input is made after the first call."""
    model = nn.Sequential(nn.Linear(1024, 8), nn.Linear(8, 1))
    return zoo.simple(model, lambda m, _: sum(m(torch.randn(512, 1024)).square().mean() for _ in range(12)))


def _masks() -> zoo.Job:
    """A unit of plain functions, whose masks no gradient flows to."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10)))

    def loss(_: Any, __: int) -> torch.Tensor:
        x = torch.randn(1024, 128)
        for layer in model:
            x = nn.functional.linear(x, layer.weight, layer.bias)
            x = x * (torch.rand_like(x) * 2)
        return x.square().mean()

    return zoo.simple(model, loss)


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("make", [_later_inputs, _masks])
def test_data_that_a_unit_makes_can_leave(make: Callable[[], zoo.Job]) -> None:
    found = run(make, 0.5)
    assert found.peak_bytes <= found.budget_bytes + FIRST_CALLS_BYTES


class _Square(torch.autograd.Function):
    """Its backward can be differentiated, and saves again what the forward saved."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (h,) = ctx.saved_tensors
        return g * h * 2


class _Writer(torch.autograd.Function):
    """Its backward writes to what the forward saved."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(h)
        return h.sum() * 0

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (h,) = ctx.saved_tensors
        h.detach().add_(1.0)
        return torch.zeros_like(h)


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("mib", [16, 20, 26])
def test_a_write_to_one_fetched_alias_is_an_error_for_all(mib: int) -> None:
    """Also for one that a differentiable backward has saved since."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(256, 256)
            self.rest = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            h = self.first(x)
            written, squared = _Writer.apply(h), _Square.apply(h)
            del h
            for layer in self.rest:
                x = layer(x.tanh())
            return squared.square().sum(), written, x.square().mean()

    def train() -> None:
        model = Model()
        for last in (False, False, False, True):
            x = torch.randn(2048, 256, requires_grad=True)
            squared, written, rest = model(x)
            (gradient,) = torch.autograd.grad(squared + rest, x, create_graph=True, retain_graph=True)
            del squared, rest
            if last:
                written.backward(retain_graph=True)
            gradient.square().sum().backward()
            model.zero_grad()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train()
    with lowtide.budget(live_now() + (mib << 20), keep_going=True), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train()


def test_a_queue_counts_what_was_offloaded_once() -> None:
    """Also after it was fetched, and offloaded again."""

    class Place:
        def fetch(self) -> torch.UntypedStorage:
            return torch.UntypedStorage(SIZE)

    def leave(holders: list[Any]) -> int:
        place: Any = Place()
        for holder in holders:
            holder.leave(place)
        return SIZE

    queue = SavedTensorQueue(leave)
    whole = torch.randn(SIZE // 4, requires_grad=True) * 1
    kept = [Kept(whole), Kept(whole[1:])]
    queued = [queue.add(k, whole.untyped_storage()) for k in kept]
    assert queued[0] is queued[1]
    del whole
    found = queued[0]
    assert (queue.there_bytes(), queue.away_bytes()) == (SIZE, 0)
    for _ in range(2):
        assert queue.move(1) == SIZE
        assert (queue.there_bytes(), queue.away_bytes()) == (0, SIZE)
        found = queue.fetch(kept[0], found)
        assert (queue.there_bytes(), queue.away_bytes()) == (SIZE, 0)


def _by_functions(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The model's output, without a call of any module."""
    for layer in model:
        x = nn.functional.linear(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else nn.functional.dropout(x)
    return x


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("as_module", [True, False])
def test_what_a_unit_is_given_stays(monkeypatch: pytest.MonkeyPatch, *, as_module: bool) -> None:
    """No plan moves it, and the floor that a run reports counts it."""
    queued: list[int] = []
    add = SavedTensorQueue.add

    def noted(self: SavedTensorQueue, kept: Any, storage: torch.UntypedStorage) -> Any:
        queued.append(storage.nbytes())
        return add(self, kept, storage)

    monkeypatch.setattr(SavedTensorQueue, "add", noted)

    def make() -> zoo.Job:
        model = nn.Sequential(nn.Linear(256, 128), *(m for _ in range(6) for m in (nn.Linear(128, 128), nn.Dropout(0.5))))
        call = model if as_module else functools.partial(_by_functions, model)
        return zoo.simple(model, lambda _, __: call(torch.randn(1024, 256)).square().mean())

    run(make, 0.7)
    assert queued
    assert 1024 * 256 * 4 not in queued


@needs_gate
@pytest.mark.usefixtures("unrecorded")
def test_operators_that_only_have_to_fit_pass_unseen(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In backwards, too; the mode sees what writes in place, what is refused memory, and each other operator once."""
    run(layers)
    with_gate, seen[:] = list(seen), []
    monkeypatch.setattr(gate, "_NATIVE", None)
    run(layers)
    backward = [name for name in seen if "backward" in name]
    assert sum("backward" in name for name in with_gate) < len(backward) // 2
    assert len(with_gate) < len(seen) // 3


@pytest.mark.usefixtures("unrecorded")
def test_without_a_gate_bits_and_budget_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was not built, or was built for another version of torch."""
    monkeypatch.setattr(gate, "_NATIVE", None)
    assert held_by_offloading(run(layers))


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.long("compiled", "loader", "meta_learning", "autocast_attention")
@pytest.mark.parametrize("name", sorted(situations.SITUATIONS))
def test_every_situation_keeps_its_bits(name: str) -> None:
    """Half of what was saved has to leave."""
    reference = plain_of(situations.SITUATIONS[name], STEPS)
    assert budgeted(situations.SITUATIONS[name], above_of(reference, 0.6), STEPS).bits == reference.bits


class _Given(torch.autograd.Function):
    """Gives what it saved as gradients, one of which autograd may add to in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.tanh()
        ctx.save_for_backward(a, a[:])
        return a.clone(), a.clone()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return a if given[0].sum() > 1e9 else b


class _Saver(torch.autograd.Function):
    """Saves what it is given, and gives it as the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y, None


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("share", [0.35, 0.6])
def test_a_fetched_tensor_that_becomes_a_gradient_is_not_added_to(share: float) -> None:
    """Two nodes saved it; the first gives it as the gradient, and another gradient of the same tensor is added to that."""

    def between(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().tanh()
        first = _Saver.apply(x, y)
        second = _Saver.apply(first * 1.5 + x, y)  # `first * 1.5` and `x` meet in one gradient
        found, _ = _Given.apply(second)
        return torch.sin(found + second * y)

    run(lambda: layers(between), share)


@pytest.mark.usefixtures("unrecorded")
def test_a_graph_that_is_gone_through_twice_fetches_twice() -> None:
    def make() -> zoo.Job:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(_: int) -> Any:
            loss = model(torch.randn(1024, 128))
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            optimizer.step()
            return loss

        return zoo.Job(step, (model,), (optimizer,))

    assert held_by_offloading(run(make, 0.7))


@pytest.mark.usefixtures("unrecorded")
def test_data_that_is_exchanged_after_saving_counts() -> None:
    """As in a plain run, backward gets the new data, also where the old ones had been offloaded."""

    def between(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y * y  # saves y
        y.data = torch.ones_like(y)
        return z * 0.1 + x

    run(lambda: layers(between), 0.5)


@pytest.mark.usefixtures("unrecorded")
def test_a_write_to_what_was_saved_raises_as_without_lowtide() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        y.add_(1)
        return y * 0.1

    messages = []
    for how in (lambda: plain_of(lambda: layers(between), 1), lambda: budgeted(lambda: layers(between), 4 << 20, 1)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            how()
        messages.append(str(raised.value).partition(";")[0])
    assert messages[0].replace("FloatTensor", "float32").split("[")[0] == messages[1].split("[")[0]


@needs_gate
def test_a_unit_that_leaves_its_plan_goes_on_unrecorded(seen: list[str]) -> None:
    """From the fifth step on there are more layers than planned, which do not fit beside what the plan keeps."""

    class Longer(Layers):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer in self.layers[: 5 if self.calls < 5 else 8]:
                x = layer(x) * 0.5 + x
            return x.square().mean()

    found = run(lambda: zoo.simple(Longer(), lambda m, _: m(torch.randn(1024, 128))), 0.3, 6)
    assert {s.policy for s in found.outcome.steps[2:4]} == {"planned"}
    left = found.outcome.steps[4]
    assert (left.policy, left.overrun, left.offloaded_bytes > 0) == ("online", False, True)
    assert "aten.tanh.default" in seen
    assert seen.count("aten.tanh_backward.default") < 8, "only what is refused memory is seen once more"


@pytest.mark.usefixtures("unrecorded")
def test_handles_count_as_awaited_until_a_backward_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[QueuedHandle] = []
    begin = QueuedHandle.__init__

    def noted(self: QueuedHandle, *rest: Any) -> None:
        begin(self, *rest)
        made.append(self)

    monkeypatch.setattr(QueuedHandle, "__init__", noted)
    run(layers, steps=2)
    saver = made[0].saver
    assert (saver.outstanding, saver.awaited) == (len(made), 0)
    made.clear()
    assert saver.outstanding == 0


def _with_data(change: Callable[[torch.Tensor], Callable[[], None]]) -> Callable[[], zoo.Job]:
    """Steps whose inputs are changed after they were saved; ``change`` takes the input and returns what changes it.

    Not in the first step, which is recorded: there a replay may read the input, which the write would then spoil.
    """

    def make() -> zoo.Job:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> Any:
            x = torch.randn(1024, 128)
            write = change(x) if i else None
            loss = model(x)
            if write is not None:
                write()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return zoo.Job(step, [model], [optimizer])

    return make


def _by_numpy(x: torch.Tensor) -> Callable[[], None]:
    shown = x.numpy()
    return lambda: shown.fill(0.5)


def _by_data(x: torch.Tensor) -> Callable[[], None]:
    return lambda: (x.data.fill_(0.5), None)[1]


def _by_storage(x: torch.Tensor) -> Callable[[], None]:
    storage = x.untyped_storage()
    return lambda: (storage.fill_(0), None)[1]


def _by_address(x: torch.Tensor) -> Callable[[], None]:
    address, size = x.data_ptr(), x.nbytes
    return lambda: (ctypes.memset(address, 0, size), None)[1]


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("change", [_by_numpy, _by_data, _by_storage, _by_address])
def test_data_that_the_script_can_still_write_stays(change: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    """Its version does not show such a write: backward reads what was written, as in a run without Lowtide."""
    assert held_by_offloading(run(_with_data(change)))


@pytest.mark.parametrize("change", [_by_numpy, _by_data])
def test_data_stays_when_a_unit_leaves_its_plan(change: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    """What the plan keeps is offloaded then, but not what the script still has. Before that, nothing is written."""

    class Longer(Layers):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            write, y = change(x) if self.calls >= 5 else None, x
            for layer in self.layers[: 5 if self.calls < 5 else 8]:
                y = layer(y) * 0.5 + y
            if write is not None:
                write()
            return (y.square().mean() + 0 * x.mean()) * 1.0

    found = run(lambda: zoo.simple(Longer(), lambda m, _: m(torch.randn(1024, 128))), 0.3, 6)
    assert found.outcome.steps[4].policy == "online"
    assert found.outcome.steps[4].offloaded_bytes


@pytest.mark.usefixtures("unrecorded")
def test_a_function_gets_back_its_own_tensor_with_its_attributes() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(by)
            return x * by

        @staticmethod
        def backward(ctx: Any, *given: torch.Tensor) -> Any:  # type: ignore[override]
            (by,) = ctx.saved_tensors
            return given[0] * by * by.factor, None

    def between(x: torch.Tensor) -> torch.Tensor:
        by = torch.full_like(x, 0.9).detach()
        by.factor = 0.5  # type: ignore[attr-defined]
        return Scaled.apply(x, by)

    run(lambda: layers(between), 0.6)


@needs_gate
@pytest.mark.usefixtures("unrecorded")
def test_a_budget_that_another_thread_ends_leaves_no_gate() -> None:
    keys = str(torch._C._dispatch_tls_local_include_set())
    job = layers()
    budget = lowtide.budget(live_now() + (8 << 20))
    budget.__enter__()
    try:
        for i in range(3):
            job.step(i)
        model = job.modules[0]
        loss = model(torch.randn(1024, 128))
        assert "Fake" in str(torch._C._dispatch_tls_local_include_set())
    finally:
        thread = threading.Thread(target=budget.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # the other thread could not take them off
            torch._C._autograd._pop_saved_tensors_default_hooks()
    loss.backward()
    assert str(torch._C._dispatch_tls_local_include_set()) == keys
