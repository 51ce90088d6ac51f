"""Measures the times and peaks of a script's first steps, in a plain run or under a budget and a cap."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, final

import msgspec
import psutil

import torch
from lowtide.base.errors import BudgetError, UsageError
from lowtide.base.trace import Phase
from lowtide.probe.catalogue import out_of_memory
from lowtide.probe.marks import Rounds
from lowtide.runtime.agent.task import TrialOptions
from lowtide.runtime.control.runtime import Runtime
from lowtide.runtime.control.settings import BudgetSettings
from lowtide.runtime.device import accelerator
from lowtide.runtime.device.accelerator import Accelerator, is_accelerator
from lowtide.runtime.device.find_meter import find_meter
from lowtide.runtime.device.heap_counters import preloaded
from lowtide.runtime.device.memory_meter import Meter
from lowtide.runtime.early_stop import StepLimitReached
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.tensors import modules_of, own_tensors, storages_of

MACHINE_SHARE = 0.9
"""Share of the machine's available memory that a run may take if it has no other cap."""


@final
class Trial:
    """The agent's job for ``lowtide min``, ``lowtide batch`` and other trials: a short run that is measured."""

    def __init__(self, options: TrialOptions) -> None:
        """Cap memory and start to measure.

        Raises:
            UsageError: if a cap is asked for, but there is neither a heap counter nor an accelerator.
        """
        self._options = options
        self._refused: BudgetError | None = None
        self._runtime: Runtime | None = None
        self._plain: Plain | None = None
        _cap(options.cap_bytes)
        if options.budget_bytes or options.allow:
            self._runtime = Runtime(
                BudgetSettings(
                    budget=options.budget_bytes or None,
                    allow=frozenset(options.allow),
                    without=frozenset(options.without),
                    offload=options.offload,
                    refusal=self._refuse,
                    steps=options.steps,
                )
            )
            self._runtime.start()
        else:
            self._plain = Plain(options.steps)
            self._plain.start()

    def _refuse(self, error: BudgetError) -> BaseException:
        self._refused = error
        return StepLimitReached()

    def finish(self, code: int, error: BaseException | None = None) -> None:
        """Write the measurements to ``options.json``, replacing the file as a whole."""
        found: dict[str, Any] = {"code": code, "message": "" if error is None else f"{type(error).__name__}: {error}"}
        if self._runtime is not None:
            self._runtime.stop(over=True)
            found |= self._runtime.outcome().to_json(code)
            found["resident_bytes"] = self._runtime.knowledge.persistent.bytes()
        elif self._plain is not None:
            found |= self._plain.finish()
        if self._refused is not None:
            found |= {"ended": "refused", "message": str(self._refused)}
        elif error is not None:
            found["ended"] = "memory" if out_of_memory(error) is not None else "error"
        else:
            found["ended"] = "ok" if not code else "error"
        found["message"] = found["message"].encode(errors="replace").decode()  # lone surrogates cannot be written
        partial = Path(self._options.json + ".partial")
        partial.write_bytes(msgspec.json.encode(found))
        partial.rename(self._options.json)


@final
class Plain:
    """A plain run that is measured: listens only for where steps begin and end."""

    def __init__(self, steps: int) -> None:
        """Prepare to measure.

        Args:
            steps: number of steps after which to end the script; 0 for never.
        """
        self._most = steps
        self._clock = PhaseTracker(self)
        self._rounds = Rounds()
        self._clock.on_optimizer = self._rounds.made
        self._steps: list[dict[str, Any]] = []
        self._meter: Meter | None = None
        self._started = 0.0
        self._open = False
        self._done = False
        self._consumed = False
        self._roots: dict[int, torch.nn.Module] = {}

    def start(self) -> None:
        """Start measuring."""
        self._clock.install()

    def finish(self) -> dict[str, Any]:
        """Stop measuring and return the figures."""
        self._clock.remove()
        if self._open and self._is_over():
            self._close()
        if self._meter is not None:
            self._meter.close()
        held = storages_of(own_tensors(m for root in self._roots.values() for m in modules_of(root)))
        return {"steps": self._steps, "plan": None, "levers": [], "resident_bytes": sum(s.nbytes() for s in held.values())}

    def phase_begins(self, _: Phase) -> None:
        """Ignored: the other calls tell where steps begin and end."""

    def root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - a listener's
        """Begin a step here, if autograd is on and the previous step is over."""
        if torch.is_grad_enabled():
            self._roots[id(module)] = module
            self._step_may_begin()

    def called_elsewhere(self, module: torch.nn.Module) -> None:
        """Ignored: modules called in other threads are not followed."""

    def root_ends(self, result: Any) -> None:
        """Ignored: a model's return neither begins nor ends a step."""

    def backward_begins(self) -> None:
        """Begin a step here at the latest, for scripts without modules."""
        self._step_may_begin()

    def backward_ends(self) -> None:
        """Note a backward: without any optimizer, the step is over now."""
        self._consumed = True

    def optimizer_begins(self, optimizer: Any) -> None:
        """Ignored: the step goes on."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Note whether all optimizers of a round have stepped: then the step is over when the next one begins."""
        self._done |= self._rounds.stepped(optimizer) > 0

    def _is_over(self) -> bool:
        return self._done or (self._consumed and not self._clock.optimizers_seen)

    def _step_may_begin(self) -> None:
        if self._open and not self._is_over():
            return
        if self._open:
            self._close()
        self._open = False
        if self._most and len(self._steps) >= self._most:
            raise StepLimitReached
        self._open, self._done, self._consumed = True, False, False
        self._started = time.perf_counter()
        if self._meter is None or (not is_accelerator(self._meter.device) and accelerator.in_use() is not None):
            self._meter = _meter()
        self._meter.begin_span()

    def _close(self) -> None:
        assert self._meter is not None
        if is_accelerator(self._meter.device):
            Accelerator(self._meter.device).synchronize()
        self._steps.append({
            "index": len(self._steps),
            "seconds": time.perf_counter() - self._started,
            "peak_bytes": self._meter.span_peak(),
        })


def _meter() -> Meter:
    found = find_meter(lambda: 0)
    if not found.exact:
        raise UsageError("peaks need the heap counter, which was not built: reinstall Lowtide with a C compiler")
    return found


def _cap(size: int) -> None:
    """Have torch's allocators refuse requests beyond ``size`` bytes.

    For 0, the cap is :data:`MACHINE_SHARE` of the available memory, so that the kernel's out-of-memory killer stays asleep; it
    applies only with the heap counter.

    Raises:
        UsageError: if a cap is asked for, but there is neither a heap counter nor an accelerator.
    """
    found = preloaded()
    if size and found is None and not accelerator.is_there():
        raise UsageError("a cap needs the heap counter, which was not built: reinstall Lowtide with a C compiler")
    if found is not None:
        found.cap = size or int(MACHINE_SHARE * psutil.virtual_memory().available)
    if size and accelerator.is_there():
        accelerator.current().limit(size)
