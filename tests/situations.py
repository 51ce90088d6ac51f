"""Training scripts, as functions, that do what users do: one entry per situation.

As in ``zoo.py``, nothing here knows of Lowtide.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zoo
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import Job


def _net(width: int = 128, depth: int = 4) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _batch(size: int = 256, width: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, width), torch.randint(0, 10, (size,))


def _loss(model: nn.Module, size: int = 256, width: int = 128) -> torch.Tensor:
    x, y = _batch(size, width)
    return F.cross_entropy(model(x), y)


def autocast_bf16() -> Job:
    """Forward and loss under autocast."""

    def loss_of(model: nn.Module, _: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _loss(model)

    return zoo.simple(_net(), loss_of)


def autocast_attention() -> Job:
    """A transformer under autocast: cached weight casts."""

    def loss_of(model: nn.Module, _: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return zoo.language_loss(model)

    return zoo.simple(zoo.GPT(fused=True, layers=2), loss_of)


def accumulation() -> Job:
    """Four micro-batches a step."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(4):
            loss = _loss(model) / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Job(step, [model], [optimizer])


def grads_zeroed_in_place() -> Job:
    """Gradients zeroed, not freed."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(_: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def clipping() -> Job:
    """Gradient norm clipped; gradients read by the script."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> torch.Tensor:
        loss = _loss(model)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return torch.stack([loss.detach(), norm])

    return Job(step, [model], [optimizer])


def gan() -> Job:
    """Two optimizers, two backwards a step, one graph that outlives the first update."""
    generator = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.Tanh())
    judge = nn.Sequential(nn.Linear(128, 128), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(128, 1))
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(generator.parameters())

    def step(_: int) -> torch.Tensor:
        real, fake = torch.randn(256, 128), generator(torch.randn(256, 32))
        ones, zeros = torch.ones(256, 1), torch.zeros(256, 1)
        loss = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        first.zero_grad()
        loss.backward()
        first.step()
        other = F.binary_cross_entropy_with_logits(judge(fake), ones)
        second.zero_grad()
        other.backward()
        second.step()
        return torch.stack([loss.detach(), other.detach()])

    return Job(step, [generator, judge], [first, second])


def retain_graph() -> Job:
    """One graph, two backwards."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(_: int) -> torch.Tensor:
        out = model(_batch()[0])
        optimizer.zero_grad()
        out.square().mean().backward(retain_graph=True)
        loss = out.abs().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def retained_heads() -> Job:
    """Two heads on one trunk, a backward each; the script still holds the first head's retained graph in the next step."""
    trunk, heads = _net(), [_net(depth=1)[0], _net(depth=1)[0]]
    heads = [nn.Sequential(nn.Linear(10, 128), head) for head in heads]
    model = nn.ModuleList([trunk, *heads])
    optimizer = torch.optim.AdamW(model.parameters())
    held: dict[str, torch.Tensor] = {}

    def step(_: int) -> torch.Tensor:
        trunk_out = trunk(_batch()[0])
        held["first"] = heads[0](trunk_out).square().mean()
        held["second"] = heads[1](trunk_out).abs().mean()
        optimizer.zero_grad()
        held["first"].backward(retain_graph=True)
        held["second"].backward()
        optimizer.step()
        return held["second"].detach()

    return Job(step, [model], [optimizer])


def generator_twice() -> Job:
    """A GAN that generates again for the generator's step: the discriminator's fakes leave a graph without a backward."""
    generator, judge = _net(depth=2), _net(depth=1)
    generator = nn.Sequential(generator, nn.Linear(10, 128))
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(generator.parameters())
    held: dict[str, torch.Tensor] = {}

    def step(_: int) -> torch.Tensor:
        real, noise = torch.randn(256, 128), torch.randn(256, 128)
        held["fake"] = generator(noise)
        first.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(held["fake"].detach())).mean()
        loss.backward()
        first.step()
        second.zero_grad()
        other = F.softplus(-judge(generator(noise))).mean()
        other.backward()
        second.step()
        return torch.stack([loss.detach(), other.detach()])

    return Job(step, [generator, judge], [first, second])


def double_backward() -> Job:
    """A gradient penalty: ``torch.autograd.grad`` with ``create_graph``."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Softplus(), nn.LayerNorm(128), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> torch.Tensor:
        x = torch.randn(256, 128, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out / 256 + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def meta_learning() -> Job:
    """Two tasks a step, each with an inner update that is differentiated through (MAML)."""

    def loss_of(model: nn.Module, _: int) -> torch.Tensor:
        weights = dict(model.named_parameters())
        total = torch.zeros(())
        for _task in range(2):
            x, y = _batch()
            inner = F.cross_entropy(torch.func.functional_call(model, weights, x), y)
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            x, y = _batch()
            total = total + F.cross_entropy(torch.func.functional_call(model, fast, x), y)
        return total

    return zoo.simple(_net(depth=3), loss_of)


def sparse_gradients() -> Job:
    """An embedding whose gradients are sparse tensors."""
    table, model = nn.EmbeddingBag(5000, 128, sparse=True), _net()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(table.parameters()), torch.optim.AdamW(model.parameters())]

    def step(_: int) -> torch.Tensor:
        words, y = torch.randint(0, 5000, (256, 8)), torch.randint(0, 10, (256,))
        loss = F.cross_entropy(model(table(words)), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return Job(step, [model], optimizers)


def frozen_and_thawed() -> Job:
    """Half of the layers are frozen for three steps, and train again after."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(i: int) -> torch.Tensor:
        for p in (*model[0].parameters(), *model[1].parameters()):
            p.requires_grad_(requires_grad=i not in (3, 4, 5))
        loss = _loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def evaluation_between() -> Job:
    """Evaluation under no_grad and inference_mode between steps."""
    model = _net()
    job = zoo.simple(model, lambda m, _: _loss(m))

    def step(i: int) -> torch.Tensor:
        loss = job.step(i)
        model.eval()
        with torch.no_grad() if i % 2 else torch.inference_mode():
            score = _loss(model).item()
        model.train()
        return torch.stack([loss, torch.tensor(score)])

    return Job(step, [model], job.optimizers)


def last_batch_smaller() -> Job:
    """Every third batch is short."""
    return zoo.simple(_net(), lambda m, i: _loss(m, 100 if i % 3 == 2 else 256))


def lengths_change() -> Job:
    """A new sequence length every step."""
    return zoo.simple(zoo.GPT(fused=False, layers=3), lambda m, i: zoo.language_loss(m, length=64 - 7 * (i % 4)))


class Branching(nn.Module):
    """Takes one of two branches at random."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = _net(), _net(depth=2), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x) if random.random() < 0.5 else self.right(x)
        return self.out(torch.tanh(x))


def random_branch() -> Job:
    """A branch taken at random."""
    return zoo.simple(Branching(), lambda m, _: _loss(m))


class Checkpointed(nn.Module):
    """Blocks under ``torch.utils.checkpoint``."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.tail, self.reentrant = nn.ModuleList([_net(depth=2)[:2] for _ in range(3)]), _net(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.tail(x)


def checkpoint_plain() -> Job:
    """``torch.utils.checkpoint`` in the script, not reentrant."""
    return zoo.simple(Checkpointed(reentrant=False), lambda m, _: _loss(m))


def checkpoint_reentrant() -> Job:
    """``torch.utils.checkpoint`` in the script, reentrant."""
    return zoo.simple(Checkpointed(reentrant=True), lambda m, _: _loss(m))


def own_hooks() -> Job:
    """The script's own saved-tensor hooks around part of the forward."""
    head, tail = _net()[:3], _net()

    def loss_of(model: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().to(torch.float64), lambda t: t.to(torch.float32)):
            x = model[0](x)
        return F.cross_entropy(model[1](x), y)

    return zoo.simple(nn.Sequential(head, tail), loss_of)


class Cube(torch.autograd.Function):
    """x ** 3, by numpy: a kernel that the dispatcher does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        np.power(x.detach().numpy(), 3, out=out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Doubled(torch.autograd.Function):
    """2 x, written by numpy into an initialised tensor; its own output is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out.numpy()[...] = 2 * x.detach().numpy()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return 2 * grad + 0 * out


def custom_function() -> Job:
    """Custom functions whose kernels bypass the dispatcher."""
    model = nn.Sequential(_net()[:3], _net())

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        x = torch.tanh(Cube.apply(m[0](x)))
        return F.cross_entropy(m[1](torch.sin(Doubled.apply(x)).mul(2)), y)

    return zoo.simple(model, loss_of)


def in_place_between() -> Job:
    """In-place updates that autograd allows: of values read, but not saved, before."""

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        h = m[0](x)
        doubled = h + h
        h.mul_(0.5)
        h[:, :16].zero_()
        h = torch.sigmoid(h + doubled)
        buffer = torch.zeros_like(h)
        buffer[:128] = h[:128]
        buffer[128:].copy_(h[128:] * 2)
        return F.cross_entropy(m[1](buffer), y)

    return zoo.simple(nn.Sequential(_net()[:1], _net()), loss_of)


def compiled_part() -> Job:
    """A sub-module under ``torch.compile``."""
    torch._dynamo.reset()
    part = torch.compile(_net(depth=2)[:2], backend="aot_eager")
    return zoo.simple(nn.Sequential(part, _net()), lambda m, _: _loss(m))


def compiled_function() -> Job:
    """A function under ``torch.compile``."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def squash(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * torch.sigmoid(x)

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        return F.cross_entropy(m[1](squash(m[0](x))), y)

    return zoo.simple(nn.Sequential(_net()[:2], _net()), loss_of)


class Samples(torch.utils.data.Dataset[Any]):
    """Random samples, made with torch in the workers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        return torch.randn(128, generator=generator).tanh(), i % 10


def loader_workers(*, pin: bool = False) -> Job:
    """A ``DataLoader`` with forked workers."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> torch.Tensor:
        total = torch.zeros(())
        loader = torch.utils.data.DataLoader(Samples(), batch_size=32, num_workers=2, multiprocessing_context="fork", pin_memory=pin)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total

    return Job(step, [model], [optimizer])


def loader_pinned() -> Job:
    """The same with pinned memory asked for."""
    return loader_workers(pin=True)


def saving_in_the_middle() -> Job:
    """Activations and state saved to disk between forward and backward."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())

    def step(_: int) -> torch.Tensor:
        x, y = _batch()
        hidden = model[:2](x)
        torch.save({"hidden": hidden, "model": model.state_dict()}, io.BytesIO())
        loss = F.cross_entropy(model[2:](hidden), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def plain_functions() -> Job:
    """No module at all: parameters and functions, updated by hand."""
    weights = nn.ParameterList([nn.Parameter(torch.randn(128, 128) / 11) for _ in range(5)])

    def step(_: int) -> torch.Tensor:
        x, y = torch.randn(512, 128), torch.randn(512, 128)
        for w in weights:
            x = torch.tanh(F.gelu(x @ w) * 1.5)
        loss = F.mse_loss(x, y)
        loss.backward()
        with torch.no_grad():
            for w in weights:
                w -= 0.1 * w.grad
                w.grad = None
        return loss.detach()

    return Job(step, [weights])


def hidden_state_carried() -> Job:
    """Truncated back-propagation: the hidden state is carried from step to step."""
    model = zoo.Tagger()
    optimizer = torch.optim.Adam(model.parameters())
    state: list[Any] = [None]

    def step(_: int) -> torch.Tensor:
        out, new = model.rnn(torch.randn(16, 40, 16), state[0])
        loss = F.mse_loss(model.out(torch.tanh(out)), torch.randn(16, 40, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state[0] = tuple(h.detach() for h in new)
        return loss.detach()

    return Job(step, [model], [optimizer])


def foreach_and_fused() -> Job:
    """Two optimizers of other kinds, stepped together."""
    model = _net()
    a = torch.optim.AdamW(list(model[:2].parameters()), foreach=True)
    b = torch.optim.SGD(list(model[2:].parameters()), lr=0.01, fused=True)

    def step(_: int) -> torch.Tensor:
        loss = _loss(model)
        for o in (a, b):
            o.zero_grad()
        loss.backward()
        for o in (a, b):
            o.step()
        return loss.detach()

    return Job(step, [model], [a, b])


def optimizer_in_backward() -> Job:
    """Each parameter updated by a hook as soon as its gradient is whole."""
    model = _net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(_: int) -> torch.Tensor:
        loss = _loss(model)
        loss.backward()
        return loss.detach()

    return Job(step, [model])


def tensor_hooks() -> Job:
    """Hooks on activations and full backward hooks on modules."""
    model = _net()
    seen: list[float] = []
    model[1].register_full_backward_hook(lambda _, gi, go: seen.append(float(go[0].sum())))

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        h = m[:3](x)
        h.register_hook(lambda g: g * 1.01)
        return F.cross_entropy(m[3:](h), y)

    return zoo.simple(model, loss_of)


def functional_transform() -> Job:
    """``torch.func.vmap`` and ``grad`` between forward and backward."""
    model = _net()

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        x, y = _batch()
        h = m(x)
        slopes = torch.func.vmap(torch.func.grad(lambda v: v.sin().sum()))(x[:8])
        return F.cross_entropy(h, y) + slopes.mean()

    return zoo.simple(model, loss_of)


def forward_mode() -> Job:
    """A loss of a forward-mode derivative: dual numbers by ``torch.autograd.forward_ad`` and by ``torch.func.jvp``."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)))

    def loss_of(m: nn.Module, i: int) -> torch.Tensor:
        x, tangent = torch.randn(256, 128), torch.randn(256, 128)
        if i % 2:
            weights = dict(m.named_parameters())
            y, slope = torch.func.jvp(lambda v: torch.func.functional_call(m, weights, (v,)), (x,), (tangent,))
        else:
            with forward_ad.dual_level():
                y, slope = forward_ad.unpack_dual(m(forward_ad.make_dual(x, tangent)))
        return y.square().mean() + slope.square().mean()

    return zoo.simple(model, loss_of)


def gradients_by_transform() -> Job:
    """``torch.func.grad_and_value`` of a functional call makes the gradients; no backward is ever called."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(_: int) -> torch.Tensor:
        x, y = _batch()
        weights = {name: p.detach() for name, p in model.named_parameters()}
        gradients, loss = torch.func.grad_and_value(
            lambda w: F.cross_entropy(torch.func.functional_call(model, w, (x,)), y)
        )(weights)
        for name, p in model.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
        return loss

    return Job(step, [model], [optimizer])


def nested_tensors() -> Job:
    """A jagged batch: rows of unequal lengths in a nested tensor."""
    model = _net()

    def loss_of(m: nn.Module, i: int) -> torch.Tensor:
        rows = torch.nested.nested_tensor([torch.randn(n, 128) for n in (100 + i, 200, 50)], layout=torch.jagged)
        return m(rows).values().square().mean()

    return zoo.simple(model, loss_of)


def failed_backward() -> Job:
    """A backward that raises half-way is caught, and training goes on."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(i: int) -> torch.Tensor:
        loss = _loss(model)
        optimizer.zero_grad()
        if i == 1:
            h = model[:3](_batch()[0])
            h.register_hook(_raise)
            with contextlib.suppress(ZeroDivisionError):
                model[3:](h).sum().backward()
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def frozen_part() -> Job:
    """A part without gradients in front; embeddings shared."""
    front, back = _net(), _net()
    for p in front.parameters():
        p.requires_grad_(requires_grad=False)
    model = nn.Sequential(front[:3], back)
    return zoo.simple(model, lambda m, _: _loss(m))


class _Centred(nn.Module):
    """Subtracts a mean that every forward updates, before the next layer saves a value computed from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (rows, width) to rows of the same width."""
        x = self.linear(x)
        out = torch.tanh(x - self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return out


def running_means() -> Job:
    """Buffers that the forward writes after it has read them."""
    model = nn.Sequential(*[_Centred(128) for _ in range(5)], nn.Linear(128, 10))
    return zoo.simple(model, lambda m, _: _loss(m, 512), lr=0.1)


def lazy_layers() -> Job:
    """Parameters that come to be in the first forward."""
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.LazyLinear(128), nn.GELU())], nn.LazyLinear(10))
    model(torch.zeros(1, 128))
    return zoo.simple(model, lambda m, _: _loss(m))


class _Spectral(nn.Module):
    """Products with conjugates and negated parts, which torch leaves to be resolved by the operators that read them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(x, dim=1, norm="ortho").conj() @ self.weight
        turned = z.conj()
        gate = torch.sigmoid(turned.imag)
        return torch.tanh(turned.real * gate) + (turned * z).real * 0.1 + (z @ self.weight.mH).imag.neg().exp().clamp(max=1.0)


def complex_layers() -> Job:
    """Complex numbers, conjugated and negated lazily."""
    model = nn.Sequential(nn.Linear(96, 96), *(_Spectral(96) for _ in range(3)), nn.Linear(96, 10))
    return zoo.simple(model, lambda m, _: _loss(m, width=96))


SITUATIONS: dict[str, Callable[[], Job]] = {
    f.__name__: f
    for f in (
        autocast_bf16, autocast_attention, accumulation, grads_zeroed_in_place, clipping, gan, retain_graph, retained_heads, generator_twice, double_backward,
        meta_learning, sparse_gradients, frozen_and_thawed, evaluation_between, last_batch_smaller, lengths_change, random_branch, checkpoint_plain, checkpoint_reentrant, own_hooks,
        custom_function, in_place_between, compiled_part, compiled_function, loader_workers, loader_pinned,
        saving_in_the_middle, plain_functions, hidden_state_carried, foreach_and_fused, optimizer_in_backward, tensor_hooks,
        functional_transform, forward_mode, gradients_by_transform, nested_tensors, failed_backward, frozen_part, complex_layers,
        running_means, lazy_layers,
    )
}
