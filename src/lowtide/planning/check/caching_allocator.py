"""The checker's own model of torch's caching allocator: segments are lists that are searched linearly.

It shares only the rules with :mod:`lowtide.planning.solver.caching_allocator`. They are torch's
(``c10/cuda/CUDACachingAllocator.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(eq=False)
class _Piece:
    size: int
    used: bool = False


@dataclass(eq=False)
class Device:
    """A device with a capacity in bytes (None: unlimited) and the segments that torch's allocator has reserved on it."""

    bytes: int | None
    peak: int = 0
    _segments: list[tuple[bool, list[_Piece]]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Reserved bytes: the sum of all segments."""
        return sum(p.size for _, pieces in self._segments for p in pieces)

    def allocate(self, size: int) -> _Piece | None:
        """Allocate a piece of at least ``size`` bytes; None if the device is out of memory."""
        size = max(1, (size + 511) // 512) * 512
        small = size <= _MIB
        fitting = [
            (p.size, s, i) for s, (kind, pieces) in enumerate(self._segments) if kind == small
            for i, p in enumerate(pieces) if not p.used and p.size >= size
        ]
        if fitting:
            _, s, i = min(fitting)
            pieces = self._segments[s][1]
        else:
            whole = 2 * _MIB if small else 20 * _MIB if size < 10 * _MIB else (size + 2 * _MIB - 1) // (2 * _MIB) * 2 * _MIB
            if self.bytes is not None and self.taken + whole > self.bytes:
                self._segments = [(kind, pieces) for kind, pieces in self._segments if len(pieces) > 1 or pieces[0].used]
                if self.taken + whole > self.bytes:
                    return None
            pieces, i = [_Piece(whole)], 0
            self._segments.append((small, pieces))
            self.peak = max(self.peak, self.taken)
        piece = pieces[i]
        left = piece.size - size
        if left >= (512 if small else _MIB + 1):
            piece.size = size
            pieces.insert(i + 1, _Piece(left))
        piece.used = True
        return piece

    def release(self, piece: _Piece) -> None:
        """Free a piece and merge it with its free neighbors."""
        piece.used = False
        for _, pieces in self._segments:
            if piece in pieces:
                joined: list[_Piece] = []
                for p in pieces:
                    if joined and not joined[-1].used and not p.used:
                        joined[-1].size += p.size
                    else:
                        joined.append(p)
                pieces[:] = joined
                return
