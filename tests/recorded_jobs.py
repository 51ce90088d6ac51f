"""More training scripts, for the recorder: what neither the zoo nor the situations have."""

from __future__ import annotations

from collections.abc import Callable

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
"""What raises, forks or draws lots from elsewhere: two runs in one process are not alike."""
JOBS: dict[str, Callable[[], Job]] = {
    **zoo.MODELS, **{n: f for n, f in situations.SITUATIONS.items() if n not in _UNSTEADY}, **OWN
}
