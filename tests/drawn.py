"""Random training scripts: small models and loops, drawn by Hypothesis, so that a failing script is shrunk to its cause.

A `Program` is a description that prints itself completely; `job_of` makes the same job from it each time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KINDS = (
    "linear", "relu", "relu_", "gelu", "tanh", "sigmoid", "layer_norm", "batch_norm", "dropout", "residual", "halves",
    "attention", "scaled_in_place", "added_in_place", "transposed", "own_function", "checkpointed", "shared", "by_step",
    "expanded", "masked", "squared", "hooked", "complex", "dropout", "noisy", "written_late", "running", "shifted",
)  # fmt: skip
LOSSES = ("square", "cross_entropy", "two", "two_backwards", "penalty")
ROUTES = ("skips", "rounds", "any")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw_foreach", "adam_single", "two", "rmsprop", "adagrad")


@dataclass(frozen=True)
class Program:
    """One script.

    Attributes:
        layers: names out of `KINDS`, in order.
        width, rows: shape of the layers' inputs: (rows, width).
        accumulate: number of backwards per step.
        zero: when gradients are zeroed: before the forward, before the backward, after the step; in place or not, or by hand.
        evaluate: whether the model evaluates without gradients in every second step, on more rows.
        clip: whether gradients are clipped.
        read: in which step gradients are read by the script; -1 for none.
        keep: what the script keeps from the step before: nothing, its output, or its loss with its graph.
        varying: whether every third batch has half the rows.
        schedule: whether the learning rate changes.
        autocast: whether the forward runs under autocast.
        flags: whether it runs without oneDNN, which the backward does not.
        late: whether buffers that the forward read are written before the backward.
        route: how a step goes through the layers: always once and in order ("same"), with every other layer left out at times
            ("skips"), several times at times ("rounds"), or each of them never to twice ("any").
        checkpoints: whether each layer is called through a checkpoint of torch, and whether a reentrant one.
    """

    layers: tuple[str, ...]
    width: int
    rows: int
    loss: str
    optimizer: str
    accumulate: int
    zero: str
    evaluate: bool
    clip: bool
    read: int
    keep: str
    varying: bool
    schedule: bool
    autocast: bool
    flags: bool
    late: bool
    route: str = "same"
    checkpoints: str = "none"


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any script."""
    return Program(
        layers=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=9))),
        width=draw(st.sampled_from([32, 64, 128, 256])), rows=draw(st.sampled_from([64, 512, 2048])),
        loss=draw(st.sampled_from(LOSSES)), optimizer=draw(st.sampled_from(OPTIMIZERS)),
        accumulate=draw(st.sampled_from([1, 1, 2, 3])), zero=draw(st.sampled_from(["forward", "backward", "step", "in_place", "by_hand"])),
        evaluate=draw(st.booleans()), clip=draw(st.booleans()), read=draw(st.sampled_from([-1, -1, 2, 4])),
        keep=draw(st.sampled_from(["nothing", "output", "loss"])), varying=draw(st.booleans()), schedule=draw(st.booleans()),
        autocast=draw(st.sampled_from([False, False, True])), flags=draw(st.sampled_from([False, False, True])),
        late=draw(st.sampled_from([False, False, True])), route=draw(st.sampled_from(["same", "same", *ROUTES])),
        checkpoints=draw(st.sampled_from(["none", "none", "none", "reentrant", "not reentrant"])),
    )  # fmt: skip


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


class Layer(nn.Module):
    """One layer of a kind, from (rows, width) to the same."""

    def __init__(self, kind: str, width: int, shared: nn.Linear) -> None:
        """Create the parameters that the layer needs."""
        super().__init__()
        self.kind, self.step = kind, 0
        if kind in ("linear", "residual", "checkpointed", "by_step", "hooked", "complex"):
            self.inner = nn.Linear(width, width)
        if kind == "halves":
            self.inner = nn.Linear(width // 2, width // 2)
        if kind == "shared":
            self.inner = shared
        if kind == "attention":
            self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        if kind == "layer_norm":
            self.norm = nn.LayerNorm(width)
        if kind == "batch_norm":
            self.norm = nn.BatchNorm1d(width)
        if kind in ("running", "shifted"):
            self.register_buffer("state", torch.zeros(width))
        if kind == "hooked":
            self.inner.register_forward_hook(lambda _m, _x, out: out * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: PLR0911, PLR0912 - one line for each kind
        match self.kind:
            case "linear" | "shared" | "hooked":
                return self.inner(x)
            case "relu_":
                return F.relu_(x * 1.5)
            case "relu" | "gelu" | "tanh" | "sigmoid":
                return getattr(torch if self.kind in ("tanh", "sigmoid") else F, self.kind)(x)
            case "layer_norm" | "batch_norm":
                return self.norm(x)
            case "dropout":
                return F.dropout(x, 0.3, training=self.training)
            case "noisy":
                return x.tanh() + torch.randn_like(x) * x.sigmoid()
            case "written_late":
                y = x * 2
                z = y.sigmoid()
                y.add_(1)
                return z + y
            case "running":
                z = torch.tanh(x - self.state)
                with torch.no_grad():
                    self.state.mul_(0.9).add_(z.float().mean(0), alpha=0.1)
                return z
            case "shifted":
                return torch.sigmoid(x + self.state)
            case "residual":
                return x + F.gelu(self.inner(x))
            case "halves":
                left, right = x.chunk(2, dim=1)
                return torch.cat([self.inner(left).tanh(), right], 1)
            case "attention":
                rows = x.view(-1, 16, x.shape[1])
                scores = torch.softmax(self.query(rows) @ rows.transpose(1, 2) / 8, -1)
                return (scores @ self.value(rows)).reshape(x.shape)
            case "scaled_in_place":
                y = x * 2
                return y.mul_(0.5).add_(0.1)
            case "added_in_place":
                y = x.sin()
                y[:, ::2] += 0.5
                return y
            case "transposed":
                return torch.tanh(x.t().contiguous()).t() * 0.9
            case "own_function":
                return _Silu.apply(x)
            case "checkpointed":
                return checkpoint(lambda y: F.silu(self.inner(y)), x, use_reentrant=False)
            case "by_step":
                return self.inner(x) if self.step % 2 else F.softplus(self.inner(x))
            case "expanded":
                return x + x.mean(0, keepdim=True).expand_as(x) * 0.1
            case "masked":
                return torch.where(x > 0, x, x * 0.1)
            case "squared":
                return x.square().clamp(max=2.0)
            case "complex":
                return torch.fft.ifft(torch.fft.fft(self.inner(x), dim=1) * 0.9, dim=1).real
        raise AssertionError(self.kind)


class Net(nn.Module):
    """Layers in a row, and a head."""

    def __init__(self, program: Program) -> None:
        """As the program says."""
        super().__init__()
        shared = nn.Linear(program.width, program.width)
        self.layers = nn.ModuleList(Layer(kind, program.width, shared) for kind in program.layers)
        self.head = nn.Linear(program.width, 10)
        self.route = program.route
        self.checkpoints = program.checkpoints
        if program.loss == "penalty" and program.checkpoints == "reentrant":  # torch refuses derivatives of gradients there
            self.checkpoints = "not reentrant"

    def _way(self, step: int) -> list[nn.Module]:
        layers, chance = list(self.layers), random.Random(step)
        match self.route:
            case "skips":
                return [layer for i, layer in enumerate(layers) if step % 3 < 2 or (i + step) % 2]
            case "rounds":
                return layers * (1, 2, 1, 3, 2, 1)[step % 6]
            case "any":
                return [layer for layer in layers for _ in range(chance.choice([0, 1, 1, 1, 2]))] if step else layers
        return layers

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self._way(step):
            layer.step = step
            x = layer(x) if self.checkpoints == "none" else self._through_checkpoint(layer, x)
        return self.head(x)

    def _through_checkpoint(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant", determinism_check="none")
        return found


def _optimizers(name: str, net: Net) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    made: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01), "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 1e-3), "adamw_foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
        "adam_single": lambda p: torch.optim.Adam(p, 1e-3, foreach=False), "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
        "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    }  # fmt: skip
    if name == "two":
        return [made["adam"](parameters[:-1]), made["momentum"](parameters[-1:])]
    return [made[name](parameters)]


def _backward(loss: str, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    target = torch.arange(len(out)) % 10
    match loss:
        case "square":
            total = out.square().mean()
        case "cross_entropy" | "two_backwards":
            total = F.cross_entropy(out, target)
        case "two":
            total = F.cross_entropy(out, target) + 0.1 * out.abs().mean()
        case "penalty":
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            total = F.cross_entropy(out, target) + slope.square().mean()
    if loss == "two_backwards":
        out.square().mean().backward(retain_graph=True)
    total.backward()
    return total


def job_of(program: Program) -> zoo.Job:
    """The script."""
    net = Net(program)
    optimizers = _optimizers(program.optimizer, net)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers] if program.schedule else []
    held: list[torch.Tensor] = []

    def zero(when: str) -> None:
        if when == "step" and program.zero == "by_hand":
            for parameter in net.parameters():
                parameter.grad = None
            return
        if when == program.zero or (when == "forward" and program.zero == "in_place"):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=program.zero != "in_place")

    def step(number: int) -> torch.Tensor:
        rows = program.rows // (2 if program.varying and number % 3 == 2 else 1)
        zero("forward")
        told = torch.zeros(())
        for piece in range(program.accumulate):
            x = torch.randn(rows, program.width, requires_grad=program.loss == "penalty")
            flags = torch.backends.mkldnn.flags(enabled=False) if program.flags else contextlib.nullcontext()
            with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast), flags:
                out = net(x, number)
            out = out.float()
            if program.late:
                with torch.no_grad():
                    for layer in net.layers:
                        if layer.kind == "shifted":
                            layer.state.add_(0.01)
            if not piece:
                zero("backward")
            loss = _backward(program.loss, out, x)
            told = told + loss.detach()
            held[:] = {"nothing": [], "output": [out], "loss": [loss]}[program.keep]
        if program.clip:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if number == program.read:
            told = told + sum(p.grad.norm() for p in net.parameters() if p.grad is not None)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        zero("step")
        if program.evaluate and number % 2:
            net.eval()
            with torch.no_grad():
                told = told + net(torch.randn(2 * program.rows, program.width), number).mean()
            net.train()
        return told

    return zoo.Job(step, [net], optimizers)
