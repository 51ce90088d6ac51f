"""Runs a foreach optimizer's update in slices: its temporaries are as large as all parameters of a call together.

torch's multi-tensor updates take lists and treat each entry independently and element-wise
(``torch/optim/*._multi_tensor_*``). Called on slices of the lists, they give the same bits, with temporaries for one slice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, final

import torch
from lowtide.base.lever_catalogue import SLICES
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.storage.views import bytes_of
from lowtide.runtime.updates.single_update import overlap

_KINDS: Final = ("sgd", "adam", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam")

TEMPORARIES: Final = 3
"""Maximum temporaries of an update, in multiples of the parameters' bytes (measured over all kinds; Adadelta with weight decay
takes this many)."""


SHARES: Final = 8
"""Slices that an update is cut into if there is no budget."""


@final
class SlicedOptimizer:
    """Cuts updates into slices so that they fit.

    Attributes:
        cut: number of updates that were cut.
    """

    def __init__(self, room: Callable[[], int | None]) -> None:
        """Wrap nothing yet.

        Args:
            room: returns the bytes that may be taken now; None without a budget.
        """
        self.cut = 0
        self._room = room
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap torch's multi-tensor updates."""
        for kind in _KINDS:
            module = sys.modules[f"torch.optim.{kind}"]
            self._wraps.put(module, f"_multi_tensor_{kind}", self._sliced)

    def remove(self) -> None:
        """Restore torch's updates."""
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary; empty if nothing was cut."""
        return [LeverFigures(name=SLICES, used=True, text=f"{self.cut} updates were cut into slices")] if self.cut else []

    def _sliced(self, original: Any) -> Any:
        @functools.wraps(original)
        def update(*lists: Any, **settings: Any) -> None:
            room = self._room()
            sizes = [bytes_of(p) for p in lists[0]] if lists and isinstance(lists[0], list) else []
            mixed = any(isinstance(item, list) and None in item and any(x is not None for x in item) for item in lists)
            captured = mixed or bool(settings.get("capturable")) or torch.compiler.is_compiling()
            if room is None:  # asked for without a budget
                room = sum(sizes) * TEMPORARIES // SHARES
            if captured or sum(sizes) * TEMPORARIES <= room or overlap(lists[0]):
                original(*lists, **settings)
                return
            self.cut += 1
            for start, end in _runs(sizes, max(0, room) // TEMPORARIES):
                parts = [item[start:end] if isinstance(item, list) else item for item in lists]
                original(*parts, **settings)
                for item, part in zip(lists, parts, strict=True):
                    if isinstance(item, list) and item:
                        item[start:end] = part  # SGD puts its new momentum buffers into the list

        return update


def _runs(sizes: list[int], most: int) -> list[tuple[int, int]]:
    """Start and end of runs of consecutive entries: each of at most ``most`` bytes, or of one larger entry."""
    runs, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            runs.append((start, i))
            start, total = i, 0
        total += size
    return [*runs, (start, len(sizes))] if sizes else []
