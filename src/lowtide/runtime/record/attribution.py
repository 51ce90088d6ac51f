"""Attributes operators to modules and source lines; in backward, to those of the operator whose gradient they make."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, final

import torch
from lowtide.base.trace import Phase
from lowtide.recording.file_format import BY_ZERO, COMPILED
from lowtide.runtime.intercept.phases import PhaseTracker
from lowtide.runtime.intercept.script_frames import user_line
from lowtide.runtime.record.recording_state import RecordingState
from lowtide.runtime.record.roles import RoleBook

COMPILED_NODE: Final = "CompiledFunctionBackward"
"""Type name of the autograd node that ``torch.compile`` creates for a region (``torch/_functorch/_aot_autograd``)."""
MOST_NODES: Final = 64
"""Maximum number of autograd nodes created for one operator; what is recorded as one operator may create several."""
_TO_ZERO: Final = {torch.ops.aten.mul_.Tensor, torch.ops.aten.fill_.Scalar, torch.ops.aten._foreach_mul_.Scalar}
"""Operators by which scripts zero gradients by hand, if their argument is the number 0."""


@final
class Attribution:
    """Finds the origin (name, module, source line) of operators; one per recorder."""

    def __init__(self, state: RecordingState, clock: PhaseTracker, roles: RoleBook) -> None:
        """Start with no operator seen."""
        self._state, self._clock, self._roles = state, clock, roles
        self._names: dict[Any, int] = {}
        self._lines: dict[tuple[CodeType, int], int] = {}
        self._sequence = 0
        self._origin: dict[int, tuple[int, int]] = {}
        self._last = (0, 0)
        self._compiled = False

    def step_begins(self) -> None:
        """Forget the autograd nodes of the previous step."""
        self._origin.clear()

    def compiled_region_seen(self) -> None:
        """Note that from here on, operators in a backward may belong to a compiled region."""
        self._compiled = True

    def name_of(self, func: Any, args: Any) -> int:
        """Name id of an operator.

        An operator called by the backward of a compiled region has ``COMPILED`` as its prefix; one that zeroes by a factor or
        fill of 0 has ``BY_ZERO`` as its suffix.
        """
        key = (BY_ZERO, func) if func in _TO_ZERO and type(args[1]) in (int, float) and not args[1] else func
        if self._compiled and self._state.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            if node is not None and type(node).__name__ == COMPILED_NODE:
                key = COMPILED, func
        op = self._names.get(key)
        if op is None:
            name = str(func) if key is func else f"{func}{BY_ZERO}" if key[0] is BY_ZERO else f"{COMPILED}: {func}"
            op = self._names[key] = self._state.writer.name(name)
        return op

    def where(self, node: Any = None) -> tuple[int, int]:
        """Name ids of the module and source line of the operator that is about to run.

        In backward they are those of the forward operator whose gradient it computes; for the node that accumulates a
        parameter's gradient, the parameter's module.

        Args:
            node: the autograd node that runs; by default, in backward outside any module, the engine's current one.
        """
        path = self._clock.path()
        if node is None and self._state.phase is Phase.BACKWARD and not path:
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is None:
                self._last = self._origin.get(node._sequence_nr(), self._last)
                if self._clock.differentiable:
                    self.note_origin(*self._last)
                return self._last
            name = self._roles.name_of(parameter).rpartition(".")[0]
            return (self._state.writer.name(name) if name else self._last[0]), self._last[1]
        module, source = self._state.writer.name(path), self._line()
        self.note_origin(module, source)
        return module, source

    def note_origin(self, module: int, source: int) -> None:
        """Attribute the autograd nodes created since the last call to the operator that is about to run."""
        sequence = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if sequence != self._sequence:
            for number in range(max(self._sequence, sequence - MOST_NODES), sequence):
                self._origin[number] = module, source
            self._sequence = sequence

    def _line(self) -> int:
        frame: FrameType | None = sys._getframe(4)
        found = user_line(frame)
        if found is None:
            return 0
        line = self._lines.get(found)
        if line is None:
            code, number = found
            line = self._lines[found] = self._state.writer.name(f"{_short(code.co_filename)}:{number} in {code.co_name}")
        return line


def _short(filename: str) -> str:
    """A path relative to the longest entry of ``sys.path`` that contains it; if none does, an absolute path's file name."""
    for root in sorted((p for p in sys.path if p), key=len, reverse=True):
        if filename.startswith(root + os.sep):
            return filename[len(root) + 1 :]
    return Path(filename).name if filename.startswith(os.sep) else filename
