"""Law: where autograd's engine adds two gradients in place in the baseline, it does so under a recording or a budget, too, and
nothing else is added in place.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, gradient_of, kept, looking_on, plain_of
from lowtide.runtime.intercept import inplace_accumulation
from lowtide.runtime.intercept.dispatch_mode import Mode
from lowtide.runtime.planned.retained_graphs import WriteMode
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A skip connection: its input gets two gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class ReadAgain(torch.autograd.Function):
    """Its backward calls functions in C++ that add to tensors which they read again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return grad * 2 + F.cosine_similarity(grad, grad.flip(0), dim=1)[:, None] + (grad + grad.roll(1, 0))


def skips() -> zoo.Job:
    """The peak lies where the gradients of a wide skip connection meet."""
    model = nn.Sequential(nn.Linear(64, 64), Residual(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))), nn.Linear(64, 1))
    return zoo.simple(model, lambda m, _: m(torch.randn(4096, 64)).square().mean())


def skips_with_hooks() -> zoo.Job:
    """As above; hooks and a ``Function`` add as well, while the engine's node is the running one."""
    model = nn.Sequential(nn.Linear(64, 64), Residual(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))), nn.Linear(64, 1))

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        h = m[0](torch.randn(512, 64))
        h = h + ReadAgain.apply(h)
        h.register_hook(lambda g: g + F.normalize(g, dim=1) + F.cosine_similarity(g, g.flip(0), dim=1)[:, None])
        return m[2](m[1](h)).square().mean()

    return zoo.simple(model, loss_of)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("make", [skips, skips_with_hooks])
def test_sums_of_the_engine_take_the_baselines_bytes_under_a_budget(make: Callable[[], zoo.Job], *, offload: bool) -> None:
    """Bits are equal, and the baseline's peak that is told is the baseline's to the byte."""
    reference = plain_of(make, 4)
    run = budgeted(make, above_of(reference, 1.0), 4, offload=offload)
    assert run.bits == reference.bits
    plan = run.outcome.plan
    assert plan is not None
    base = run.budget_bytes - above_of(reference, 1.0)
    assert plan.baseline_peak_bytes - base == reference.above_bytes


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_sums_take_no_memory_in_planned_backwards_that_run_code_of_the_script(share: float) -> None:
    """Writes are watched there by a mode, under which the engine used to add out of place, above the budget."""

    def hooked() -> zoo.Job:
        model = nn.Sequential(nn.Linear(64, 128), *[nn.Tanh() for _ in range(32)], nn.Linear(128, 512))

        def loss_of(m: nn.Module, _: int) -> torch.Tensor:
            h = m(torch.randn(512, 64))
            h.register_hook(lambda g: g)
            return h[:, :256].sum() * 2 + h[:, 256:].sum()

        return zoo.simple(model, loss_of)

    reference = plain_of(hooked, 8)
    run = budgeted(hooked, above_of(reference, share), 8)
    assert run.bits == reference.bits
    assert run.outcome.plan is not None
    assert all(step.policy == "planned" for step in run.outcome.steps[3:])
    assert kept(run)


@pytest.mark.parametrize("served", [False, True])
def test_nothing_is_added_to_a_tensor_that_was_served_for_a_saved_one(*, served: bool) -> None:
    """A ``Function`` may return a saved tensor as a gradient. In a planned backward nothing but that gradient holds it, and the
    sum used to overwrite what a later node asked for.
    """
    written = []

    class Listener:
        def will_write(self, tensor: torch.Tensor) -> None:
            written.append(tuple(tensor.shape))

        def has_served(self, storage: torch.UntypedStorage) -> bool:
            return served

    x = torch.randn(8, 8, requires_grad=True)
    h = x * 1
    total = (h * 2).sum() + (h * 3).sum()
    with WriteMode(Listener()):
        total.backward()
    assert written == ([] if served else [(8, 8)])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((8, 8), 5.0))


def test_a_saved_tensor_given_back_as_a_gradient_is_not_overwritten() -> None:
    """The same within training, at budgets at which the tensor is away between its two needs."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(g)
            return (x * g).sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return ctx.saved_tensors[0], None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(64, 256), nn.Linear(256, 4), nn.Parameter(torch.ones(256))
            self.big = nn.Sequential(nn.Linear(64, 64), *[nn.Tanh() for _ in range(10)], nn.Linear(64, 1))
            self.wide = nn.Sequential(nn.Linear(64, 512), *[nn.Tanh() for _ in range(3)], nn.Linear(512, 512), nn.Linear(512, 1))

    def given() -> zoo.Job:
        def loss_of(net: Any, _: int) -> torch.Tensor:
            x = torch.randn(1024, 64)
            h = net.first(x)
            g = torch.tanh(h.detach()) * 0.5
            scaled = (g * net.scale).sum()  # its node asks for the tensor later
            peak = net.wide(x).square().mean()
            last = net.last(h).square().mean()
            returned = Given.apply(h, g)
            del h, g
            return returned + last + scaled + net.big(x).square().mean() + peak

        return zoo.simple(Net(), loss_of)

    reference = plain_of(given, 8)
    for share in (0.85, 0.7, 0.62, 0.6, 0.58, 0.56):
        assert budgeted(given, above_of(reference, share), 8, keep_going=True).bits == reference.bits


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "products": lambda h: h * 2 + h.tanh(),
    "the same factor twice": lambda h: h * h,
    "three gradients": lambda h: h.sin() + h.cos() + h.relu(),
    "a node that adds": lambda h: torch.std_mean(h * h, dim=1)[0] + torch.std_mean(h * h, dim=1)[1],
    "a decomposition": lambda h: torch.linalg.qr(h[:64, :64] + h[64:128, :64])[1],
    "a Function": lambda h: ReadAgain.apply(h) + h,
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_under_a_mode_has_the_baselines_bits_and_is_no_higher(name: str) -> None:
    class InPlace(Mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return inplace_accumulation.in_place(func, args)(*args, **(kwargs or {}))

    gradient_of(SUMS[name], (256, 256), warnings.catch_warnings())
    expected, rise = gradient_of(SUMS[name], (256, 256), warnings.catch_warnings())
    found, under_mode = gradient_of(SUMS[name], (256, 256), InPlace())
    assert torch.equal(found, expected)
    if name in ("products", "three gradients", "the same factor twice"):
        assert under_mode <= rise + 1024  # a mode sees numbers as tensors


@pytest.mark.parametrize("how", ["recording", "budget"])
def test_sums_of_nested_gradients_are_left_alone(how: str, tmp_path: Path) -> None:
    """They have no sizes that could be compared."""

    def once() -> list[torch.Tensor]:
        torch.manual_seed(0)
        parts = [torch.randn(n, 8, requires_grad=True) for n in (3, 5)]
        h = torch.nested.as_nested_tensor(parts)
        torch.nested.to_padded_tensor(h * 2 + h * 3, 0.0).square().sum().backward()
        return [p.grad for p in parts if p.grad is not None]

    plain = once()
    with looking_on(how, tmp_path):
        found = once()
    assert len(found) == 2
    assert all(map(torch.equal, found, plain))


def test_sums_under_derivatives_of_derivatives_are_left_alone() -> None:
    """``GluBackwardBackward0`` adds by itself, although ``GluBackward0`` does not."""
    seen: list[tuple[str, Any]] = []

    class InPlace(Mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            chosen = inplace_accumulation.in_place(func, args)
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            if func is torch.ops.aten.add.Tensor and node is not None and node.name() == "GluBackwardBackward0":
                seen.append((node.name(), chosen))
            return chosen(*args, **(kwargs or {}))

    def twice() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(F.glu(layer(x)).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]

    plain = twice()
    with InPlace():
        found = twice()
    assert all(map(torch.equal, found, plain))
    assert seen
    assert all(chosen is torch.ops.aten.add.Tensor for _, chosen in seen)


class Adders(Mode):
    """Counts the sums of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Counter[str] = Counter()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None:
            name = node.name().partition("Backward")[0]
            self.seen.add(name)
            self.sums[name] += func is torch.ops.aten.add.Tensor
        return func(*args, **(kwargs or {}))


def _receives_twice(outs: list[torch.Tensor]) -> bool:
    """Whether any node or leaf behind these gets more than one gradient, so that the engine adds."""
    edges: Counter[Any] = Counter()
    waiting, known = [out.grad_fn for out in outs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        edges.update(edge for edge in node.next_functions if edge[0] is not None)
        waiting.extend(edge[0] for edge in node.next_functions)
    return max(edges.values(), default=0) > 1


@pytest.mark.slow
def test_nodes_whose_sums_are_the_engines_add_nothing_themselves() -> None:
    """Each of torch's own operators on its own samples, where no input is used twice: no sum is the engine's there."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._pytree import tree_leaves

    listed, mode = inplace_accumulation._ADDS_NOTHING, Adders()
    torch.use_deterministic_algorithms(mode=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            if not op.supports_autograd or torch.float64 not in op.dtypes:
                continue
            for _, sample in zip(range(12), op.sample_inputs("cpu", torch.float64, requires_grad=True), strict=False):
                out = op(sample.input, *sample.args, **sample.kwargs)
                outs = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
                given = tree_leaves((sample.input, sample.args, sample.kwargs))
                leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
                if outs and not _receives_twice(outs):
                    with mode, contextlib.suppress(RuntimeError):  # some operators take no part in every sample's dtype
                        torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)
    assert not {name: n for name, n in mode.sums.items() if n and name in listed}
    assert sum(mode.sums.values()) > 100, "the sums of nodes were not seen"
    unseen = {
        "Add", "Clone", "Glu", "NativeDropout", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
    }  # fmt: skip
    assert listed - mode.seen <= unseen
