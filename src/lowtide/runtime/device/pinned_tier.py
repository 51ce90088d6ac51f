"""An accelerator's second board: pinned host memory, written and read on a stream of its own."""

from __future__ import annotations

from typing import Any, final

import torch
from lowtide.planning.unit.problem import Bandwidth
from lowtide.runtime.device.accelerator import Accelerator
from lowtide.runtime.device.offload import PROBE_BYTES, Ticket, fastest, flat


@final
class PinnedTier:
    """An accelerator's second board: pinned host memory, on a stream of its own.

    A storage that is put is marked as used by the copying stream (``record_stream``), so that the caching allocator gives
    its memory out again only after the copy; a fetch makes the asking stream wait for its copy, which may have begun before.
    """

    overlaps: bool = True

    def __init__(self, device: torch.device) -> None:
        """Make the copying stream."""
        self.accelerator = Accelerator(device)
        self.device = self.accelerator.device
        self.stream: Any = self.accelerator.stream()

    def put(self, storage: torch.UntypedStorage) -> Ticket:
        """Copy to pinned memory without waiting."""
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
        """Bytes per second each way, by copying some megabytes."""
        probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self.device)
        self.accelerator.synchronize()

        def done(_: object) -> None:
            self.accelerator.synchronize()

        # Pinned blocks are recycled by the caching host allocator once their recorded events have passed.
        write = fastest(lambda: done(self.put(probe.untyped_storage())))
        ticket = self.put(probe.untyped_storage())
        done(ticket)
        speed = fastest(lambda: done(ticket.fetch()))
        return Bandwidth(write=write, read=speed, read_fresh=speed)


@final
class _PinnedTicket:
    __slots__ = ("_begun", "_board", "_done", "_host")

    def __init__(self, board: PinnedTier, host: torch.Tensor, done: Any) -> None:
        self._board, self._host, self._done = board, host, done
        self._begun: tuple[torch.Tensor, Any, Any] | None = None

    def begin(self) -> None:
        if self._begun is not None:
            return
        board = self._board
        asking = board.accelerator.current_stream()
        # The block is taken on the asking stream, which may still have work queued on its former contents.
        target = torch.empty(self._host.numel(), dtype=torch.uint8, device=board.device)
        board.stream.wait_stream(asking)
        board.stream.wait_event(self._done)
        with board.accelerator.on(board.stream):
            target.copy_(self._host, non_blocking=True)
            there = board.accelerator.event()
            there.record(board.stream)
        target.record_stream(board.stream)
        self._begun = target, there, asking

    def fetch(self) -> torch.UntypedStorage:
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        (target, there, owner), self._begun = self._begun, None
        asking = self._board.accelerator.current_stream()
        asking.wait_event(there)
        if asking != owner:  # the allocator knows of the stream that took the block alone
            target.record_stream(asking)
        return target.untyped_storage()
