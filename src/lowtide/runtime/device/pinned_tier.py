"""Offload tier of an accelerator: pinned host memory, written and read on a separate stream."""

from __future__ import annotations

from typing import Any, final

import torch
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.device.accelerator import Accelerator
from lowtide.runtime.device.offload import PROBE_BYTES, Ticket, fastest, flat


@final
class PinnedTier:
    """Pinned host memory for one accelerator, with a copy stream of its own.

    :meth:`put` marks the storage as used by the copy stream (``record_stream``), so that the caching allocator reuses its
    memory only after the copy. A fetch makes the requesting stream wait for its copy, which may have been started earlier.
    """

    overlaps: bool = True

    def __init__(self, device: torch.device) -> None:
        """Create the copy stream."""
        self.accelerator = Accelerator(device)
        self.device = self.accelerator.device
        self.stream: Any = self.accelerator.stream()

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Start copying a storage's bytes to pinned memory, without waiting for the copy."""
        source = flat(storage)
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(self.accelerator.current_stream())
        with self.accelerator.on(self.stream):
            host.copy_(source, non_blocking=True)
            done = self.accelerator.event()
            done.record(self.stream)
        source.record_stream(self.stream)
        return _PinnedTicket(self, host, done)

    def measure(self) -> Bandwidth:
        """Bytes per second each way, measured by copying `PROBE_BYTES` several times."""
        probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self.device)
        self.accelerator.synchronize()

        def done(_: object) -> None:
            self.accelerator.synchronize()

        # The caching host allocator reuses pinned blocks once their recorded events have completed.
        write = fastest(lambda: done(self.put(probe.untyped_storage())))
        ticket = self.put(probe.untyped_storage())
        done(ticket)
        speed = fastest(lambda: done(ticket.fetch()))
        return Bandwidth(write=write, read=speed, read_fresh=speed)


@final
class _PinnedTicket:
    __slots__ = ("_begun", "_done", "_host", "_tier")

    def __init__(self, tier: PinnedTier, host: torch.Tensor, done: Any) -> None:
        self._tier, self._host, self._done = tier, host, done
        self._begun: tuple[torch.Tensor, Any, Any] | None = None

    def begin(self) -> None:
        if self._begun is not None:
            return
        tier = self._tier
        asking = tier.accelerator.current_stream()
        # The block is allocated on the requesting stream, which may still have work queued on its former contents.
        target = torch.empty(self._host.numel(), dtype=torch.uint8, device=tier.device)
        tier.stream.wait_stream(asking)
        tier.stream.wait_event(self._done)
        with tier.accelerator.on(tier.stream):
            target.copy_(self._host, non_blocking=True)
            there = tier.accelerator.event()
            there.record(tier.stream)
        target.record_stream(tier.stream)
        self._begun = target, there, asking

    def fetch(self) -> torch.UntypedStorage:
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        (target, there, owner), self._begun = self._begun, None
        asking = self._tier.accelerator.current_stream()
        asking.wait_event(there)
        if asking != owner:  # the allocator knows only the stream on which the block was allocated
            target.record_stream(asking)
        return target.untyped_storage()
