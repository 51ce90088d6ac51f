"""Laws of the levers on gradients and updates.

An exact lever gives the baseline's bits and takes its bytes off the peak. A lever that a budget uses automatically never ends
a run, whatever the script reads. One that was asked for by name and cannot give back what a script reads stops that script
before anything wrong is computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from harness import heap, live_now, trained_under
from lowtide.base.errors import LeverError
from lowtide.runtime.updates import optimizer_in_backward
from lowtide.runtime.run_figures import RunOutcome
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowtide

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
}


def _net(width: int = 256, depth: int = 8) -> nn.Module:
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 8))


def _train(
    make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], loss_of: Any, steps: int = 6
) -> tuple[list[bytes], list[int]]:
    """Losses, weights and optimizer states as bits, and the heap's peak in each step."""
    zoo.seed(0)
    model = make()
    opt = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    found, peaks = [], []
    for _ in range(steps):
        heap().tensor_peak = heap().tensor_live
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        opt.step()
        schedule.step()
        peaks.append(heap().tensor_peak)
        found.append(zoo.bits(loss))
        del loss
    found += [zoo.bits(p) for p in model.parameters()]
    found += [zoo.bits(t) for p in model.parameters() for t in opt.state[p].values() if isinstance(t, torch.Tensor)]
    return found, peaks


def _both(
    make: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], loss_of: Any, **how: Any
) -> tuple[RunOutcome, list[int], list[int]]:
    """Assert equal bits of a baseline run and one with levers; return the outcome and each step's peak above the base, for
    both.
    """
    torch.use_deterministic_algorithms(mode=True)
    _train(make, optimizer, loss_of, 1)
    gc.collect()
    base = heap().tensor_live
    plain, before = _train(make, optimizer, loss_of)
    with lowtide.budget(how.pop("budget", None), **how) as run:
        ours, after = _train(make, optimizer, loss_of)
        outcome = run.outcome
    assert ours == plain
    return outcome, [p - base for p in before], [p - base for p in after]


def _loss(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(8, 256)), torch.randint(8, (8,)))


@pytest.mark.parametrize("lever", ["update-in-backward", "move-gradients"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_levers_on_gradients_keep_bits_and_take_gradients_off_the_peak(name: str, lever: str) -> None:
    """More than 70 % of the gradient bytes are gone from the last step's peak, for every optimizer."""
    outcome, before, after = _both(_net, OPTIMIZERS[name], _loss, budget=None, allow=(lever,))
    assert outcome.levers[0].used
    gradients = sum(4 * p.numel() for p in _net().parameters())
    assert before[-1] - after[-1] > 0.7 * gradients


def test_values_made_from_a_weight_are_recomputed_before_its_update() -> None:
    """With update-in-backward and without offload, values can still be recomputed: the lever takes the gradients off the
    lowest peak, and a budget below that of the run without it is held.
    """
    torch.use_deterministic_algorithms(mode=True)

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(512, 256)), torch.randint(8, (512,)))

    def net() -> nn.Module:
        return nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 8))

    least = {}
    for lever in ((), ("update-in-backward",)):
        with lowtide.budget(live_now() + (12 << 20), offload=False, allow=lever) as run:
            _train(net, OPTIMIZERS["sgd"], loss)
            assert run.outcome.plan is not None
            least[bool(lever)] = run.outcome.plan.lowest_peak_bytes - heap().tensor_live
    gradients = sum(4 * p.numel() for p in net().parameters())
    assert least[True] <= least[False] - 0.7 * gradients
    outcome, _, after = _both(net, OPTIMIZERS["sgd"], loss, budget=live_now() + (7 << 20), offload=False,
                              allow=("update-in-backward",))
    assert outcome.steps[-1].recomputed_ops
    assert not outcome.steps[-1].offloaded_bytes
    assert max(after) <= 7 << 20


def test_optimizer_states_created_in_backward_count_once_in_the_minimum() -> None:
    """The budget that the steps with the lever take is held; it used to be refused, with a proven bound above the peak that
    was reached.
    """
    allow = ("update-in-backward",)
    _, _, after = _both(_net, OPTIMIZERS["adamw"], _loss, allow=allow)
    budget = live_now() + max(after) + (64 << 10)
    outcome, _, held = _both(_net, OPTIMIZERS["adamw"], _loss, budget=budget, allow=allow)
    assert outcome.plan is not None
    assert outcome.plan.bound_peak_bytes <= outcome.steps[-1].peak_bytes
    assert max(held) <= max(after) + (64 << 10)


def gpt2() -> nn.Module:
    """GPT-2 as the package ships it, wide for its batch: gradients are most of what training adds."""
    import transformers as hf

    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_positions=64, n_embd=384, n_layer=2, n_head=4)).train()


def resnet() -> nn.Module:
    """ResNet as the package ships it, deep: what one convolution's backward works on (on some processors five times its
    weights) is little beside all gradients."""
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[128, 256, 512, 512], num_labels=10, depths=[2, 2, 12, 12])
    return hf.ResNetForImageClassification(config).train()


def _language(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(300, (1, 8))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _image(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.randint(10, (2,))).loss
    return loss


CASES = {"gpt2": (gpt2, _language), "resnet": (resnet, _image)}


@pytest.mark.long("resnet")
@pytest.mark.parametrize("job", CASES)
def test_transformers_models_train_without_most_gradient_bytes(job: str) -> None:
    """With update-in-backward more than 70 % of the gradient bytes go; under a budget that no plan holds otherwise,
    move-gradients is used automatically.
    """
    make, loss_of = CASES[job]
    gradients = sum(4 * p.numel() for p in make().parameters())
    outcome, before, after = _both(make, OPTIMIZERS["adamw"], loss_of, allow=("update-in-backward",))
    assert outcome.levers[0].used
    assert before[-1] - after[-1] > 0.7 * gradients
    gc.collect()
    above = after[-1] + gradients // 5
    outcome, _, held = _both(make, OPTIMIZERS["adamw"], loss_of, budget=live_now() + above)
    assert [x.name for x in outcome.levers if x.used] == ["move-gradients"]
    assert max(held[-2:]) <= above + (64 << 10)


def _loop(body: Callable[..., None], steps: int = 4, **how: Any) -> tuple[list[bytes], RunOutcome | None]:
    """Train by a loop of its own: weights, and the outcome under levers."""
    zoo.seed(0)
    model = _net(32, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = [p.detach().clone() for p in model.parameters()]
    outcome = None
    if how:
        with lowtide.budget(**how) as run:
            for i in range(steps):
                body(i, model, opt, average)
            outcome = run.outcome
    else:
        for i in range(steps):
            body(i, model, opt, average)
    return [zoo.bits(p) for p in [*model.parameters(), *average]], outcome


def _back(model: nn.Module) -> None:
    F.cross_entropy(model(torch.randn(8, 32)), torch.randint(8, (8,))).backward()


def clips(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()


def accumulates(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    _back(model)
    opt.step()


def zeroes_in_place(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad(set_to_none=False)
    _back(model)
    opt.step()


def looks_at_gradients(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    opt.step()
    average[0].copy_(next(model.parameters()).grad)  # type: ignore[arg-type]


def averages_weights_before_the_step(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    for a, p in zip(average, model.parameters(), strict=True):
        a.lerp_(p.detach(), 0.1)
    opt.step()


def evaluates_before_the_step(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    with torch.no_grad():
        average[-1].copy_(model(torch.ones(1, 32))[0])
    opt.step()


def sets_the_rate_late(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    opt.param_groups[0]["lr"] = 0.1 / (i + 1)
    opt.step()


def skips_steps(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    if i % 2:
        opt.step()


def steps_twice(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    opt.step()
    opt.step()


def sets_gradients(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def by_closure(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    def closure() -> float:
        opt.zero_grad()
        _back(model)
        return 0.0

    opt.step(closure)


def hooks(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    if not i:
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5)
    opt.zero_grad()
    _back(model)
    opt.step()


def reads_parameters_late_in_backward(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    """The last layer's weight is used twice, once detached near the input: its gradient is whole long before."""
    opt.zero_grad()
    x = torch.randn(8, 32, requires_grad=True)
    last = model[-1].weight  # type: ignore[index]
    y = x * torch.sigmoid(x * last.detach().sum(0))
    F.cross_entropy(model(y), torch.randint(8, (8,))).backward()
    opt.step()


def restarts_its_momentum(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    for state in opt.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].zero_()
    opt.step()


def clears_its_states(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    opt.state.clear()
    opt.step()


def swaps_weights(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    own = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.sign() * 0.1
    opt.zero_grad()
    _back(model)
    for p, o in zip(model.parameters(), own, strict=True):
        p.data = o
    opt.step()


def reads_a_weight_unseen(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    """By ``.data``, which no version counter shows, near the input."""
    opt.zero_grad()
    last = model[-1].weight.data  # type: ignore[index]
    h = F.linear(F.linear(torch.randn(8, 32, requires_grad=True), last), last.t())
    F.cross_entropy(model(h), torch.randint(8, (8,))).backward()
    opt.step()


def saves_before_the_step(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    import io

    opt.zero_grad()
    _back(model)
    torch.save(model.state_dict(), io.BytesIO())
    opt.step()


def steps_on_a_former_gradient(i: int, model: Any, opt: Any, average: Any) -> None:
    """From now on the first layer is not used, and only the gradients of the others are cleared: its former gradient is
    applied again.
    """
    used = model[2:]
    for p in used.parameters():
        p.grad = None
    F.cross_entropy(used(torch.randn(8, 32)), torch.randint(8, (8,))).backward()
    opt.step()


def keeps_an_array(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    array = next(model.parameters()).detach().numpy()
    opt.zero_grad()
    _back(model)
    average[0].add_(float(array.sum()))
    opt.step()


def makes_a_list_before_the_step(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    average[1].copy_(torch.tensor(model[0].bias.tolist()))  # type: ignore[index]
    opt.step()


def evaluates_by_closure(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    def closure() -> float:
        with torch.no_grad():
            average[-1].copy_(model(torch.ones(1, 32))[0])
        return 0.0

    opt.zero_grad()
    _back(model)
    opt.step(closure)


BODIES = [
    restarts_its_momentum, clears_its_states, swaps_weights, reads_a_weight_unseen, saves_before_the_step, clips, accumulates,
    zeroes_in_place, looks_at_gradients, averages_weights_before_the_step, evaluates_before_the_step, keeps_an_array,
    makes_a_list_before_the_step, evaluates_by_closure, sets_the_rate_late, skips_steps, steps_twice, sets_gradients, by_closure, hooks,
]


def _plainly(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    opt.step()


def reads_one_in_a_while(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    _plainly(i, model, opt, average)
    if i % 3 == 2:
        average[0].copy_(next(model.parameters()).grad)  # type: ignore[arg-type]


def changes_gradients_through_data(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    """No version counter shows it; and between the reads each gradient may have left again."""
    opt.zero_grad()
    _back(model)
    for p in model.parameters():
        p.grad.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]
    opt.step()


def keeps_a_gradient_and_changes_it_later(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    first = next(model.parameters()).grad
    list(p.grad for p in model.parameters())
    assert first is next(model.parameters()).grad
    first.mul_(0.5)  # type: ignore[union-attr]
    opt.step()


def keeps_an_address(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    import ctypes

    opt.zero_grad()
    _back(model)
    addresses = [(p.grad.data_ptr(), p.grad.numel()) for p in model.parameters()]  # type: ignore[union-attr]
    for address, count in addresses:
        found = (ctypes.c_float * count).from_address(address)
        found[0] = 0.25
    opt.step()


def builds_a_graph_over_gradients(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    F.cross_entropy(model(torch.randn(8, 32)), torch.randint(8, (8,))).backward(create_graph=True)
    sum(p.grad.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr, misc]
    opt.step()
    for p in model.parameters():
        p.grad = None


def moves_the_model(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    opt.zero_grad()
    _back(model)
    model.double()
    model.float()
    opt.step()


def copies_the_model(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    import copy

    opt.zero_grad()
    _back(model)
    other = copy.deepcopy(model)
    average[0].add_(next(other.parameters()).detach())
    assert next(other.parameters()).grad is None
    opt.step()


def _halves(opt: Any, *_: Any) -> None:
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad.mul_(0.5)


def has_a_step_hook(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    if not i:
        opt.register_step_pre_hook(_halves)
    _plainly(i, model, opt, average)


def drops_by_hand(i: int, model: nn.Module, opt: Any, average: Any) -> None:
    _back(model)
    opt.step()
    for n, p in enumerate(model.parameters()):
        if n % 2:
            del p.grad
        else:
            p.grad = None
    assert all(p.grad is None for p in model.parameters())


MORE = [
    steps_on_a_former_gradient, reads_one_in_a_while, changes_gradients_through_data, keeps_a_gradient_and_changes_it_later,
    keeps_an_address, builds_a_graph_over_gradients, moves_the_model, copies_the_model, has_a_step_hook, drops_by_hand,
    reads_parameters_late_in_backward, _plainly,
]


@pytest.mark.parametrize("how", ["needed", "by name"])
@pytest.mark.parametrize("body", [*BODIES, *MORE], ids=lambda b: b.__name__)
def test_moved_gradients_keep_the_bits_of_any_script(body: Callable[..., None], how: str) -> None:
    """Whatever a script reads, or begins to read after some steps, it gets the baseline's bits and is never stopped."""
    plain, _ = _loop(body, steps=6)
    given: dict[str, Any] = {"size": None, "allow": ("move-gradients",)}
    if how == "needed":
        given = {"size": live_now() + 30_000, "keep_going": True}
    bits, outcome = _loop(body, steps=6, **given)
    assert bits == plain
    assert outcome is not None
    used = {x.name for x in outcome.levers if x.used}
    assert used <= {"move-gradients", "move-states", "sliced-update"}
    assert "move-gradients" in used or body in (builds_a_graph_over_gradients, has_a_step_hook)

    def later(i: int, model: nn.Module, opt: Any, average: Any) -> None:
        (body if i >= 4 else _plainly)(i, model, opt, average)

    plain, _ = _loop(later, steps=8)
    bits, _ = _loop(later, steps=8, **given)
    assert bits == plain


def test_gradients_read_one_by_one_are_offloaded_again() -> None:
    """A norm that is logged every third step fetches one gradient at a time, and the budget holds."""
    def train() -> tuple[list[bytes], list[int]]:
        zoo.seed(0)
        model, found, peaks = _net(), [], []
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for i in range(8):
            heap().tensor_peak = heap().tensor_live
            opt.zero_grad()
            _loss(model).backward()
            opt.step()
            if i % 3 == 2:
                found.append(zoo.bits(sum(p.grad.square().sum() for p in model.parameters())))  # type: ignore[arg-type, union-attr, misc]
            peaks.append(heap().tensor_peak)
        return [*found, *(zoo.bits(p) for p in model.parameters())], peaks

    plain, before = train()
    gc.collect()
    gradients = sum(4 * p.numel() for p in _net().parameters())
    with lowtide.budget(live_now() + max(before) - heap().tensor_live - gradients // 2) as run:
        ours, _ = train()
        outcome = run.outcome
    assert ours == plain
    assert outcome.held
    assert outcome.excused <= 2
    assert [x.name for x in outcome.levers if x.used] == ["move-gradients"]


def test_gradients_that_clipping_fetched_are_not_resident_in_the_next_forward() -> None:
    """Lightning clears gradients between forward and backward. Clipping reads all of them at once, and they used to stay."""
    torch.use_deterministic_algorithms(mode=True)

    def train() -> list[torch.Tensor]:
        zoo.seed(0)
        model = _net()
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(8):
            target = torch.randn(1 << 20)
            loss = F.mse_loss(model(torch.randn(8, 256)).mean() * target, target)
            opt.zero_grad()
            loss.backward()
            del target, loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        return list(model.parameters())

    train()
    base = heap().tensor_peak = live_now()
    plain = train()
    above = heap().tensor_peak - base
    gradients = sum(4 * p.numel() for p in _net().parameters())
    found, outcome, _, _ = trained_under(train, above - gradients // 2)
    assert all(map(torch.equal, plain, found))
    assert [x.name for x in outcome.levers if x.used] == ["move-gradients"]
    assert outcome.held
    assert outcome.excused <= 3
    assert all(step.policy != "online" for step in outcome.steps[4:])


def test_gradients_that_were_fetched_keep_what_the_script_knows_of_them() -> None:
    """Clipping fetches all. One whose address is taken, or that has an attribute, is still the same in the next forward."""
    def train() -> list[torch.Tensor]:
        zoo.seed(0)
        model = _net()
        opt, told = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for i in range(6):
            opt.zero_grad()
            _loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            marked, *others = [p for p in model.parameters() if p.dim() == 2]
            marked.grad.tag = i  # type: ignore[union-attr]
            before = [p.grad.data_ptr() for p in others]  # type: ignore[union-attr]
            model(torch.randn(8, 256))  # a unit begins
            after = [p.grad.data_ptr() for p in others]  # type: ignore[union-attr]
            told.append(torch.tensor([before == after, getattr(marked.grad, "tag", -1) == i]))
            opt.step()
        assert all(map(torch.all, told))
        return list(model.parameters())

    plain = train()
    with lowtide.budget(None, allow=("move-gradients",)) as run:
        ours = train()
        outcome = run.outcome
    assert all(map(torch.equal, plain, ours))
    assert [x.name for x in outcome.levers if x.used] == ["move-gradients"]


@pytest.mark.parametrize("body", [*BODIES[:-2], steps_on_a_former_gradient], ids=lambda b: b.__name__)
def test_update_in_backward_stops_a_script_that_it_cannot_follow(body: Callable[..., None]) -> None:
    """The first two steps are plain; then the script does what the lever cannot follow, and LeverError is raised. Without the
    lever the same script has the baseline's bits.
    """
    plain: list[bytes] = []

    def changes(i: int, model: nn.Module, opt: Any, average: Any) -> None:
        (body if i >= 2 else _plainly)(i, model, opt, average)

    with pytest.raises(LeverError, match="cannot be restored"):
        _loop(changes, steps=6, size=None, allow=("update-in-backward",))
    plain, _ = _loop(changes, steps=6)
    again, _ = _loop(changes, steps=6, size=None)
    assert again == plain


def test_an_evaluation_beside_gradients_crosses_no_step_after_the_second() -> None:
    """Only the first two, excused steps may cross the budget: the highest point between two observed units counts, too. A
    third step used to cross it.
    """
    torch.use_deterministic_algorithms(mode=True)

    def train() -> list[torch.Tensor]:
        zoo.seed(0)
        model = _net()
        opt = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(6):
            opt.zero_grad()
            _loss(model).backward()
            opt.step()
            with torch.no_grad():
                model(torch.randn(1024, 256)).argmax(1)
        return list(model.parameters())

    train()
    base = live_now()
    heap().tensor_peak = base
    plain = train()
    above = heap().tensor_peak - base
    found, outcome, _, _ = trained_under(train, above - 20_000)
    assert all(map(torch.equal, plain, found))
    assert outcome.levers[0].used
    assert outcome.held
    assert outcome.excused == 2


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_touching_a_parameter_before_its_optimizers_step_stops_the_run(what: str) -> None:
    """One backward makes the gradients of two optimizers, and both update in it. A script that reads or writes the second
    one's parameters between the two steps is stopped; one that does not gets the baseline's bits.
    """

    def train(*, looks: bool) -> list[bytes]:
        zoo.seed(0)
        model = _net(32, 2)
        first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2:].parameters(), lr=0.1)
        average = model[2].weight.detach().clone()
        for _ in range(4):
            first.zero_grad()
            second.zero_grad()
            _back(model)
            first.step()
            if looks and what == "reads":
                average.lerp_(model[2].weight.detach(), 0.1)
            elif looks:
                model[2].weight.data.mul_(0.9)
            second.step()
        return [zoo.bits(p) for p in [*model.parameters(), average]]

    with pytest.raises(LeverError, match="cannot be restored"), lowtide.budget(None, allow=("update-in-backward",)):
        train(looks=True)
    plain = train(looks=False)
    with lowtide.budget(None, allow=("update-in-backward",)) as run:
        ours = train(looks=False)
        assert run.outcome.levers[0].used
    assert ours == plain


class _Onlooker(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_around_the_step_leaves_none_of_lowtides_behind() -> None:
    """One more used to stay beneath it in every step."""
    def body(i: int, model: nn.Module, opt: Any, average: Any) -> None:
        assert len(_get_current_dispatch_mode_stack()) <= 2
        opt.zero_grad()
        _back(model)
        with _Onlooker():
            opt.step()

    plain, _ = _loop(body, steps=8)
    bits, _ = _loop(body, steps=8, size=live_now() + (1 << 30))
    assert bits == plain
    assert not _get_current_dispatch_mode_stack()


class _ReadsLate(nn.Module):
    """Near its input it reads a matrix as a plain number, in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 256), nn.Linear(256, 256, bias=False)
        self.body = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))
        self.matrix = self.fixed = torch.randn(256, 256) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) @ self.matrix
        result: torch.Tensor = self.last(self.body(h))
        return result


def test_an_aliased_weight_is_never_updated_in_a_planned_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From step 8 on the same operators read the last layer's weight through ``.data``, long after its gradient is whole. In
    that step, which is planned and not observed, the bits are the baseline's; the run is stopped afterwards.
    """
    torch.use_deterministic_algorithms(mode=True)
    seen, per_step = [0], []
    true = optimizer_in_backward.OptimizerInBackward.look_at

    def look_at(self: optimizer_in_backward.OptimizerInBackward, func: Any, args: Any, kwargs: Any) -> None:
        seen[0] += 1
        true(self, func, args, kwargs)

    def train(steps: int) -> list[bytes]:
        zoo.seed(0)
        model = _ReadsLate()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for i in range(steps):
            if i == 8:
                model.matrix = model.last.weight.data
            opt.zero_grad()
            model(torch.randn(512, 256)).square().mean().backward()
            opt.step()
            per_step.append(seen[0])
            seen[0] = 0
            found += [zoo.bits(p) for p in model.parameters()]
        return found

    plain = train(9)
    monkeypatch.setattr(optimizer_in_backward.OptimizerInBackward, "look_at", look_at)
    per_step.clear()
    with lowtide.budget(live_now() + (14 << 20), allow=("update-in-backward",)) as run:
        assert train(9) == plain
        assert run.outcome.steps[-1].policy == "planned"
        assert run.outcome.steps[-1].recomputed_ops or run.outcome.steps[-1].offloaded_bytes
    few = min(per_step)
    assert per_step[-1] == few, "in step 8 nobody looked at the operators of the backward"
    assert per_step[0] > 5 * few
    with pytest.raises(LeverError, match="used after their gradients are complete"):
        with lowtide.budget(live_now() + (14 << 20), allow=("update-in-backward",)):
            train(10)


@pytest.mark.parametrize("lever", ["update-in-backward", "sliced-update"])
def test_foreach_momentum_in_bfloat16_keeps_bits_with_new_parameters(lever: str) -> None:
    """torch updates all parameters of a group one by one if one has no buffer yet, and that rounds differently."""
    def train() -> list[bytes]:
        zoo.seed(0)
        layers = [nn.Linear(64, 64).bfloat16() for _ in range(4)]
        opt = torch.optim.SGD([p for m in layers for p in m.parameters()], lr=0.1, momentum=0.9, foreach=True)
        for i in range(6):
            opt.zero_grad()
            x = torch.randn(8, 64).bfloat16()
            for layer in layers[: 2 + i // 2]:
                x = layer(x)
            x.float().square().mean().backward()
            opt.step()
        return [zoo.bits(p) for m in layers for p in m.parameters()]

    plain = train()
    with lowtide.budget(None, allow=(lever,)):
        assert train() == plain


def test_update_in_backward_keeps_bits_with_checkpointed_layers() -> None:
    """The forward that runs again in the backward reads parameters whose gradients are not whole yet."""
    from torch.utils.checkpoint import checkpoint

    def body(i: int, model: Any, opt: Any, average: Any) -> None:
        opt.zero_grad()
        x = torch.randn(8, 32)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        F.cross_entropy(x, torch.randint(8, (8,))).backward()
        opt.step()

    plain, _ = _loop(body)
    bits, outcome = _loop(body, size=None, allow=("update-in-backward",))
    assert bits == plain
    assert outcome is not None
    assert outcome.levers[0].used


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw foreach", "rmsprop", "adagrad", "nadam", "radam", "adamax"])
def test_a_sliced_foreach_update_keeps_bits_and_fits_the_budget(kind: str) -> None:
    """The budget leaves no room for half of the gradients' bytes in temporaries: the update is sliced, and its peak falls by
    as much.
    """
    def made(p: Any) -> torch.optim.Optimizer:
        opt = OPTIMIZERS[kind](p)
        for group in opt.param_groups:
            group["foreach"] = True
        return opt

    gradients = sum(4 * p.numel() for p in _net().parameters())
    _, before, _ = _both(_net, made, _loss, without=("move-gradients", "sliced-update"))
    gc.collect()
    outcome, _, after = _both(
        _net, made, _loss, budget=live_now() + before[-1] - gradients // 2, without=("move-gradients",)
    )
    assert [x.name for x in outcome.levers] == ["sliced-update"]
    assert after[-1] <= before[-1] - gradients // 2 + (64 << 10)


def test_a_swallowed_lever_error_is_raised_again() -> None:
    """By the optimizer's step, if the script caught the error. A block that ends between a backward and the optimizer's step
    raises, too.
    """
    torch.manual_seed(0)
    model = _net(32, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LeverError), lowtide.budget(None, allow=("update-in-backward",)):
        _back(model)
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        except LeverError:
            pass
        opt.step()
    opt.zero_grad()
    with pytest.raises(LeverError, match="between a backward and the optimizer's step"), \
            lowtide.budget(None, allow=("update-in-backward",)):
        _back(model)


def test_models_trained_one_after_another_leave_nothing_behind() -> None:
    """Three models in one block have the baseline's bits; afterwards no dispatch mode and no patch of ``Parameter.grad`` is
    left.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def train(n: int) -> list[bytes]:
        found = []
        for k in range(n):
            torch.manual_seed(k)
            model = _net(32, 2)
            opt = torch.optim.Adam(model.parameters(), lr=0.1)
            for _ in range(3):
                opt.zero_grad()
                _back(model)
                opt.step()
            found += [zoo.bits(p) for p in model.parameters()]
            assert [id(p) for p in opt.state] == [id(p) for p in model.parameters()]
        return found

    plain = train(3)
    with lowtide.budget(None, allow=("update-in-backward",)):
        assert train(3) == plain
    for _ in range(2):
        with lowtide.budget(10**12):  # observed, and declined by the dispatch mode
            model = _net(32, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                averages_weights_before_the_step(0, model, opt, [p.detach().clone() for p in model.parameters()])
    assert not _get_current_dispatch_mode_stack()
    assert "grad" not in vars(nn.Parameter)


class _Turning(nn.Module):
    """A product with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("reads", [True, False])
def test_reading_a_conjugated_weight_before_the_step_stops_the_run(reads: bool) -> None:
    """A lazily conjugated view, taken before the backward, is an alias of the weight. A script that only makes the view has
    the baseline's bits.
    """
    def train(**how: Any) -> list[bytes]:
        zoo.seed(0)
        model = _Turning()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        with lowtide.budget("1 GiB", **how) if how else contextlib.nullcontext() as run:
            for _ in range(5):
                turned = model.weight.detach().conj()
                opt.zero_grad()
                model(torch.randn(8, 32, dtype=torch.complex64)).abs().square().mean().backward()
                if reads:
                    found.append(zoo.bits(torch.view_as_real(turned.resolve_conj())))
                opt.step()
        assert run is None or any(lever.used for lever in run.outcome.levers)
        return [*found, zoo.bits(torch.view_as_real(model.weight))]

    if reads:
        with pytest.raises(LeverError, match="are used after their gradients are complete"):
            train(allow="update-in-backward")
    else:
        assert train(allow="update-in-backward") == train()


def test_gradients_are_not_offloaded_in_a_process_group(tmp_path: Path) -> None:
    """move-gradients stays off although it was allowed by name, because reducers read gradients in C++; it used to be engaged.
    """

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(256, 256)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = train()
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with lowtide.budget("1GiB", allow=("move-gradients",)) as run:
            found = train()
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, plain, found))
    assert [(x.name, x.used) for x in run.outcome.levers if x.name == "move-gradients"] == [("move-gradients", False)]
