"""Law: memory, streams and generators of every kind of accelerator are read through one interface, which says what a kind
lacks.

A device module of torch's (``torch.cuda``, ``torch.xpu``) is played by a fake that keeps its bytes as numbers and logs its
calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowtide.runtime.device import accelerator, find_meter
from lowtide.runtime.device.accelerator import Accelerator, counted_device_of, is_accelerator
from lowtide.runtime.device.heap_meter import HeapMeter
from lowtide.runtime.device.ledger_meter import LedgerMeter

DEVICE = torch.device("xpu", 1)


class Module:
    """A device with peaks, streams and generators."""

    def __init__(self) -> None:
        self.begun = True
        self.live, self.reserved, self.total = 300, 500, 2000
        self.log: list[Any] = []
        self.default_generators = ("generator 0", "generator 1")

    def is_initialized(self) -> bool:
        return self.begun

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 1

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == DEVICE
        return {"allocated_bytes.all.current": self.live, "num_ooms": 2}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """The peak is always the live bytes."""

    def memory_allocated(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.live

    def memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.reserved

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return self.total - self.reserved, self.total

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        assert device == DEVICE
        return SimpleNamespace(total_memory=self.total)

    def set_per_process_memory_fraction(self, share: float, device: torch.device) -> None:
        assert device == DEVICE
        self.log.append(share)

    def empty_cache(self) -> None:
        self.log.append("emptied")

    def Stream(self, device: torch.device) -> str:  # noqa: N802 - torch's name
        return f"stream of {device}"

    def current_stream(self, device: torch.device) -> str:
        return f"current of {device}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.log.append(f"on {stream}")
        yield
        self.log.append("off")

    def Event(self) -> str:  # noqa: N802
        return "event"

    def synchronize(self, device: torch.device) -> None:
        self.log.append(f"waited for {device}")


class Bare:
    """A device that reports no peaks, exposes no generators and has no state before it is used (MPS)."""

    def is_available(self) -> bool:
        return True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """The machine's accelerator."""
    found = Module()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: found)
    return found


def test_memory_figures_come_from_the_device_module(module: Module) -> None:
    """Allocated, cached (idle) and free bytes, the limit (at most the whole device) and `empty_cache` all go through torch's
    module.
    """
    found = Accelerator(torch.device("xpu"))
    assert found.device == DEVICE
    assert (found.allocated_bytes(), found.idle_bytes(), found.free_bytes()) == (300, 200, 1500)
    assert found.counts_peaks
    assert found.statistics()["num_ooms"] == 2
    found.limit(500)
    found.limit(9000)
    found.empty_cache()
    assert module.log == [0.25, 1.0, "emptied"]


def test_streams_and_events_come_from_the_device_module(module: Module) -> None:
    """Streams, events, `synchronize` and the default generator are those of torch's module for this device."""
    found = Accelerator(DEVICE)
    with found.on(found.stream()):
        assert (found.event(), found.current_stream()) == ("event", "current of xpu:1")
    found.synchronize()
    assert module.log == ["on stream of xpu:1", "off", "waited for xpu:1"]
    assert found.generator() == "generator 1"


def test_a_device_without_peaks_or_generators_says_so() -> None:
    """A bare device has no peak counter, empty statistics and no generator, and none of these raises."""
    found = Accelerator(torch.device("mps"), Bare())
    assert not found.counts_peaks
    assert found.statistics() == {}
    assert found.generator() is None


def test_an_accelerator_is_in_use_once_it_is_initialized(module: Module) -> None:
    """`in_use` returns None until torch's module is initialized, and the current device from then on."""
    module.begun = False
    assert accelerator.in_use() is None
    module.begun = True
    used = accelerator.in_use()
    assert used is not None
    assert used.device == DEVICE


def test_no_accelerator_is_in_use_on_a_machine_without_one() -> None:
    """On a machine without an accelerator nothing is counted on a device, and asking for the current one raises."""
    assert accelerator.in_use() is None
    assert counted_device_of([torch.zeros(1)]) is None
    with pytest.raises(RuntimeError, match="no accelerator"):
        accelerator.current()


@pytest.mark.parametrize(("kind", "own"), [("cpu", False), ("meta", False), ("cuda", True), ("xpu", True), ("mps", True)])
def test_accelerators_are_devices_with_their_own_memory(kind: str, *, own: bool) -> None:
    """CPU and meta are not accelerators; CUDA, XPU and MPS are."""
    assert is_accelerator(torch.device(kind)) is own


def test_a_model_counts_on_the_device_of_its_first_device_parameter(module: Module) -> None:
    """Parameters on the host are skipped; before the accelerator is initialized nothing is counted there."""
    host, there = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=DEVICE)
    assert counted_device_of([host, there]) == DEVICE  # type: ignore[list-item]
    assert counted_device_of([host]) is None  # type: ignore[list-item]
    module.begun = False
    assert counted_device_of([host, there]) is None  # type: ignore[list-item]


def test_a_device_without_peak_counters_is_metered_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that cannot report peaks is not counted; the host's meter is used instead."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: Bare())
    assert counted_device_of([SimpleNamespace(device=torch.device("mps"))]) is None  # type: ignore[list-item]
    assert isinstance(find_meter.find_meter(lambda: 0), (HeapMeter, LedgerMeter))
