"""More training scripts, for the recorder: what neither the zoo nor the situations have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import situations
import torch
import zoo
from torch import nn
from torch.nn import functional as F
from zoo import Job


class Experts(nn.Module):
    """Top-1 routing over four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


def experts() -> Job:
    """Mixture of experts."""
    return zoo.simple(Experts(), lambda m, _: m(torch.randn(512, 64)).square().mean())


def embedding_bag() -> Job:
    """Bags of words, dense gradients."""
    model = nn.Sequential(nn.EmbeddingBag(3000, 64), nn.Linear(64, 10))
    return zoo.simple(
        model, lambda m, _: F.cross_entropy(m(torch.randint(0, 3000, (256, 12))), torch.randint(0, 10, (256,)))
    )


def sparse_bag() -> Job:
    """Bags of words whose gradients are sparse: the optimizer takes them as the backward made them."""
    model = nn.EmbeddingBag(4000, 64, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: int) -> torch.Tensor:
        loss = model(torch.randint(0, 4000, (600, 12))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def compressed_rows() -> Job:
    """Messages along the edges of a graph: a sparse matrix in compressed rows, whose values are trained, too."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    where = torch.rand(1024, 1024, generator=torch.Generator().manual_seed(3)) < 0.02
    edges = nn.ParameterList([nn.Parameter(torch.ones(int(where.sum())))])
    model = nn.ModuleList([layers, edges])
    rows = where.to_sparse_csr()

    def loss_of(_: nn.Module, __: int) -> torch.Tensor:
        h = torch.randn(1024, 64)
        for layer in layers:
            adjacency = torch.sparse_csr_tensor(rows.crow_indices(), rows.col_indices(), edges[0], (1024, 1024))
            h = layer(adjacency @ h).tanh()
        return h.square().mean()

    return zoo.simple(model, loss_of)


def ragged_batch() -> Job:
    """Rows of unequal lengths in a nested tensor of torch's own kind, through layers."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        batch = torch.nested.nested_tensor([torch.randn(n, 64) for n in (100, 300, 700)])
        return torch.nested.to_padded_tensor(m(batch), 0.0).square().mean()

    return zoo.simple(model, loss_of)


def linear_algebra() -> Job:
    """Singular values and a Cholesky factor: LAPACK's workspaces."""
    model = nn.Linear(96, 96)

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        y = m(torch.randn(256, 96))
        spread = y.T @ y / 256 + torch.eye(96)
        return torch.linalg.svdvals(y).sum() / 96 + torch.linalg.cholesky(spread).diagonal().log().sum()

    return zoo.simple(model, loss_of)


def _with(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Job:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = make(model)

    def step(_: int) -> torch.Tensor:
        x, y = torch.randn(256, 128), torch.randint(0, 10, (256,))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Job(step, [model], [optimizer])


def lbfgs() -> Job:
    """Closures called several times a step."""
    return _with(lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3))


def sgd_momentum() -> Job:
    """Plain loops over the parameters."""
    return _with(lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, foreach=False))


def adam_foreach() -> Job:
    """All parameters at once."""
    return _with(lambda m: torch.optim.Adam(m.parameters(), foreach=True))


def adamw_fused() -> Job:
    """One kernel for all."""
    return _with(lambda m: torch.optim.AdamW(m.parameters(), fused=True))


def rmsprop() -> Job:
    """Another state."""
    return _with(lambda m: torch.optim.RMSprop(m.parameters()))


OWN: dict[str, Callable[[], Job]] = {
    f.__name__: f for f in (
        experts, embedding_bag, sparse_bag, compressed_rows, ragged_batch, linear_algebra, lbfgs, sgd_momentum, adam_foreach,
        adamw_fused, rmsprop,
    )
}
_UNSTEADY = {"failed_backward", "loader_workers", "loader_pinned", "random_branch"}
"""Jobs that raise, fork or draw random numbers from elsewhere: two runs in one process differ."""
JOBS: dict[str, Callable[[], Job]] = {
    **zoo.MODELS, **{n: f for n, f in situations.SITUATIONS.items() if n not in _UNSTEADY}, **OWN
}


class _Doubled(torch.autograd.Function):
    """Its backward sums two tensors that it made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        twice, thrice = given * 2, given * 3
        return twice + thrice


class _Unnamed(_Doubled):
    """No variable refers to the summands."""

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        once = given * 1
        return once + (given * 2 + given * 3)


class _Given(_Doubled):
    """It adds to the gradient that it receives."""

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given + torch.ones_like(given)


def _hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda g: g + torch.ones_like(g))
    return y


def _kept(*which: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Three gradients are summed; the script holds some of them until the last is made."""

    def run(y: torch.Tensor) -> torch.Tensor:
        z = y * 1
        kept: list[torch.Tensor] = []
        last, second, first = z * 4, z * 3, z * 2
        for i, branch in enumerate((first, second)):
            if i in which:
                assert branch.grad_fn is not None
                branch.grad_fn.register_hook(lambda made, _: kept.extend(g for g in made if g is not None))
        last.register_hook(lambda _: kept.clear())
        return first + second + last

    return run


def _spread(y: torch.Tensor) -> torch.Tensor:
    """One node makes gradients of both and adds them up."""
    spread, mean = torch.std_mean(y, 0)
    return spread + mean


def _square(y: torch.Tensor) -> torch.Tensor:
    """One node makes two gradients of one tensor, which the engine adds up."""
    z = y * 1
    return z * z


def _scan(y: torch.Tensor) -> torch.Tensor:
    """A recurrence over slices, as state space models have it: each gives a gradient of the whole."""
    rows = y.view(64, -1, 64)
    decay, state, out = rows.sigmoid(), torch.zeros_like(rows[0]), []
    for i in range(64):
        state = decay[i] * state + rows[i]
        out.append(state)
    return torch.stack(out)


def _summing(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Job]:
    def make() -> Job:
        return zoo.simple(nn.Linear(64, 64), lambda m, _: (run(m(torch.randn(8192, 64))) * 2).sum())

    return make


def _tied(*, sparse_waits: bool) -> Callable[[], Job]:
    """A weight has a sparse gradient and a dense one; the use that comes last in the forward has its own first."""

    def make() -> Job:
        weight = nn.Parameter(torch.randn(8000, 64))
        optimizer = torch.optim.SGD([weight], lr=0.01, foreach=False)

        def looked_up() -> torch.Tensor:
            return F.embedding(torch.randint(0, 8000, (16,)), weight, sparse=True).square().mean()

        def read() -> torch.Tensor:
            return weight[:40].square().mean()

        def step(_: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = read() + looked_up() if sparse_waits else looked_up() + read()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(step, [], [optimizer])

    return make


SUMS: dict[str, Callable[[], Job]] = {
    **{
        name: _summing(run) for name, run in {
            "own": _Doubled.apply, "own_unnamed": _Unnamed.apply, "own_given": _Given.apply, "own_in_hook": _hooked,
            "kept_none": _kept(), "kept_first": _kept(0), "kept_second": _kept(1), "kept_both": _kept(0, 1),
            "one_node": _spread, "square": _square, "scan": _scan,
        }.items()
    },
    "sparse_waits": _tied(sparse_waits=True),
    "dense_waits": _tied(sparse_waits=False),
}
"""Jobs that sum two gradients at the highest point: by the engine, in place or not, or in their own code."""
