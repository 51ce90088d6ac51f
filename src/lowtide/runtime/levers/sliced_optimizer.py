"""A foreach optimizer's update in slices: its temporaries are as large as all parameters of a call together.

torch's multi-tensor updates take lists and treat each entry by itself, element by element (``torch/optim/*._multi_tensor_*``):
called on parts of the lists they give the same bits, with temporaries of a part.
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

_KINDS: Final = ("sgd", "adam", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "radam")

TEMPORARIES: Final = 3
"""Times the parameters' bytes that an update takes at most: Adadelta with weight decay does (measured over all kinds)."""


SHARES: Final = 8
"""SlicedOptimizer of an update where there is no budget."""


@final
class SlicedOptimizer:
    """Cuts updates so that they fit.

    Attributes:
        cut: how many updates were cut.
    """

    def __init__(self, room: Callable[[], int | None]) -> None:
        """Wrap nothing yet.

        Args:
            room: bytes that may be taken now; None where no budget says.
        """
        self.cut = 0
        self._room = room
        self._wraps = Wraps()

    def install(self) -> None:
        """Wrap the updates of torch that work on lists."""
        for kind in _KINDS:
            module = sys.modules[f"torch.optim.{kind}"]
            self._wraps.put(module, f"_multi_tensor_{kind}", self._sliced)

    def remove(self) -> None:
        """Leave them as they were."""
        self._wraps.undo()

    def figures(self) -> list[LeverFigures]:
        """What became of the lever."""
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
            if captured or sum(sizes) * TEMPORARIES <= room:
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
    """Consecutive entries, each run's bytes at most so many, or one entry."""
    runs, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            runs.append((start, i))
            start, total = i, 0
        total += size
    return [*runs, (start, len(sizes))] if sizes else []
