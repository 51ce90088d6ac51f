"""Law: where the offload tier has no room or cannot be created, the budget is held without it or refused; no bit changes."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from typing import Any

import pytest
import torch
import zoo
from harness import above_of, budgeted, plain_of
from lowtide.runtime.device import file_tier

SAYS = "lowtide: offloading stops: "


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _nowhere(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/x']")


def _said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(SAYS)]


@pytest.mark.parametrize("what", ["nowhere", "no room"])
def test_a_budget_is_held_without_an_offload_tier(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, and what to do."""
    make = zoo.mlp
    reference = plain_of(make)
    if what == "nowhere":
        monkeypatch.setattr(tempfile, "TemporaryFile", _nowhere)
    else:
        monkeypatch.setattr(file_tier, "reserve", _full)
    run = budgeted(make, above_of(reference, 0.9))
    assert run.bits == reference.bits
    assert run.peak_bytes <= run.budget_bytes
    assert not sum(s.offloaded_bytes for s in run.outcome.steps)
    (said,) = _said(capsys)
    assert said.endswith("set TMPDIR to a folder with free space; training goes on")


def test_a_full_tier_says_so_once_and_returns_what_it_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = file_tier.FileTier()
    monkeypatch.setattr(file_tier, "_SEGMENT_BYTES", 1 << 16)
    values = torch.arange(1 << 14, dtype=torch.float32)
    ticket = found.put(values.untyped_storage())
    monkeypatch.setattr(file_tier, "reserve", _full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            found.put(values.untyped_storage())
    assert len(_said(capsys)) == 1
    again = torch.empty(0).set_(ticket.fetch())
    assert torch.equal(again, values)


def test_a_write_that_fails_after_all_leaves_the_value_where_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """File systems without reservation (and copy-on-write ones) can be full although room was reserved."""
    real, left = file_tier.write_memory, [6]

    def filling(*place: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            _full()
        real(*place)

    make = zoo.mlp
    reference = plain_of(make)
    monkeypatch.setattr(file_tier, "write_memory", filling)
    run = budgeted(make, above_of(reference, 0.9))
    assert left[0] < 0
    assert run.bits == reference.bits
    assert len(_said(capsys)) == 1


def test_a_tier_without_room_for_a_segment_takes_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    real = file_tier.reserve

    def small(file: int, size: int, *, since: int = 0) -> None:
        if size - since >= file_tier._SEGMENT_BYTES:
            _full()
        real(file, size, since=since)

    monkeypatch.setattr(file_tier, "reserve", small)
    found = file_tier.FileTier()
    values = torch.arange(1 << 10, dtype=torch.float32)
    tickets = [found.put((values + i).untyped_storage()) for i in range(3)]
    for i, ticket in enumerate(tickets):
        assert torch.equal(torch.empty(0).set_(ticket.fetch()), values + i)


def test_a_tier_that_cannot_be_measured_for_lack_of_memory_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed is first asked for when memory has run out: that must not end the run, nor end offloading."""
    mapped = mmap.mmap

    def cramped(number: int, size: int, *args: Any, **kwargs: Any) -> Any:
        if number == -1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mapped(number, size, *args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", cramped)
    make = zoo.mlp
    reference = plain_of(make)
    run = budgeted(make, above_of(reference, 0.5))
    assert run.bits == reference.bits
    assert run.peak_bytes <= run.budget_bytes
    assert sum(s.offloaded_bytes for s in run.outcome.steps)
