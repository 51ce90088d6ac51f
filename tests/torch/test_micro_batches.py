"""A step that runs out of memory is run again in micro-batches: the same effective batch, with nothing left of the failed
attempt.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import warnings
import weakref

from command import TIMEOUT
import numpy as np
import pytest
import torch

import lowtide
from lowtide.base.errors import MicroBatchError

SHORT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


def net(**layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), *layers.values(), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()


class Short:
    """Fails like an allocator for batches of more than `most` samples, in forward or in backward."""

    def __init__(self, most, where="forward", error=None):
        self.most, self.where, self.sizes = most, where, []
        self.error = error or RuntimeError(SHORT)

    def __call__(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most and self.where == "forward":
            raise self.error
        if len(x) > self.most:
            x = x.clone().requires_grad_()
            x.register_hook(self.fail)
            return x * 1
        return x

    def fail(self, _):
        raise self.error


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(a, b):
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("total", [7, 8, 13])
def test_micro_batches_give_the_gradients_of_the_whole_batch(total, reduction, where):
    """Also where the last micro-batch is smaller. The size that worked is used at once in the next step."""
    model, short = net(), Short(3, where)
    x, y = torch.randn(total, 6, dtype=torch.double), torch.randint(0, 4, (total,))
    whole = torch.nn.functional.cross_entropy(model(x), y, reduction=reduction)
    whole.backward()
    expected = grads(model)
    model.zero_grad()
    step = lowtide.micro_batched(lambda a, b: torch.nn.functional.cross_entropy(model(short(a)), b, reduction=reduction), model=model, reduction=reduction)
    loss = step(x, y)
    close(grads(model), expected)
    assert torch.allclose(loss, whole.detach(), rtol=1e-12)
    assert max(short.sizes) == total and step.size <= 3 and step.failures >= 1
    short.sizes.clear()
    model.zero_grad()
    step(x, y)  # the size that worked is remembered
    assert max(short.sizes) <= 3
    close(grads(model), expected)


def test_a_batch_that_fits_runs_whole_with_equal_bits():
    model, (x, y) = net(), (torch.randn(8, 6, dtype=torch.double), torch.randint(0, 4, (8,)))
    loss_fn = lambda a, b: torch.nn.functional.cross_entropy(model(a), b)  # noqa: E731
    loss_fn(x, y).backward()
    expected = grads(model)
    model.zero_grad()
    step = lowtide.micro_batched(model=model)(loss_fn)
    step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(grads(model), expected, strict=True))
    assert (step.pieces, step.failures, step.size) == (1, 0, 8)


def test_a_mean_over_counted_tokens_equals_the_whole_batchs():
    """With ignore_index the micro-batches have different numbers of counted tokens, one of them none."""
    model, short = net(), Short(2)
    x, y = torch.randn(8, 6, dtype=torch.double), torch.tensor([1, -100, -100, -100, 2, 3, 0, -100])
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = grads(model)
    model.zero_grad()

    @lowtide.micro_batched(model=model, count=lambda _, b: int((b != -100).sum()))
    def step(a, b):
        return torch.nn.functional.cross_entropy(model(short(a)), b)

    step(x, y)
    close(grads(model), expected)


def test_micro_batches_add_to_existing_gradients():
    model, short = net(), Short(2)
    batches = [(torch.randn(8, 6, dtype=torch.double), torch.randint(0, 4, (8,))) for _ in range(3)]
    for x, y in batches:
        torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = grads(model)
    model.zero_grad()
    step = lowtide.micro_batched(lambda a, b: torch.nn.functional.cross_entropy(model(short(a)), b), model=model)
    for x, y in batches:
        step(x, y)
    close(grads(model), expected)


def test_dicts_and_keyword_arguments_are_split_too():
    model, short = net(), Short(2)
    x, y = torch.randn(5, 6, dtype=torch.double), torch.randint(0, 4, (5,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = grads(model)
    model.zero_grad()

    @lowtide.micro_batched(model=model)
    def step(batch, *, scale):
        return torch.nn.functional.cross_entropy(model(short(batch["x"])), batch["y"]) * scale

    step({"x": x, "y": y, "name": "kept"}, scale=1.0)
    close(grads(model), expected)


def test_a_failed_attempt_leaves_no_gradients_statistics_or_memory():
    """With the collector off. Layers that normalize over the batch are refused or warned about once, unless they are
    evaluating.
    """
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    held = []

    def loss_fn(a):
        big = torch.ones(1000, 1000)
        held.append(weakref.ref(big))
        loss = model(a).sum() + big.sum() * 0
        if len(a) > 2:
            raise RuntimeError(SHORT)
        return loss

    gc.disable()  # memory that only the collector frees would be live in the next attempt
    try:
        step = lowtide.micro_batched(loss_fn, model=model, reduction="sum", batch_norm="refuse")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(MicroBatchError, match="1 normalise over the batch"):
            step(torch.randn(8, 6))
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert [ref() for ref in held] == [None] * len(held)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warned = lowtide.micro_batched(loss_fn, model=model, reduction="sum", batch_norm="warn")
            warned(torch.randn(8, 6))
            warned(torch.randn(8, 6))
        assert len([w for w in caught if "normalise" in str(w.message)]) == 1
        assert [ref() for ref in held] == [None] * len(held)
        model.eval()
        lowtide.micro_batched(loss_fn, model=model, reduction="sum")(torch.randn(8, 6))  # fixed statistics: nothing to refuse
    finally:
        gc.enable()


@pytest.mark.parametrize(("error", "raised"), [
    (ValueError("a bug"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt), (RuntimeError(SHORT), MicroBatchError),
])
def test_existing_gradients_survive_any_error(error, raised):
    model = net()
    model(torch.randn(2, 6, dtype=torch.double)).sum().backward()
    before = [p.grad for p in model.parameters()]
    values = grads(model)
    step = lowtide.micro_batched(lambda a: model(Short(0, error=error)(a)).sum(), model=model, reduction="sum")
    with pytest.raises(raised):
        step(torch.randn(4, 6, dtype=torch.double))
    assert all(p.grad is b and torch.equal(b, v) for p, b, v in zip(model.parameters(), before, values, strict=True))


def test_leaves_of_the_batch_and_rebound_buffers_are_restored():
    """The batch's own gradient is that of the whole batch, and a buffer that was replaced in a failed attempt has its old
    value again.
    """
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n = self.n + 1
            return x

    model, short = torch.nn.Sequential(Counting(), torch.nn.Linear(6, 4).double()), Short(3)
    x = torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    expected = torch.autograd.grad(model[1](x).square().sum(), x)[0]
    counted = model[0].n
    step = lowtide.micro_batched(lambda a: short(model(a)).square().sum(), model=model, reduction="sum")
    step(x)
    assert torch.allclose(x.grad, expected)
    assert step.failures == 2
    assert model[0].n == step.pieces, "attempts that failed after the buffer was bound anew do not count"
    assert counted == 0


@pytest.mark.parametrize("layer", [
    torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 4)), torch.nn.utils.spectral_norm(torch.nn.Linear(6, 4)),
    torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)),
])
def test_layers_that_depend_on_the_whole_batch_are_refused_also_later(layer):
    """Spectral and batch norms: a step that ran in micro-batches while evaluating is refused once the model trains."""
    model, short = torch.nn.Sequential(layer), Short(4)
    step = lowtide.micro_batched(lambda a: model(short(a)).sum(), model=model, reduction="sum")
    model.eval()
    step(torch.randn(8, 6))
    assert step.pieces > 1
    model.train()
    with pytest.raises(MicroBatchError, match="give other gradients"):
        step(torch.randn(8, 6))


def test_a_single_sample_that_does_not_fit_is_an_error():
    model, short = net(), Short(0)
    step = lowtide.micro_batched(lambda a: model(short(a)).sum(), model=model, reduction="sum")
    with pytest.raises(MicroBatchError, match="one sample at a time does not fit"):
        step(torch.randn(4, 6, dtype=torch.double))
    assert short.sizes == [4, 2, 1]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyboardInterrupt()])
def test_other_errors_pass_unchanged(error):
    model = net()
    step = lowtide.micro_batched(lambda a: model(Short(1, error=error)(a)).sum(), model=model, reduction="sum")
    with pytest.raises(type(error)) as caught:
        step(torch.randn(4, 6, dtype=torch.double))
    assert caught.value is error
    assert error.__traceback__ is not None


def test_a_larger_size_is_tried_only_when_asked():
    model, short = net(), Short(2)
    step = lowtide.micro_batched(lambda a: model(short(a)).sum(), model=model, reduction="sum")
    x = torch.randn(8, 6, dtype=torch.double)
    step(x)
    short.most = 8
    short.sizes.clear()
    step(x)
    assert max(short.sizes) == 2
    step.larger()
    step(x)
    assert max(short.sizes) == 8
    assert step.pieces == 1


@pytest.mark.parametrize("batch", [(torch.ones(3), torch.ones(4)), (3, "x"), (), (torch.ones(3), np.ones(3)), (torch.ones(3), [1.0, 2.0, 3.0]), (torch.ones(0),),
    (torch.ones(3), ["a", "b", "c"]), ({"x": torch.ones(3), "name": ("a", "b", "c")},)])
def test_a_batch_that_cannot_be_split_is_an_error(batch):
    with pytest.raises(MicroBatchError, match="dimension"):
        lowtide.micro_batched(lambda *_: torch.zeros(()), model=net())(*batch)


def test_a_real_memory_shortage_on_the_cpu_is_survived(tmp_path):
    """torch's allocator fails for real, under a limit on the process's data."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent("""
        import resource, torch, lowtide
        model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))
        @lowtide.micro_batched(model=model)
        def step(x):
            return model(x).square().mean()
        x = torch.randn(20000, 64)
        step(x[:10]); model.zero_grad()
        now = int(open("/proc/self/statm").read().split()[5]) * 4096
        resource.setrlimit(resource.RLIMIT_DATA, (now + (500 << 20), -1))
        step(x)
        print(step.pieces, step.failures, model[0].weight.grad.abs().sum().item() > 0)
    """))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": ""})
    assert done.returncode == 0, done.stderr
    pieces, failures, some = done.stdout.split()
    assert int(pieces) >= 2 and int(failures) >= 1 and some == "True"


RANKS = """
    import os, random, sys
    import torch, torch.distributed as dist
    import lowtide
    from lowtide.base.errors import MicroBatchError
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    chance = random.Random(rank)           # ranks fail at different moments
    where, injected = "", 0
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: injected")
    def loss_fn(x, y):
        global injected
        if len(x) > 1 and chance.random() < 0.3:
            injected += 1
            if chance.random() < 0.5:
                fail()
            out = model(x)
            out.register_hook(fail)
            return torch.nn.functional.cross_entropy(out, y)
        return torch.nn.functional.cross_entropy(model(x), y)
    step = lowtide.micro_batched(loss_fn, model=model)
    worst = 0.0
    total = 0
    while total < 200:
        data = torch.Generator().manual_seed(total)
        xs, ys = torch.randn(2, 9, 6, dtype=torch.double, generator=data), torch.randint(0, 4, (2, 9), generator=data)
        model.zero_grad()
        step.larger()
        step(xs[rank], ys[rank])
        both = sum(torch.nn.functional.cross_entropy(plain(x), y) for x, y in zip(xs, ys)) / 2
        expected = torch.autograd.grad(both, list(plain.parameters()))
        worst = max([worst, *((p.grad - g).abs().max().item() for p, g in zip(plain.parameters(), expected))])
        counted = torch.tensor([injected]); dist.all_reduce(counted); total = int(counted)
    def bad(x):
        if rank == 1:
            raise ValueError("a bug in one rank")
        return model(x).sum()
    try:
        lowtide.micro_batched(bad, model=model, reduction="sum")(xs[rank])
    except (ValueError, MicroBatchError) as error:
        os.write(1, f"rank {rank} {step.failures > 50} {worst < 1e-12} {type(error).__name__}\\n".encode())
"""


@pytest.mark.long
def test_ranks_agree_through_200_injected_failures(tmp_path):
    """Two ranks fail at different moments, and each step still has the gradients of the whole batch. An error in one rank ends
    both.
    """
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(RANKS))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 True True MicroBatchError", "rank 1 True True ValueError"], done.stderr[-3000:]
