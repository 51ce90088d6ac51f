"""Laws of the script's own checkpoints (`torch.utils.checkpoint`) under a budget.

Where it gives the same bits, their functions run once, and the plan decides what is recomputed; otherwise they stay as written.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import random
import threading
import types
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import heap, live_now, trained_under
from lowtide.base.lever_catalogue import CHECKPOINTS
from lowtide.report.terminal import show_outcome
from lowtide.runtime.run_figures import RunOutcome
from lowtide.runtime.units.recorded_unit import RecordedUnit
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import lowtide

Make = Callable[[], nn.Module]
STEPS = 6
WIDTH = 64


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, each called through a checkpoint."""

    def __init__(self, make: Make = Block, *, depth: int = 6, shared: bool = False, **how: Any) -> None:
        super().__init__()
        self.how = {"use_reentrant": False} | how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make()] * depth if shared else [make() for _ in range(depth)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One checkpoint."""
        found: torch.Tensor = checkpoint(block, x, **self.how)
        return found


def train(make: Callable[[], nn.Module], steps: int = STEPS, accumulate: int = 1, rows: int = 256) -> list[torch.Tensor]:
    """Train a model: its losses, weights, buffers and gradients, and the states of all generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the legacy generator is what scripts use
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):  # a step is that many micro-batches
            loss = net(torch.randn(rows, WIDTH)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    loss = net(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [
        *losses, *gradients, *(t.detach() for t in (*net.parameters(), *net.buffers())), torch.get_rng_state(),
        torch.tensor([random.random(), np.random.rand()]),  # noqa: NPY002
    ]


def descended(
    net: nn.Module, loss_of: Callable[[int], torch.Tensor], *, steps: int = STEPS, by_hand: bool = False,
) -> list[torch.Tensor]:
    """The weights and buffers after some steps of gradient descent, by an optimizer or by hand."""
    optimizer = None if by_hand else torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(steps):
        loss_of(number).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            continue
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
                p.grad = None
    return [t.detach().float() for t in (*net.parameters(), *net.buffers())]


def peak_of(train: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
    """The results of a baseline run, and its peak above the bytes live before."""
    train()
    base = heap().tensor_peak = heap().tensor_live
    bits = train()
    return bits, heap().tensor_peak - base


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    assert all(t.isfinite().all() for t in other), "nothing is shown by what is not a number"
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def calls(outcome: RunOutcome) -> int:
    """How many calls ran as plain calls."""
    found = [x for x in outcome.levers if x.name == CHECKPOINTS]
    return int(found[0].text.split()[0]) if found else 0


def compared_runs(run: Callable[[], list[torch.Tensor]], share: float, **options: Any) -> RunOutcome:
    """The same for a training loop of any kind."""
    bits, above = peak_of(run)
    found, outcome, _, _ = trained_under(run, int(share * above), **options)
    assert equal(found, bits)
    return outcome


def compared(make: Callable[[], nn.Module], share: float = 1.2, **how: Any) -> RunOutcome:
    """Train without Lowtide and under a share of the baseline's peak, and compare the bits."""
    return compared_runs(partial(train, make, **how), share)


KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])


@pytest.fixture(autouse=True)
def seconds_saved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each unit to save an hour, or the seconds that the test asks for: what clocks measure decides no test."""
    seconds = getattr(request, "param", 3600.0)
    monkeypatch.setattr(RecordedUnit, "saved_seconds", property(lambda _: seconds))


@pytest.mark.long("1.0", "1.5-not", "0.8-reentrant")
@KINDS
@pytest.mark.parametrize("share", [1.5, 1.0, 0.8])
def test_functions_of_checkpoints_run_once_and_the_plan_decides(reentrant: bool, share: float) -> None:  # noqa: FBT001
    """From the second step on, every call is a plain one; bits, the generators' states and the budget are kept."""
    outcome = compared(partial(Net, use_reentrant=reentrant), share, rows=2048)
    assert calls(outcome) == 6 * STEPS
    assert outcome.held


@KINDS
@pytest.mark.parametrize("seconds_saved", [0.0], indirect=True)
def test_checkpoints_stay_as_written_where_a_plan_would_cost_more_time(reentrant: bool) -> None:  # noqa: FBT001
    """A plan for plain calls is known after one unit with them."""
    outcome = compared(partial(Net, use_reentrant=reentrant), 1.2, rows=2048)
    assert calls(outcome) == 6
    assert outcome.held


@KINDS
def test_gradients_summed_over_micro_batches_have_the_same_bits(reentrant: bool) -> None:  # noqa: FBT001
    """A reentrant checkpoint adds its gradients to those that exist on their own."""
    outcome = compared(partial(Net, use_reentrant=reentrant), accumulate=3)
    assert calls(outcome) > 0


def test_a_module_that_several_checkpoints_call_is_plain_unless_they_are_reentrant() -> None:
    """Reentrant ones add each call's gradient to the sum that exists: in another order than one backward does."""
    assert calls(compared(partial(Net, shared=True, use_reentrant=False), accumulate=2)) > 0
    assert calls(compared(partial(Net, shared=True, use_reentrant=True), accumulate=2)) == 0


class Tied(Net):
    """The last layer has the weight of the first block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks, and one weight of the first once more."""
        out = super().forward(x)
        up: Any = self.blocks[0].up
        return out @ up.weight.T[:, :WIDTH]


@KINDS
def test_a_parameter_that_is_used_outside_too_keeps_the_order_of_its_sum(reentrant: bool) -> None:  # noqa: FBT001
    """Only the block whose weight is used elsewhere stays as written, and only if it is reentrant.

    Reentrant ones also stay where gradients exist already, in every second micro-batch.
    """
    outcome = compared(partial(Tied, use_reentrant=reentrant), accumulate=2)
    assert calls(outcome) == (5 * STEPS if reentrant else 6 * 2 * STEPS)


class Normed(nn.Module):
    """A block with a batch norm, whose statistics a checkpoint updates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return torch.relu(self.norm(self.linear(x)))


class Moving(Block):
    """Replaces a buffer by another in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block, scaled by a moving average."""
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x) * (1 + self.mean)


class Counting(Block):
    """Counts its runs, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        self.runs += 1
        return super().forward(x) / self.runs


COUNT = {"runs": 0}
RUNS = 0


class CountingInAGlobal(Block):
    """Counts its runs in an entry of a global dictionary."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        COUNT["runs"] = COUNT["runs"] % 100 + 1
        return super().forward(x) / COUNT["runs"]


class AssigningAGlobal(Block):
    """Counts its runs in a global variable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        global RUNS  # noqa: PLW0603
        RUNS = RUNS % 100 + 1
        return super().forward(x) / RUNS


class OfItsClass(Block):
    """Counts its runs in its class."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        OfItsClass.runs += 1
        return super().forward(x) / (1 + OfItsClass.runs % 7)


class Skipping(Block):
    """Draws from Python's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return super().forward(x) * random.random()


class SkippingByNumpy(Block):
    """Draws from NumPy's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return super().forward(x) * float(np.random.rand())  # noqa: NPY002


class OwnGenerator(Block):
    """Draws from a generator of its own, which no checkpoint restores."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return super().forward(x) * torch.rand(WIDTH, generator=self.generator)


def nonlocal_block() -> nn.Module:
    """A block that counts its runs in a variable of the function around it."""
    runs = 0

    class Enclosed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal runs
            runs += 1
            return super().forward(x) / runs

    return Enclosed()


def hooked_block() -> nn.Module:
    """A block with a hook that notes its results."""
    block, seen = Block(), []  # type: ignore[var-annotated]

    def scaled(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return out / len(seen)

    block.register_forward_hook(scaled)
    return block


class WritingData(Block):
    """Writes to a buffer past its version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        self.runs.data.add_(1)
        return super().forward(x)


class WritingByNumpy(WritingData):
    """Writes to a buffer past torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        self.runs.numpy()[0] += 1
        return Block.forward(self, x)


SETTINGS = types.ModuleType("settings")
SETTINGS.runs = 0  # type: ignore[attr-defined]
TURN: contextvars.ContextVar[int] = contextvars.ContextVar("turn", default=0)
OF_THREAD = threading.local()
COUNTERS = [itertools.count()]


def counted(x: torch.Tensor, box: list[int] = [0]) -> torch.Tensor:  # noqa: B006 - that is what scripts do
    """Count in a default argument, and in an attribute of the function."""
    box[0] += 1
    return x


class Base(Block):
    """Counts its runs in a base class."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        Base.runs += 1
        return super().forward(x)


class Derived(Base):
    """The class whose base counts."""


class OfAnother(Block):
    """Counts its runs in whatever place is given."""

    def __init__(self, count: Callable[[], Any]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        self.count()
        return super().forward(x)


class ByDefault(Block):
    """Counts its runs in a default argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return super().forward(counted(x))


def _in_module() -> None:
    SETTINGS.runs += 1  # type: ignore[attr-defined]


def _in_context() -> None:
    TURN.set(TURN.get() + 1)


def _in_thread() -> None:
    OF_THREAD.runs = getattr(OF_THREAD, "runs", 0) + 1


def _in_iterator() -> None:
    next(COUNTERS[0])


IMPURE: dict[str, Make] = {
    "data of a buffer": WritingData,
    "memory of a buffer": WritingByNumpy,
    "an attribute of a base class": Derived,
    "a default argument": ByDefault,
    "an attribute of a module": partial(OfAnother, _in_module),
    "a context variable": partial(OfAnother, _in_context),
    "a variable of the thread": partial(OfAnother, _in_thread),
    "an iterator": partial(OfAnother, _in_iterator),
    "batch norm": Normed,
    "a buffer that is replaced": Moving,
    "an attribute": Counting,
    "an entry of a global": CountingInAGlobal,
    "a global": AssigningAGlobal,
    "an attribute of the class": OfItsClass,
    "a variable of an enclosing function": nonlocal_block,
    "a forward hook": hooked_block,
    "Python's generator": Skipping,
    "NumPy's generator": SkippingByNumpy,
    "a generator of its own": OwnGenerator,
}


def reset_globals() -> None:
    """Start all counters anew."""
    global RUNS  # noqa: PLW0603
    COUNT["runs"] = OfItsClass.runs = RUNS = 0
    COUNTERS[0] = itertools.count()


@pytest.mark.long("-reentrant")
@KINDS
@pytest.mark.parametrize("make", IMPURE.values(), ids=IMPURE)
def test_a_checkpoint_whose_second_run_changes_something_stays_as_written(make: Make, reentrant: bool) -> None:  # noqa: FBT001
    """Running the function once would leave that change out."""
    def anew() -> nn.Module:
        reset_globals()
        return Net(make, use_reentrant=reentrant, **({} if reentrant else {"determinism_check": "none"}))

    assert calls(compared(anew)) == 0


@KINDS
def test_random_numbers_that_are_drawn_anew_stay_so(reentrant: bool) -> None:  # noqa: FBT001
    """With `preserve_rng_state=False`, the second run of a dropout has another mask."""
    assert calls(compared(partial(Net, use_reentrant=reentrant, preserve_rng_state=False))) == 0


@KINDS
def test_without_random_numbers_they_need_not_be_preserved(reentrant: bool) -> None:  # noqa: FBT001
    """The same without a dropout."""
    def make() -> nn.Module:
        net = Net(use_reentrant=reentrant, preserve_rng_state=False)
        for block in net.blocks:
            block.drop = nn.Identity()
        return net

    assert calls(compared(make)) == 6 * STEPS


class Now(Block):
    """Starts to write to a buffer, or to draw random numbers, some steps into the training."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        late = int(self.step) > 3
        if late and self.what == "buffer":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x) * (random.random() if late and self.what == "random" else 1) + self.mean


class Late(Net):
    """Tells its blocks which step it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        if torch.is_grad_enabled():
            for block in self.blocks:
                block.step += 1  # type: ignore[operator]
        return super().forward(x)


@KINDS
@pytest.mark.parametrize("what", ["buffer", "random"])
def test_what_a_function_does_only_later_is_made_up_for(what: str, reentrant: bool) -> None:  # noqa: FBT001
    """A call that was plain so far, and whose second run would change something now, has that effect all the same."""
    more = {} if reentrant else {"determinism_check": "none"}
    outcome = compared(lambda: Late(lambda: Now(what), use_reentrant=reentrant, **more), 1.6)
    assert calls(outcome) > 0


FLAG = [1.0]


class Flagged(Block):
    """Scales by a global that the training loop changes between forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return super().forward(x * FLAG[0])


@KINDS
@pytest.mark.parametrize("what", ["a flag", "oneDNN"])
def test_a_second_run_that_computes_something_else_stays(what: str, reentrant: bool) -> None:  # noqa: FBT001
    """Its saved tensors are other ones than those of the first run."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(Flagged, use_reentrant=reentrant)

        def loss_of(_: int) -> torch.Tensor:
            FLAG[0] = 1.0
            with torch.backends.mkldnn.flags(enabled=what != "oneDNN"), torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.randn(64, WIDTH)).float().square().mean()
            FLAG[0] = 0.5 if what == "a flag" else 1.0
            return loss

        return descended(net, loss_of)

    outcome = compared_runs(run, 2)
    assert calls(outcome) == 0


class Ending(Net):
    """The script goes on with the result of a checkpoint in place."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One checkpoint."""
        out: torch.Tensor = checkpoint(lambda h: torch.tanh(block(h)), x, **self.how)
        return out.add_(1)


@KINDS
def test_a_result_that_is_overwritten_keeps_its_checkpoint(reentrant: bool) -> None:  # noqa: FBT001
    """The second run makes the result anew that its last operator has saved."""
    assert calls(compared(partial(Ending, use_reentrant=reentrant))) == 0


@KINDS
def test_weights_that_are_exchanged_before_the_backward_keep_a_checkpoint(reentrant: bool) -> None:  # noqa: FBT001
    """An evaluation with averaged weights writes to what a plain call has saved, and back."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(use_reentrant=reentrant)

        def loss_of(_: int) -> torch.Tensor:
            loss = net(torch.randn(64, WIDTH)).square().mean()
            with torch.no_grad():
                for p in net.blocks.parameters():
                    before = p.clone()
                    p.mul_(0.5)
                    p.copy_(before)
            return loss

        return descended(net, loss_of)

    outcome = compared_runs(run, 2)
    assert calls(outcome) == 0


ASIDE: list[torch.Tensor] = []


class Telling(Block):
    """Leaves a second result where the training loop finds it, in the forward only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        out = super().forward(x)
        if len(ASIDE) < 6:  # noqa: PLR2004 - the number of blocks
            ASIDE.append(out.square().mean())
        return out


def test_a_result_on_the_side_has_no_gradient_as_written() -> None:
    """A reentrant checkpoint's first run builds no graph: an auxiliary loss made in it has no gradient."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(Telling, use_reentrant=True)

        def loss_of(_: int) -> torch.Tensor:
            ASIDE.clear()
            return net(torch.randn(64, WIDTH)).square().mean() + 0.1 * torch.stack(ASIDE).sum()

        found = descended(net, loss_of)
        ASIDE.clear()
        return found

    outcome = compared_runs(run, 2)
    assert calls(outcome) == 0


class NoGradient(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> None:
        """None."""


class Blocked(Net):
    """The gradient of one block's result never comes."""

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One checkpoint."""
        out: torch.Tensor = checkpoint(block, x, **self.how)
        return out if block is not self.blocks[2] else x + NoGradient.apply(out)


@KINDS
def test_a_gradient_that_never_comes_is_zero_in_a_reentrant_checkpoint(reentrant: bool) -> None:  # noqa: FBT001
    """It makes gradients of zeros there, which an optimizer with weight decay treats differently from none."""
    assert calls(compared(partial(Blocked, use_reentrant=reentrant))) == (5 if reentrant else 6) * STEPS


@KINDS
def test_a_batch_norm_that_is_put_in_later_is_updated_twice(reentrant: bool) -> None:  # noqa: FBT001
    """The calls of its block were plain until then."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(use_reentrant=reentrant)
        norm = nn.BatchNorm1d(WIDTH)

        def loss_of(number: int) -> torch.Tensor:
            if number == 3:  # noqa: PLR2004
                net.blocks[1].norm = norm
            return net(torch.randn(64, WIDTH)).square().mean()

        return descended(net, loss_of, by_hand=True)

    outcome = compared_runs(run, 3)
    assert calls(outcome) > 0


class Tasks(Net):
    """One call whose block the caller chooses."""

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        """One block."""
        out: torch.Tensor = checkpoint(lambda h, i: self.blocks[i](h), self.first(x), which, **self.how)
        return self.last(out)


def test_what_is_known_of_a_call_is_of_its_arguments_too() -> None:
    """Another block, chosen by an argument, has a batch norm."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Tasks(depth=2)
        net.blocks[1].norm = nn.BatchNorm1d(WIDTH)

        def loss_of(number: int) -> torch.Tensor:
            return net(torch.randn(64, WIDTH), int(number > STEPS and number % 2)).square().mean()

        return descended(net, loss_of, steps=2 * STEPS, by_hand=True)

    outcome = compared_runs(run, 3)
    assert calls(outcome) > 0


def test_modules_made_for_each_call_are_never_taken_for_earlier_ones() -> None:
    """They may have the addresses of those, and a batch norm."""
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)
            return found

    class Wrapping(Net):
        def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(Wrapper(block), x, **self.how)
            return found

    def make() -> nn.Module:
        net = Wrapping()
        net.blocks[3].norm = nn.BatchNorm1d(WIDTH)
        return net

    compared(make, steps=4 * STEPS)


def test_hooks_of_the_script_on_saved_tensors_keep_checkpoints_as_written() -> None:
    """They do not see what a checkpoint's function saves, and may change it."""
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()

        def loss_of(number: int) -> torch.Tensor:
            lossy = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
            with lossy if number > 3 else contextlib.nullcontext():  # noqa: PLR2004
                return net(torch.randn(64, WIDTH)).square().mean()

        return descended(net, loss_of, by_hand=True)

    outcome = compared_runs(run, 3)
    assert calls(outcome) > 0


class Kinds(Net):
    """Calls of other kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tanh = kind, nn.Tanh()

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:  # noqa: PLR0911
        """One checkpoint."""
        match self.kind:
            case "keywords":
                return checkpoint(lambda *, h: block(h), h=x, use_reentrant=False)
            case "two results":
                a, b = checkpoint(lambda h: (block(h), h * 2), x, use_reentrant=True)
                return a + 0 * b
            case "an unused result":
                return checkpoint(lambda h: (block(h), self.last(h)), x, use_reentrant=True)[0]
            case "a container":
                return checkpoint(lambda pair: block(pair[0]), (x,), use_reentrant=True)
            case "no gradient":
                return checkpoint(block, x.detach(), use_reentrant=True)
            case "a context":
                contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
                return checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            case "nested":
                return checkpoint(lambda h: checkpoint(block, h, use_reentrant=False), x, use_reentrant=False)
            case "its own argument":
                return checkpoint(lambda h: h, x, use_reentrant=True) + checkpoint(block, x, use_reentrant=True)
            case "a partial function":
                return checkpoint(partial(block), x, use_reentrant=False)
            case "used twice":
                return x * 0.5 + checkpoint(lambda h: block(h).tanh() * h + h.sin(), x, use_reentrant=True) + x.cos()
            case "transposed":
                return checkpoint(lambda h: block(h.T), x.T, use_reentrant=True)
            case "expanded":
                return x + checkpoint(lambda h: block(h).mean().tanh() + h.mean(), x, use_reentrant=True)
            case _:
                return checkpoint_sequential([block, self.tanh, block, self.tanh], 2, x, use_reentrant=False)


@pytest.mark.long("sequential", "nested", "keywords", "used twice", "transposed", "two results")
@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("keywords", True), ("two results", False), ("an unused result", False), ("a container", False),
        ("no gradient", False), ("a context", False), ("nested", True), ("its own argument", True),
        ("a partial function", True), ("used twice", True), ("transposed", True), ("expanded", True), ("sequential", True),
    ],
)  # fmt: skip
def test_calls_of_any_kind_have_the_same_bits(kind: str, plain: bool) -> None:  # noqa: FBT001
    """Those whose gradients would be summed otherwise, or be there at all, stay as written."""
    outcome = compared(partial(Kinds, kind), accumulate=2)
    assert (calls(outcome) > 0) is plain


def test_checkpoints_stay_as_written_in_a_process_group_that_is_made_later(tmp_path: Path) -> None:
    """Ranks that choose by their own times would follow plans for different operators. Scripts make the group themselves."""
    def run() -> list[torch.Tensor]:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / uuid.uuid4().hex}", rank=0, world_size=1)
        try:
            return train(Net)
        finally:
            torch.distributed.destroy_process_group()

    outcome = compared_runs(run, 2)
    assert calls(outcome) == 0


@KINDS
def test_a_hook_on_a_parameter_keeps_only_reentrant_checkpoints_as_written(reentrant: bool) -> None:  # noqa: FBT001
    """There it is called within the second run's own backward."""
    def make() -> nn.Module:
        net = Net(use_reentrant=reentrant)
        for p in net.blocks.parameters():
            p.register_hook(lambda g: g * 0.5)
        return net

    assert (calls(compared(make)) > 0) is not reentrant


@pytest.mark.long
def test_a_budget_of_the_minimum_is_that_of_plain_checkpoints() -> None:
    """It used to be set by the first step, which runs as written, and to stay there."""
    run = partial(train, partial(Net, depth=8), rows=4096)
    bits, _ = peak_of(run)
    with lowtide.budget("minimum") as found:
        assert equal(run(), bits)
    outcome = found.outcome
    assert outcome.plan is not None
    assert calls(outcome) > 0
    assert outcome.held
    assert outcome.budget_bytes <= 1.03 * outcome.plan.lowest_peak_bytes


def test_the_summary_tells_the_time_that_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """With room to spare nothing is recomputed: the step takes less than without Lowtide."""
    outcome = compared(Net, 2.0, rows=2048)
    assert outcome.plan is not None
    assert outcome.plan.extra_seconds is not None
    assert outcome.plan.extra_seconds < 0
    show_outcome(outcome)
    said = " ".join(capsys.readouterr().err.split())
    assert "saved time" in said
    assert "without Lowtide, as recorded" in said


def test_the_user_can_keep_checkpoints_as_written() -> None:
    """`without=plan-checkpoints` leaves all calls to torch."""
    outcome = compared_runs(partial(train, Net), 1, without=CHECKPOINTS)
    assert not [x for x in outcome.levers if x.name == CHECKPOINTS]


def test_a_derivative_of_a_gradient_keeps_checkpoints_as_written() -> None:
    """A second backward would go through the graph of the second run, and sum in another order."""
    def penalised() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

        def loss_of(_: int) -> torch.Tensor:
            x = torch.randn(64, WIDTH, requires_grad=True)
            out = net(x).sum()
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
            return out + gradient.square().sum()

        return descended(net, loss_of)

    outcome = compared_runs(penalised, 2)
    assert calls(outcome) == 0


@pytest.mark.long
def test_the_baseline_and_shares_are_those_of_the_script_as_written() -> None:
    """A share is one of what the script takes with its own checkpoints."""
    run = partial(train, partial(Net, depth=8), rows=4096)
    bits, above = peak_of(run)
    base = live_now()
    with lowtide.budget("95%") as found:  # other tests' tensors are a part of the base
        assert equal(run(), bits)
    outcome = found.outcome
    assert outcome.plan is not None
    assert abs(outcome.plan.baseline_peak_bytes - base - above) < 0.03 * above
    assert calls(outcome) > 0
