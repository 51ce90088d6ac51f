"""Laws of the sampler in a watched process: its marks leave the interpreter to the script."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from forked import forked_call
from lowtide.probe import sampler
from lowtide.probe.marks import MarkSource


def _sampler(**fields: Any) -> sampler.Sampler:
    made = object.__new__(sampler.Sampler)
    vars(made).update(fields)
    return made


def test_marks_of_the_clock_take_a_fifth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the interpreter's lock: while a large library is imported, a collection takes longer than their distance."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    takes = iter([0.5, 0.5, 0.001, 0.001])
    marked: list[tuple[float, float]] = []
    made = _sampler(_kind=MarkSource.CLOCK, _ending=False)

    def mark(*_: Any) -> None:
        start, seconds = now[0], next(takes)
        now[0] += seconds
        marked.append((start, seconds))
        made._ending = len(marked) == 4

    vars(made)["marked"] = mark
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    made._clock(0.1)
    starts = [start for start, _ in marked]
    assert starts == pytest.approx([0.1, 2.6, 5.1, 5.2])
    assert sum(seconds for _, seconds in marked) <= sampler.CLOCK_SHARE * now[0]


def test_objects_are_frozen_again_when_a_library_has_brought_many() -> None:
    """Otherwise every collection walks through all of them: hundreds of milliseconds a step."""

    def body() -> None:
        made = _sampler(_frozen_at=0)
        made._collected()
        first = gc.get_freeze_count()
        made._collected()
        assert gc.get_freeze_count() == first
        library = [[i] for i in range(3_000_000)]
        made._collected()
        assert gc.get_freeze_count() > first + len(library) - 1
        few = [[i] for i in range(1000)]
        second = gc.get_freeze_count()
        made._collected()
        assert gc.get_freeze_count() == second
        assert few

    done = forked_call(body)
    assert done.returncode == 0, done.stderr
