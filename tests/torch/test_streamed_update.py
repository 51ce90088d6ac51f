"""Laws of the sliced update: the whole update's bits, with no more than a slice of the gradient and of the states in memory."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import lowtide
import pytest
import torch
import zoo
from harness import heap, live_now
from lowtide.runtime.device import file_tier
from lowtide.runtime.updates import offloaded_states, streamed_states, streamed_update, streamed_values, stepwise_update
from torch import nn

LEVER = "move-states"
SLICE = 1 << 12
SIDE = 100
"""Weights have 40,000 bytes: nine whole slices, and a rest that is no multiple of a vector."""

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    f"{kind.__name__}{''.join(f'-{n}={v}' for n, v in options.items())}": lambda p, k=kind, o=options: k(p, **o)
    for kind, options in [
        (kind, {**options, **way})
        for way in ({}, {"foreach": True}, {"fused": True})
        for kind, options in [
            (torch.optim.SGD, {"lr": 0.1}),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
            (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
            (torch.optim.Adam, {"maximize": True, "betas": (0.3, 0.9)}),
            (torch.optim.AdamW, {"lr": 1e-2}),
            (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
        ]
    ] + [
        (kind, {**options, **way})
        for way in ({}, {"foreach": True})
        for kind, options in [
            (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
            (torch.optim.Adadelta, {"weight_decay": 0.1}),
            (torch.optim.Adamax, {}),
            (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
            (torch.optim.RAdam, {"weight_decay": 0.1}),
        ]
    ]
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_values, "SLICE_BYTES", SLICE)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each parameter so far was updated slice by slice."""
    found: list[bool] = []
    original = streamed_update.StreamedUpdate.update

    def update(*args: Any) -> bool:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(streamed_update.StreamedUpdate, "update", update)
    return found


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(SIDE, SIDE), nn.Tanh()))).to(dtype)


def _train(make: Optimizers, dtype: torch.dtype = torch.float32, steps: int = 3, model: nn.Module | None = None) -> list[bytes]:
    zoo.seed(0)
    model = _net(dtype) if model is None else model
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        _back(model)
        optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return [zoo.bits(t) for t in (*model.parameters(), *states, *(p.grad for p in model.parameters()))]  # type: ignore[arg-type]


def _back(model: nn.Module) -> None:
    first = next(iter(model.parameters()))
    model(torch.randn(8, SIDE).to(first.dtype)).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slices_have_the_bits_of_the_whole(kind: str, dtype: torch.dtype, sliced: list[bool]) -> None:
    """Parameters, states and gradients of every optimizer that is updated one parameter at a time, in each of its ways."""
    plain = _train(OPTIMIZERS[kind], dtype)
    with lowtide.budget(None, allow=LEVER):
        assert _train(OPTIMIZERS[kind], dtype) == plain
    takes_maxima = "Adamax" in kind or ("amsgrad" in kind and "fused" not in kind)  # of not-a-numbers, lanes make other bits
    assert sum(sliced) == (0 if takes_maxima else 6)  # two weights, three steps; biases are small


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_do_not_depend_on_how_threads_share_the_work(threads: int, sliced: list[bool]) -> None:
    """Threads split a whole update at other places than a slice's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = nn.Linear(SIDE, 20 * SIDE + 1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        plain = _train(torch.optim.AdamW, model=model)
        model.load_state_dict(state)
        with lowtide.budget(None, allow=LEVER):
            assert _train(torch.optim.AdamW, model=model) == plain
    finally:
        torch.set_num_threads(before)
    assert any(sliced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_updated_as_a_whole(dtype: torch.dtype, sliced: list[bool]) -> None:
    """Lanes of a vector round otherwise than single elements there."""
    plain = _train(torch.optim.Adam, dtype)
    with lowtide.budget(None, allow=LEVER):
        assert _train(torch.optim.Adam, dtype) == plain
    assert sliced
    assert not any(sliced)


def test_a_machine_on_which_slices_differ_updates_the_whole(monkeypatch: pytest.MonkeyPatch, sliced: list[bool]) -> None:
    plain = _train(torch.optim.Adam)
    monkeypatch.setattr(streamed_update, "_probe", lambda *_: False)
    with lowtide.budget(None, allow=LEVER):
        assert _train(torch.optim.Adam) == plain
    assert sliced
    assert not any(sliced)


def test_the_probe_tells_lanes_from_single_elements() -> None:
    """A fused update has other bits in the elements that do not fill a vector."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    reader = streamed_values.SliceReader(lambda _: None, lambda *_: None)
    first, tier, lock = next(iter(model.parameters())), file_tier.FileTier(), contextlib.nullcontext()
    states = streamed_states.StreamedStates(reader, tier, lock, optimizer, first, leaves=False)
    group = optimizer.param_groups[0]
    assert not streamed_update._probe(optimizer, group, states, torch.float32, streamed_update._NARROW)
    assert streamed_update._probe(optimizer, group, states, torch.float32, streamed_update._ALIGNED)


def _same_under(levers: str, train: Callable[[], list[bytes]]) -> None:
    plain = train()
    with lowtide.budget(None, allow=levers):
        assert train() == plain


@pytest.mark.parametrize("lever", ["move-gradients", LEVER])
def test_a_gradient_that_is_a_view_into_a_larger_storage_is_read_at_its_place(lever: str) -> None:
    """As of a prompt that is concatenated: autograd hands out a part of the whole's gradient."""

    def train() -> list[bytes]:
        zoo.seed(0)
        fixed, prompt = torch.randn(10, SIDE), nn.Parameter(torch.randn(40, SIDE))
        optimizer = torch.optim.Adam([prompt], lr=0.1)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            (torch.cat([fixed, prompt]) * torch.randn(50, SIDE)).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_([prompt], 1.0))
            optimizer.step()
        return [*map(zoo.bits, (prompt, *norms, *optimizer.state[prompt].values()))]

    _same_under(lever, train)


@pytest.mark.parametrize("lever", ["move-gradients", LEVER])
def test_states_that_are_views_into_a_larger_storage_are_read_at_their_place(lever: str) -> None:
    def train() -> list[bytes]:
        zoo.seed(0)
        model = nn.Linear(SIDE, SIDE, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {
            "step": torch.tensor(1.0), "exp_avg": torch.randn(2 * SIDE, SIDE)[SIDE:], "exp_avg_sq": torch.rand(2 * SIDE, SIDE)[SIDE:],
        }
        for _ in range(3):
            optimizer.zero_grad()
            _back(model)
            optimizer.step()
        return [*map(zoo.bits, (model.weight, *optimizer.state[model.weight].values()))]

    _same_under(lever, train)


@pytest.mark.parametrize("lever", ["move-gradients", LEVER])
@pytest.mark.parametrize("fused", [False, True])
def test_a_state_that_is_none_is_made_anew(fused: bool, lever: str) -> None:  # noqa: FBT001
    """Momentum that the script restarts, or a checkpoint of a run without."""

    def train() -> list[bytes]:
        zoo.seed(0)
        model = nn.Linear(SIDE, SIDE, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        for i in range(4):
            optimizer.zero_grad()
            _back(model)
            optimizer.step()
            if i == 1:
                optimizer.state[model.weight]["momentum_buffer"] = None
        return [*map(zoo.bits, (model.weight, *optimizer.state[model.weight].values()))]

    _same_under(lever, train)


def test_a_default_device_of_the_script_is_not_used_for_buffers() -> None:
    def train() -> list[bytes]:
        zoo.seed(0)
        model = _net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            _back(model)
            with torch.device("meta"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
        return [*map(zoo.bits, model.parameters())]

    _same_under(LEVER, train)


def test_an_update_counts_as_one_write() -> None:
    weight = nn.Parameter(torch.randn(1 << 14))
    optimizer = torch.optim.Adam([weight])
    with lowtide.budget(None, allow=LEVER):
        for _ in range(2):
            optimizer.zero_grad()
            weight.square().sum().backward()
            before = weight._version
            optimizer.step()
            assert weight._version == before + 1


def test_parameters_that_share_a_gradient_are_updated_together() -> None:
    """A foreach update with Nesterov momentum writes to all gradients before it uses any."""

    def train() -> list[bytes]:
        zoo.seed(0)
        parameters = [nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(3)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        for _ in range(3):
            shared = torch.randn(SIDE, SIDE)
            for parameter in parameters:
                parameter.grad = shared
            optimizer.step()
        return [*map(zoo.bits, parameters)]

    _same_under(LEVER, train)


@pytest.mark.parametrize("reads", ["states", "gradients"])
def test_a_handler_that_interrupts_a_transfer_changes_no_bits(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It brings back what is about to be written, or sees a copy."""

    def train() -> list[bytes]:
        running.clear()
        zoo.seed(0)
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        running.append(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            _back(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return [*map(zoo.bits, (*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())))]

    running: list[Any] = []
    seen: list[type] = []
    looking: list[bool] = []
    plain = train()

    def look(*_: Any) -> None:
        if looking:
            return
        looking.append(True)
        for parameter in running[0].param_groups[0]["params"]:
            found = running[0].state.get(parameter, {}).get("momentum_buffer") if reads == "states" else parameter.grad
            seen.append(type(found))
        looking.clear()

    for name in ("read", "write"):
        def interrupted(*args: Any, original: Any = getattr(file_tier.FileTier, name)) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1)
            original(*args)
            os.kill(os.getpid(), signal.SIGUSR1)

        monkeypatch.setattr(file_tier.FileTier, name, interrupted)
    before = signal.signal(signal.SIGUSR1, look)
    try:
        with lowtide.budget(None, allow=LEVER):
            ours = train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ours == plain
    assert {torch.Tensor} <= set(seen) <= {torch.Tensor, type(None)}


def test_strided_parameters_are_sliced_where_all_have_the_same_strides(sliced: list[bool]) -> None:
    def train() -> list[bytes]:
        zoo.seed(0)
        model = nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.Adam(model.parameters())
        for i in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 32, 8, 8)).square().mean().backward()
            assert model.weight.grad is not None
            if i == 2:  # a gradient of other strides
                model.weight.grad = model.weight.grad.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        found = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        return [*map(zoo.bits, found), *(str(t.stride()).encode() for t in found)]

    plain = train()
    with lowtide.budget(None, allow=LEVER):
        assert train() == plain
    assert sliced.count(True) == 3


def test_neither_gradient_nor_states_are_resident_as_a_whole() -> None:
    """From the first step on, which makes the states."""
    weight = nn.Parameter(torch.randn(1 << 20))
    optimizer = torch.optim.AdamW([weight])
    with lowtide.budget(None, allow=LEVER):
        for _ in range(3):
            weight.square().sum().backward()
            before = live_now()
            heap().tensor_peak = heap().tensor_live
            optimizer.step()
            assert heap().tensor_peak - before <= 12 * SLICE
            assert live_now() - before <= SLICE
            optimizer.zero_grad()
        assert isinstance(vars(optimizer)["state"][weight]["exp_avg"], offloaded_states.Moved)


def test_clipping_to_a_value_holds_one_slice() -> None:
    weight = nn.Parameter(torch.randn(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with lowtide.budget(None, allow="move-gradients"):
        weight.square().sum().backward()
        weight.square().sum().backward()
        before = live_now()
        heap().tensor_peak = heap().tensor_live
        nn.utils.clip_grad_value_([weight], 0.5)
        assert heap().tensor_peak - before <= 4 * SLICE
        assert weight.grad is not None
        assert weight.grad.abs().max() <= 0.5
        optimizer.step()


@pytest.mark.parametrize("at", [0, 3])
def test_an_update_that_is_interrupted_leaves_whole_states(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it was about to make are as they are made: zero where no slice has written."""
    zoo.seed(0)
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    original, calls = streamed_update.update_one, []

    def update_one(*args: Any) -> None:
        original(*args)
        if args[2].numel() == SLICE // 4:
            calls.append(args)
            if len(calls) == at + 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(streamed_update, "update_one", update_one)
    with lowtide.budget(None, allow=LEVER):
        model(torch.randn(8, SIDE)).square().mean().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        state = optimizer.state[model.weight]
        written = (at + 1) * SLICE // 4
        assert state["exp_avg"].shape == model.weight.shape
        assert state["exp_avg"].flatten()[:written].ne(0).all()
        assert not state["exp_avg"].flatten()[written:].any()
        assert model.weight.grad is not None
        optimizer.step()
        assert torch.isfinite(model.weight).all()


def test_a_handler_that_reads_states_between_two_slices_sees_tensors_and_changes_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _train(torch.optim.Adam)
    original, seen, running = streamed_update.update_one, [], []

    def update_one(optimizer: Any, group: Any, parameter: torch.Tensor, *rest: Any) -> None:
        original(optimizer, group, parameter, *rest)
        if parameter.numel() == SLICE // 4:
            running[:] = [optimizer]
            os.kill(os.getpid(), signal.SIGUSR1)

    def look(*_: Any) -> None:
        seen.extend(type(t) for s in running[0].state.values() for t in s.values())
        seen.extend(type(p.grad) for group in running[0].param_groups for p in group["params"])

    monkeypatch.setattr(streamed_update, "update_one", update_one)
    before = signal.signal(signal.SIGUSR1, look)
    try:
        with lowtide.budget(None, allow=LEVER):
            assert _train(torch.optim.Adam) == plain
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {torch.Tensor}


def test_a_forked_child_reads_what_there_was_although_the_parent_goes_on() -> None:
    """The parent's slices are written over its own copy as long as the child lives."""
    weight = nn.Parameter(torch.randn(1 << 16))
    optimizer = torch.optim.Adam([weight])

    def step() -> None:
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    with lowtide.budget(None, allow=LEVER):
        for _ in range(2):
            step()
        expected = optimizer.state[weight]["exp_avg"].clone()
        step_done, look = os.pipe(), os.pipe()
        step()  # they are offloaded again
        held = vars(optimizer)["state"][weight]["exp_avg"].fetch()
        assert not torch.equal(held, expected)
        child = os.fork()
        if not child:
            try:
                os.read(step_done[0], 1)
                os.write(look[1], b"=" if torch.equal(optimizer.state[weight]["exp_avg"], held) else b"x")
            finally:
                os._exit(0)
        step()
        os.write(step_done[1], b"!")
        assert os.read(look[0], 1) == b"="
        os.waitpid(child, 0)
        assert not torch.equal(optimizer.state[weight]["exp_avg"], held)
    for end in (*step_done, *look):
        os.close(end)


def test_a_backward_through_weights_that_were_updated_since_raises_as_in_a_plain_run() -> None:
    def train() -> str:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.randn(8, SIDE)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        return str(error.value).partition("modified")[1]

    assert train() == "modified"
    with lowtide.budget(None, allow="move-gradients"):
        assert train() == "modified"


def test_nothing_is_kept_of_an_optimizer_that_is_gone() -> None:
    with lowtide.budget(None, allow=LEVER):
        _train(torch.optim.NAdam)
        gc.collect()
        assert not [o for o in gc.get_objects() if type(o) is torch.optim.NAdam]


def test_a_handler_between_the_updates_and_the_scripts_step_changes_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reading was taken for the end of the step, which then updated everything once more."""

    def train() -> list[bytes]:
        zoo.seed(0)
        model = _net()
        running[:] = [model]
        return _train(lambda p: torch.optim.SGD(p, lr=0.1), model=model)

    running: list[nn.Module] = []
    seen: list[type] = []
    plain = train()
    original = stepwise_update.StepwiseUpdate.begins

    def begins(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(stepwise_update.StepwiseUpdate, "begins", begins)
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.extend(type(p.grad) for p in running[0].parameters()))
    try:
        with lowtide.budget(None, allow="move-gradients"):
            assert train() == plain
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen


def test_a_handler_that_clips_between_two_slices_has_buffers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that it interrupts goes on with the slices that it has read."""
    plain = _train(torch.optim.SGD)
    other, original, busy = _net(), streamed_values.Offloaded.read, []

    def read(*args: Any) -> torch.Tensor:
        found = original(*args)
        if not busy:
            busy.append(True)
            nn.utils.clip_grad_norm_(other.parameters(), 0.01)
            nn.utils.clip_grad_value_(other.parameters(), 0.01)
            busy.clear()
        return found

    with lowtide.budget(None, allow="move-gradients"):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        _back(other)
        monkeypatch.setattr(streamed_values.Offloaded, "read", read)
        assert _train(torch.optim.SGD) == plain
        assert optimizer.param_groups
