"""Laws of offloaded optimizer states: the same bits and the same state in whatever way the script reads it, and less memory."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lowtide
import numpy as np
import pytest
import torch
import zoo
from harness import heap, live_now
from lowtide.base.errors import UsageError
from lowtide.runtime.device import file_tier
from lowtide.runtime.updates import offloaded_states
from test_levers import BODIES, MORE
from torch import nn

LEVER = "move-states"
FEATURES = 64
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_nesterov_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam_amsgrad_fused": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
}
RESIDENT = ("adafactor",)
"""Optimizers whose states here are smaller than what is worth offloading."""


def _net() -> nn.Module:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(FEATURES, FEATURES), nn.Tanh())))


def _back(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(16, FEATURES)).square().mean()
    loss.backward()
    return loss


def _away(optimizer: torch.optim.Optimizer) -> int:
    """How many states are offloaded."""
    states = vars(optimizer)["state"].values()
    return sum(type(item) is offloaded_states.Moved for state in states for item in state.values())


def _saved(optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


# --- optimizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_are_away_between_updates_and_bits_are_the_same(kind: str) -> None:
    """Of every optimizer of torch, known or not, with a closure or without; a saved state has the baseline's very bytes."""

    def train(look: Callable[[torch.optim.Optimizer], object]) -> list[bytes]:
        zoo.seed(0)
        model = _net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        bits = []
        for _ in range(4):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                return _back(model)

            if kind == "lbfgs":
                bits.append(zoo.bits(optimizer.step(closure)))  # type: ignore[arg-type]
            else:
                bits.append(zoo.bits(closure()))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            look(optimizer)
        return [*bits, *(zoo.bits(p) for p in model.parameters()), _saved(optimizer)]

    plain = train(lambda _: None)
    away: list[int] = []
    with lowtide.budget(None, allow=LEVER):
        ours = train(lambda optimizer: away.append(_away(optimizer)))
    assert ours == plain
    assert all(away) is (kind not in RESIDENT)


def test_memory_is_lower_by_the_states_in_the_forward_and_by_all_but_one_in_the_update() -> None:
    """Adam's states are twice the parameters: of these only one parameter's are resident, during its own update."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    each = 256 * 256 * 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(4, 256)
    with lowtide.budget(None, allow=LEVER):
        for _ in range(3):
            model(x).sum().backward()
            before = live_now()
            heap().tensor_peak = heap().tensor_live
            optimizer.step()
            optimizer.zero_grad()
            assert heap().tensor_peak - before <= 6 * each  # its states, its gradient, and the update's temporaries
            assert live_now() - before <= each // 4
    assert live_now() - before >= 16 * each


# --- scripts --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("body", [*BODIES, *MORE], ids=lambda b: b.__name__)
def test_states_are_moved_under_any_script_that_gradients_are_moved_under(body: Callable[..., None]) -> None:
    def train() -> list[bytes]:
        zoo.seed(0)
        model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = [p.detach().clone() for p in model.parameters()]
        for i in range(4):
            body(i, model, optimizer, average)
        return [zoo.bits(p) for p in [*model.parameters(), *average]]

    try:
        plain: Any = train()
    except RuntimeError as error:
        plain = type(error)
    with lowtide.budget(None, allow=LEVER):
        try:
            ours: Any = train()
        except RuntimeError as error:
            ours = type(error)
    assert ours == plain


Script = Callable[[nn.Module, Any], Iterator[Any]]
"""A training loop: yields what is to be equal."""


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    _back(model)
    optimizer.step()


def reads_states_now_and_then(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for i in range(6):
        _step(model, optimizer)
        if i % 2:
            yield [s["exp_avg"].norm() for s in optimizer.state.values()]


def holds_a_state(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    first = next(iter(model.parameters()))
    held = optimizer.state[first]["exp_avg"]
    for _ in range(3):
        _step(model, optimizer)
        assert optimizer.state[first]["exp_avg"] is held
        yield held


def holds_a_dictionary(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    held = optimizer.state[next(iter(model.parameters()))]
    for _ in range(3):
        _step(model, optimizer)
        yield held["exp_avg_sq"]


def holds_all_states(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    held = optimizer.state
    for _ in range(3):
        _step(model, optimizer)
        yield [s["exp_avg"] for s in held.values()]


def holds_a_view(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    held = optimizer.state[next(iter(model.parameters()))]["exp_avg"][3:5]
    for _ in range(3):
        _step(model, optimizer)
        yield held


def holds_a_weak_reference(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    held = weakref.ref(optimizer.state[next(iter(model.parameters()))]["exp_avg"])
    for _ in range(3):
        _step(model, optimizer)
        yield held()


def keeps_an_array_of_a_state(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    array = optimizer.state[next(iter(model.parameters()))]["exp_avg"].numpy()
    for _ in range(3):
        _step(model, optimizer)
        yield torch.from_numpy(np.array(array))


def keeps_an_address_of_a_state(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    import ctypes

    _step(model, optimizer)
    first = next(iter(model.parameters()))
    address = optimizer.state[first]["exp_avg"].data_ptr()
    for _ in range(3):
        _step(model, optimizer)
        yield torch.tensor((ctypes.c_float * first.numel()).from_address(address)[:8])


def marks_a_state(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    state = optimizer.state[next(iter(model.parameters()))]
    state["exp_avg"].mark = "mine"
    del state
    for _ in range(3):
        _step(model, optimizer)
        yield optimizer.state[next(iter(model.parameters()))]["exp_avg"].mark == "mine"


def writes_to_states(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for _ in range(4):
        _step(model, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].data.mul_(0.5)
            state["exp_avg_sq"] = state["exp_avg_sq"] + 1e-3
        yield [s["exp_avg_sq"] for s in optimizer.state.values()]


def keeps_a_state_dict(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    """In a plain run its tensors are the optimizer's own, which later steps write to."""
    _step(model, optimizer)
    kept = optimizer.state_dict()
    for _ in range(3):
        _step(model, optimizer)
        yield [s["exp_avg"] for s in kept["state"].values()]


def loads_an_earlier_state(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        _step(model, optimizer)
    optimizer.load_state_dict(kept)
    for _ in range(2):
        _step(model, optimizer)
        yield [s["exp_avg"] for s in optimizer.state.values()]


def goes_on_with_a_copy(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    model, optimizer = copy.deepcopy((model, optimizer))
    for _ in range(3):
        _step(model, optimizer)
        yield [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]


def goes_on_with_a_pickle(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    for _ in range(3):
        _step(model, optimizer)
        yield [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]


def puts_other_states(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    from collections import defaultdict

    _step(model, optimizer)
    optimizer.state = defaultdict(dict)
    for _ in range(2):
        _step(model, optimizer)
    optimizer.state.clear()
    _step(model, optimizer)
    yield [s["step"] for s in optimizer.state.values()]


def adds_a_group(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    extra = nn.Linear(FEATURES, FEATURES)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.1})
    model.append(extra)  # type: ignore[operator]
    for _ in range(3):
        _step(model, optimizer)
    yield [*model.parameters()]
    yield [len(s) for s in optimizer.state.values()]


def has_hooks_around_steps(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    seen = []
    optimizer.register_step_post_hook(lambda opt, *_: seen.append([s["exp_avg"].sum() for s in opt.state.values()]))
    for _ in range(3):
        _step(model, optimizer)
    yield seen


def scales_gradients(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, FEATURES) * (1e30 if i == 1 else 1)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield [scaler.get_scale(), *model.parameters()]


def leaves_parameters_out(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for i in range(4):
        optimizer.zero_grad()
        model[2 * (i % 2) :](torch.randn(16, FEATURES)).square().mean().backward()  # type: ignore[index]
        optimizer.step()
        yield [len(s) for s in optimizer.state.values()]


def raises_in_a_step(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    """A gradient of another type in the middle of the parameters; the script goes on."""
    _step(model, optimizer)
    parameters = list(model.parameters())
    optimizer.zero_grad()
    _back(model)
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = rate
    yield [*parameters, *(p.grad for p in parameters)]
    for _ in range(2):
        _step(model, optimizer)
        yield [*parameters, *(s["exp_avg"] for s in optimizer.state.values())]


def shares_parameters(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    other = torch.optim.Adam(list(model.parameters())[:2], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        _back(model)
        optimizer.step()
        other.step()
        yield [s["exp_avg"] for o in (optimizer, other) for s in o.state.values()]


def reads_in_a_child(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for _ in range(3):
        _step(model, optimizer)
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                os.write(writing, optimizer.state[next(iter(model.parameters()))]["exp_avg"].sum().numpy().tobytes())
            finally:
                os._exit(0)
        os.close(writing)
        yield os.read(reading, 16)
        os.close(reading)
        os.waitpid(child, 0)


SCRIPTS: list[Script] = [
    reads_states_now_and_then, holds_a_state, holds_a_dictionary, holds_all_states, holds_a_view, holds_a_weak_reference,
    keeps_an_array_of_a_state, keeps_an_address_of_a_state, marks_a_state, writes_to_states, keeps_a_state_dict,
    loads_an_earlier_state, goes_on_with_a_copy, goes_on_with_a_pickle, puts_other_states, adds_a_group, has_hooks_around_steps,
    scales_gradients, leaves_parameters_out, raises_in_a_step, shares_parameters, reads_in_a_child,
]


def _frozen(item: Any) -> Any:
    """What is yielded, as it is at this moment."""
    if isinstance(item, torch.Tensor):
        return zoo.bits(item)
    return [_frozen(x) for x in item] if isinstance(item, list) else item


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_a_script_sees_the_states_of_a_plain_run(script: Script) -> None:
    """Whatever it reads, holds, replaces, copies or saves; and when the budget ends, everything is where it was."""

    def train() -> tuple[list[Any], Any]:
        zoo.seed(0)
        model = _net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        found = [_frozen(item) for item in script(model, optimizer)]
        return [found, *(zoo.bits(p) for p in model.parameters())], optimizer

    plain, before = train()
    with lowtide.budget(None, allow=LEVER) as run:
        ours, optimizer = train()
        used = [x.name for x in run.outcome.levers if x.used]
    assert ours == plain
    assert not _away(optimizer)
    assert _saved(optimizer) == _saved(before)
    assert {type(state) for state in optimizer.state.values()} == {dict}
    assert "state" not in vars(torch.optim.Optimizer)
    assert LEVER in used


class Lion(torch.optim.Optimizer):
    """An optimizer of the script's own, with views and lists among its states."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.flat = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    def step(self) -> None:  # type: ignore[override]
        at = 0
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
                state["part"] = self.flat[at : at + p.numel()]
                state["history"] = []
            at += p.numel()
            state["mean"].lerp_(p.grad, 0.1)
            state["part"].add_(p.grad.flatten())
            state["history"] = [*state["history"][-1:], p.grad.clone()]
            p.data.sub_((state["mean"] + 0.1 * state["part"].view_as(p) + state["history"][0]).sign(), alpha=1e-3)


def test_an_optimizer_of_the_scripts_own_keeps_what_it_shares() -> None:
    """Its plain states are away in forward and backward; views and lists stay."""

    def train(away: list[int]) -> list[bytes]:
        zoo.seed(0)
        model = _net()
        optimizer = Lion(model.parameters())
        for _ in range(4):
            _step(model, optimizer)
            away.append(_away(optimizer))
        return [*(zoo.bits(p) for p in model.parameters()), zoo.bits(optimizer.flat)]

    plain, away = train([]), []
    with lowtide.budget(None, allow=LEVER):
        assert train(away) == plain
    assert away == [3, 3, 3, 3]  # one for each weight; biases are small


def test_states_stay_where_the_tier_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    plain = _bits_of_adam()
    monkeypatch.setattr(file_tier.FileTier, "_extend", full)
    with lowtide.budget(None, allow=LEVER) as run:
        assert _bits_of_adam() == plain
        assert LEVER not in [x.name for x in run.outcome.levers]


def _bits_of_adam() -> list[bytes]:
    zoo.seed(0)
    model = _net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        _step(model, optimizer)
    return [zoo.bits(p) for p in model.parameters()]


def test_a_lever_that_is_allowed_and_excluded_is_refused() -> None:
    with pytest.raises(UsageError, match="both allowed and excluded"), lowtide.budget(None, allow=LEVER, without=LEVER):
        pass


# --- when a budget needs it -----------------------------------------------------------------------------------------------


WIDTH, LAYERS = 192, 6
WEIGHTS = LAYERS * 4 * WIDTH * WIDTH
SPARE = 192 << 10
"""Activations of a few samples, biases and scalars."""


def _wide(steps: int, seen: list[int], *, clip: bool = False, kind: str = "adam", state: Any = None) -> list[bytes]:
    zoo.seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    optimizer = OPTIMIZERS[kind](model.parameters())
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    for _ in range(steps):
        model(torch.randn(16, WIDTH)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(_away(optimizer))
    return [zoo.bits(p) for p in model.parameters()]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw_foreach", "adagrad"])
def test_a_budget_that_resident_states_would_cross_is_held(kind: str, clip: bool) -> None:  # noqa: FBT001
    """Adam takes four times the weights' bytes at rest, and a budget of under two is held, after the first steps at the latest."""
    plain = _wide(6, [], clip=clip, kind=kind)
    away: list[int] = []
    with lowtide.budget(live_now() + WEIGHTS + WEIGHTS * 5 // 6 + SPARE) as run:
        assert _wide(6, away, clip=clip, kind=kind) == plain
        outcome = run.outcome
    assert outcome.held
    assert outcome.excused <= 2
    assert LEVER in [x.name for x in outcome.levers if x.used]
    assert all(away[outcome.excused :])
    assert {step.policy for step in outcome.steps[-2:]} <= {"planned", "plain"}


def test_states_that_a_checkpoint_brought_leave_where_the_budget_needs_it() -> None:
    """They are there before the first step; the first unit that shows how much memory it takes is followed by ones without."""
    zoo.seed(1)
    before = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(before.parameters())
    before(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    plain = _wide(6, [], state=state)
    away: list[int] = []
    with lowtide.budget(live_now() + 2 * WEIGHTS + SPARE) as run:
        assert _wide(6, away, state=state) == plain
        outcome = run.outcome
    assert outcome.held
    assert outcome.excused <= 2
    assert away[-1] == 2 * LAYERS


def test_a_budget_below_the_weights_is_refused_with_what_is_left() -> None:
    """With its states away the run needs its weights and one operator; that is what the refusal says."""
    live = live_now()
    with pytest.raises(lowtide.BudgetError, match="cannot be held") as refused, lowtide.budget(live + WEIGHTS // 2):
        _wide(6, [])
    assert WEIGHTS <= refused.value.bound_bytes <= live + 2 * WEIGHTS
    assert "without Lowtide" not in str(refused.value), "its peak is that with the states away"


def test_states_stay_where_the_lever_is_excluded() -> None:
    seen: list[int] = []
    with pytest.raises(lowtide.BudgetError), lowtide.budget(live_now() + 2 * WEIGHTS + SPARE, without=LEVER):
        _wide(6, seen)
    assert not any(seen)


# --- found by attacking it ------------------------------------------------------------------------------------------------


def copies_its_attributes(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    _step(model, optimizer)
    _step(model, optimizer)
    copied = copy.deepcopy(vars(optimizer))["state"]
    pickled = pickle.loads(pickle.dumps(vars(optimizer)))["state"]
    for states in (copied, pickled):
        yield [s["exp_avg"] for s in states.values()]


def shares_its_attributes(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for _ in range(2):
        _step(model, optimizer)
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    yield [s["exp_avg"] for s in other.state.values()]
    optimizer.zero_grad()
    _back(model)
    other.step()


def is_interrupted_by_a_signal(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    """A handler saves the state in the middle of a step, as on a cluster that is about to end the job."""
    import signal

    found: list[Any] = []

    def save(*_: Any) -> None:
        state = optimizer.state_dict()
        found.append((len(state["param_groups"][0]["params"]), all(type(t) is torch.Tensor for s in state["state"].values() for t in s.values())))

    class Telling(float):
        """A learning rate that lets a signal arrive as it is used."""

        def __neg__(self) -> float:
            os.kill(os.getpid(), signal.SIGUSR1)
            return -float(self)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        for group in optimizer.param_groups:
            group["lr"] = Telling(group["lr"])
        for _ in range(3):
            _step(model, optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    yield sorted(set(found))


def unscales_through_a_wrapper(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    class Wrapper:
        @property
        def param_groups(self) -> Any:
            return optimizer.param_groups

        def step(self) -> Any:
            return optimizer.step()

    wrapper, scaler = Wrapper(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, FEATURES)).square().mean()).backward()
        scaler.unscale_(wrapper)  # type: ignore[arg-type]
        scaler.step(wrapper)  # type: ignore[arg-type]
        scaler.update()
    yield list(model.parameters())


def has_a_lazy_layer_that_is_not_used(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    optimizer.add_param_group({"params": nn.LazyLinear(8).parameters()})
    for _ in range(3):
        _step(model, optimizer)
    yield list(model.parameters())


def steps_in_inference_mode(model: nn.Module, optimizer: Any) -> Iterator[Any]:
    for _ in range(3):
        optimizer.zero_grad()
        _back(model)
        with torch.inference_mode():
            optimizer.step()
        yield [s["exp_avg"].is_inference() for s in optimizer.state.values()]


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("script", [
    copies_its_attributes, shares_its_attributes, is_interrupted_by_a_signal, unscales_through_a_wrapper,
    has_a_lazy_layer_that_is_not_used, steps_in_inference_mode,
], ids=lambda s: s.__name__)
def test_a_script_that_was_found_by_attacking_gets_the_plain_runs_results(script: Script) -> None:
    def train() -> list[Any]:
        zoo.seed(0)
        model = _net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        return [[_frozen(item) for item in script(model, optimizer)], *(zoo.bits(p) for p in model.parameters())]

    plain = train()
    with lowtide.budget(None, allow=LEVER):
        assert train() == plain


def test_gradients_are_there_after_a_step_that_raised_and_the_end_of_the_budget() -> None:
    """Those that are too small to be offloaded were hidden from the step, and stayed so."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    with lowtide.budget(None, allow=LEVER):
        _step(model, optimizer)
        _back(model)
        optimizer.state[list(model.parameters())[-1]]["exp_avg"] = None
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def test_optimizers_that_compare_as_equal_are_not_confused() -> None:
    class Equal(torch.optim.Adam):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        def __hash__(self) -> int:
            return 1

    def train() -> list[bytes]:
        zoo.seed(0)
        models = [_net(), _net()]
        optimizers = [Equal(m.parameters(), lr=1e-2) for m in models]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                _step(model, optimizer)
        return [*(zoo.bits(p) for m in models for p in m.parameters()), *(_saved(o) for o in optimizers)]

    plain = train()
    with lowtide.budget(None, allow=LEVER):
        assert train() == plain


def test_what_comes_back_as_a_budget_ends_is_no_part_of_the_last_step() -> None:
    """All states are resident again after the block, which no step is to be blamed for."""
    with lowtide.budget(live_now() + WEIGHTS + WEIGHTS * 5 // 6 + SPARE) as run:
        _wide(6, [])
        optimizers = [o for o in gc.get_objects() if isinstance(o, torch.optim.Adam)]
    assert not any(_away(o) for o in optimizers)
    assert run.outcome.held
    assert run.outcome.steps[-1].peak_bytes == run.outcome.steps[-2].peak_bytes


def test_a_step_after_one_in_which_states_were_saved_is_within_the_budget() -> None:
    """Saving needs all of them at once; they leave before the next step begins."""
    zoo.seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    budget = live_now() + WEIGHTS + SPARE
    with lowtide.budget(budget) as run:
        for i in range(8):
            _step_on(model, optimizer)
            if i == 4:
                assert len(_saved(optimizer)) > 2 * WEIGHTS
    over = [step.index for step in run.outcome.steps if step.peak_bytes > budget]
    assert [i for i in over if i >= run.outcome.excused] == [4]


def _step_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_states_that_cannot_leave_do_not_delay_a_refusal() -> None:
    """They are in dictionaries of another type, which stay as they are; the third step at the latest is refused."""
    from collections import OrderedDict

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    done = 0
    with pytest.raises(lowtide.BudgetError), lowtide.budget(live_now() + 5 * WEIGHTS // 2):
        for _ in range(6):
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, state in list(optimizer.state.items()):
                optimizer.state[p] = OrderedDict(state)
            done += 1
    assert done <= 3
