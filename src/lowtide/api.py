"""The facade: ``lowtide.budget`` for scripts and notebooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowtide.errors import UsageError
from lowtide.live.outcome import Outcome
from lowtide.live.runtime import Runtime, Settings
from lowtide.planner import Plan
from lowtide.units import Size, parse_budget

_running: list[Runtime] = []


class Budgeted:
    """What ``with lowtide.budget(...) as run`` gives: figures of the run so far."""

    def __init__(self, runtime: Runtime) -> None:
        """Look at a runtime."""
        self._runtime = runtime

    @property
    def outcome(self) -> Outcome:
        """Budget, steps and plan."""
        runtime = self._runtime
        return Outcome(
            budget_bytes=runtime.budget_bytes,
            steps=tuple(runtime.steps),
            plan=runtime.figures,
            exact=runtime.meter.exact,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in force, by site."""
        return self._runtime.plan


@contextlib.contextmanager
def budget(
    size: str | Size | None, *, keep: tuple[str, ...] = (), plan: Plan | None = None, offload: bool = True
) -> Iterator[Budgeted]:
    """Train within so many bytes: a context manager, and a decorator.

    Args:
        size: ``"6 GiB"``, ``"50%"``, bytes as an int, ``"auto"`` (CUDA), or None: no limit, only rescue from out-of-memory.
        keep: module paths whose saved values are never dropped.
        plan: a plan to begin with (``lowtide.planner.load_plan``).
        offload: whether values may be moved to the second board (a file in ``TMPDIR``; pinned host memory for CUDA).

    Raises:
        SizeError: if the size cannot be read.
        UsageError: if a budget is in force already.
        BudgetError: at the beginning of the second step, if the budget cannot be held.
    """
    if _running:
        raise UsageError("a budget is in force already: leave it before another begins")
    asked = parse_budget(size) if isinstance(size, str) else size
    runtime = Runtime(Settings(budget=asked, keep=keep, plan=plan, offload=offload))
    _running.append(runtime)
    runtime.start()
    try:
        yield Budgeted(runtime)
    finally:
        runtime.stop()
        _running.remove(runtime)
