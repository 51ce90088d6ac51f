"""Baseline and budgeted runs of the same job, with the heap counter as the judge of their peaks."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from lowtide.runtime.control.runtime import Runtime
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.device.heap_counters import Counters
from lowtide.runtime.device.heap_meter import counters
from lowtide.runtime.run_figures import RunOutcome
from lowtide.runtime.units.earlier_runs import EarlierRuns

import lowtide

STEPS = 5
FULL = bool(os.environ.get("LOWTIDE_FULL"))
"""Whether every cell of a matrix is run (`make test-slow`), or only the most telling ones."""
TOLERANCE_BYTES = 64 << 10
TOLERANCE_SHARE = 0.005


@dataclass(frozen=True)
class Plain:
    """The results of a run without Lowtide.

    Attributes:
        bits: losses, gradients, buffers and weights of all steps.
        above_bytes: peak above the bytes live before it.
        resident_bytes: parameters, buffers and optimizer states.
    """

    bits: list[bytes]
    above_bytes: int
    resident_bytes: int


def heap() -> Counters:
    """The preloaded counter."""
    found = counters()
    assert found is not None, "the heap counter is not preloaded: run these tests by `make test`"
    return found


def live_now() -> int:
    """Bytes of tensors that something can reach: other tests' garbage would be room once it is collected."""
    gc.collect()
    return heap().tensor_live


def plain(make: Callable[[], zoo.Job], steps: int = STEPS) -> Plain:
    """Run without Lowtide, once to warm libraries up and once to measure."""
    torch.use_deterministic_algorithms(mode=True)
    zoo.run(make, 1)
    gc.unfreeze()  # objects frozen for an earlier job may be garbage by now
    gc.collect()
    gc.freeze()  # the collector need not visit the models' libraries in every test
    counter = heap()
    base = counter.tensor_live
    counter.tensor_peak = base
    bits = zoo.run(make, steps)
    above = counter.tensor_peak - base
    job = make()
    job.step(0)
    tensors = [t for m in job.modules for t in (*m.parameters(), *m.buffers())]
    tensors += [t for o in job.optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    resident = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    return Plain(bits, above, resident)


@cache
def plain_of(make: Callable[[], zoo.Job], steps: int = STEPS) -> Plain:
    """The baseline run of a job, once per process."""
    return plain(make, steps)


@dataclass(frozen=True)
class Budgeted:
    """The results of a run under a budget; the peak is the heap counter's own, over all steps, the first included."""

    bits: list[bytes]
    budget_bytes: int
    peak_bytes: int
    outcome: RunOutcome

    @property
    def floor_bytes(self) -> int:
        """The floor that the run reports; 0 if it reports none."""
        plan = self.outcome.plan
        return 0 if plan is None else max(plan.bound_peak_bytes, plan.lowest_peak_bytes)

    @property
    def over(self) -> list[tuple[str, int]]:
        """Each step's policy, and how far its peak was above the budget."""
        return [(s.policy, s.peak_bytes - self.budget_bytes) for s in self.outcome.steps]


def budgeted(
    make: Callable[[], zoo.Job], above_bytes: int, steps: int = STEPS, *, offload: bool = True, **how: Any
) -> Budgeted:
    """Run under a budget of the bytes live now plus ``above_bytes``."""
    torch.use_deterministic_algorithms(mode=True)
    budget = live_now() + above_bytes
    counter = heap()
    counter.tensor_peak = counter.tensor_live
    with lowtide.budget(budget, offload=offload, **how) as run:
        bits = zoo.run(make, steps)
    for step in run.outcome.steps:  # parts of a step take no longer than it, and none where nothing was done
        assert 0 <= step.offload_seconds <= step.seconds
        assert 0 <= step.recompute_seconds <= step.seconds
        assert step.recomputed_ops or not step.recompute_seconds
    return Budgeted(bits, budget, counter.tensor_peak, run.outcome)


@contextlib.contextmanager
def remembering(folder: Path) -> Iterator[None]:
    """Context in which budgeted runs follow what others recorded in the same folder, and add to it."""
    from lowtide import api

    runs: list[tuple[EarlierRuns, Runtime]] = []

    def with_memory(**how: Any) -> BudgetSettings:
        return BudgetSettings(**how, earlier=EarlierRuns(folder))

    class Remembered(api.Budgeted):
        def __init__(self, runtime: Runtime) -> None:
            super().__init__(runtime)
            assert runtime.settings.earlier is not None
            runs.append((runtime.settings.earlier, runtime))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "BudgetSettings", with_memory)
        patched.setattr(api, "Budgeted", Remembered)
        try:
            yield
        finally:
            for earlier, runtime in runs:
                earlier.keep(runtime.knowledge.recordings)


def trained_under(
    train: Callable[[], list[torch.Tensor]], above_bytes: int, **how: Any
) -> tuple[list[torch.Tensor], RunOutcome, int, int]:
    """Train under a budget above the bytes live now: weights, outcome, bytes live before, and the heap's peak above them."""
    gc.collect()
    heap().tensor_peak = base = heap().tensor_live
    with lowtide.budget(base + above_bytes, **how) as run:
        found = train()
        return found, run.outcome, base, heap().tensor_peak - base


def gradient_of(
    make: Callable[[torch.Tensor], torch.Tensor], sides: tuple[int, int], around: AbstractContextManager[Any]
) -> tuple[torch.Tensor, int]:
    """The gradient of a function of a matrix, computed inside a context, and the rise of memory in the backward."""
    torch.manual_seed(0)
    leaf = torch.randn(sides, requires_grad=True)
    with around:
        out = make(leaf)
        given = torch.ones_like(out)
        heap().tensor_peak = base = heap().tensor_live
        out.backward(given)
        rise = heap().tensor_peak - base
    assert leaf.grad is not None
    return leaf.grad, rise


def looking_on(how: str, folder: Path) -> AbstractContextManager[Any]:
    """A recording, or a budget that is never reached."""
    return lowtide.budget("4GiB") if how == "budget" else lowtide.record(folder / "run.lowtide")


FIRST_CALLS_BYTES = 64 << 10
"""Bytes that oneDNN takes at the first calls of its kernels and that cannot be refused: only steps before a plan may show them."""


def kept(run: Budgeted) -> bool:
    """Whether every step was within the budget: the planned ones to the byte."""
    planned = [s for s in run.outcome.steps[2:] if s.policy == "planned"]
    strictly = all(s.peak_bytes <= run.budget_bytes for s in planned)
    return strictly and run.peak_bytes <= run.budget_bytes + FIRST_CALLS_BYTES


def above_of(reference: Plain, share: float) -> int:
    """Bytes above the base: the resident bytes and a share of what the baseline's peak has above them."""
    return int(reference.resident_bytes + share * (reference.above_bytes - reference.resident_bytes))


def close(a: int, b: int) -> bool:
    """Within 0.5 % or 64 KiB."""
    return abs(a - b) <= max(TOLERANCE_BYTES, TOLERANCE_SHARE * b)
