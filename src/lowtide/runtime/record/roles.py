"""Recognises blocks as parameters, buffers, gradients, optimizer states or inputs, as modules and optimizers run."""

from __future__ import annotations

import gc
import weakref
from typing import Any, final

from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

import torch
from lowtide.base.trace import Phase
from lowtide.recording.file_format import PHASES, EntryKind, Role
from lowtide.runtime.record.block_table import BlockTable
from lowtide.runtime.record.recording_state import RecordingState
from lowtide.runtime.tensors import grad_of, tensors_in


@final
class _Names:
    """Names of parameters, looked up by identity because ``==`` on tensors compares elements."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def put(self, parameter: torch.Tensor, name: str) -> str:
        self._found[id(parameter)] = weakref.ref(parameter), name
        return name

    def get(self, parameter: torch.Tensor) -> str:
        ref, name = self._found.get(id(parameter), (None, ""))
        return name if ref is not None and ref() is parameter else ""

    def items(self) -> list[tuple[torch.Tensor, str]]:
        return [(p, name) for ref, name in self._found.values() if (p := ref()) is not None]


@final
class RoleBook:
    """Recognises the roles of a recorder's blocks; one per recorder.

    Attributes:
        roots: modules that were called from outside any module.
        optimizers: optimizers that existed when the first root was called, or have stepped since.
    """

    def __init__(self, state: RecordingState, blocks: BlockTable) -> None:
        """Start with no role recognised."""
        self._state, self._blocks = state, blocks
        self.roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parameters = _Names()

    def name_of(self, parameter: torch.Tensor) -> str:
        """Name of a parameter of a model that was called, or of an optimizer that stepped; empty for any other tensor."""
        return self._parameters.get(parameter)

    def trains(self, optimizer: Any) -> bool:
        """Whether an optimizer has parameters of a model that was called."""
        return any(self._parameters.get(p) for group in optimizer.param_groups for p in group["params"])

    def recognise(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        """Give a tensor's blocks a role, unless they have one that ranks higher (a lower number).

        Only blocks that appeared in the data phase can become inputs.
        """
        for block in self._blocks.all_of(tensor):
            if role is Role.INPUT and PHASES[block.phase] is not Phase.DATA:
                continue
            if block.role < 0 or role < block.role:
                block.role, block.name = role, self._state.writer.name(name)
                self._state.write(EntryKind.ROLE, block.number, block.name, flags=role)

    def _recognise_gradient(self, parameter: torch.Tensor, name: str) -> None:
        if (grad := grad_of(parameter)) is not None:
            self.recognise(grad, Role.GRADIENT, f"{name}.grad")

    def meet(self, root: torch.nn.Module) -> None:
        """Recognise the tensors of a module that is called from outside any module for the first time."""
        if not any(isinstance(t, UninitializedTensorMixin) for t in (*root.parameters(), *root.buffers())):
            self.roots.add(root)  # otherwise it is met again, once they are initialized
        kind = type(root).__name__
        for name, parameter in root.named_parameters():
            self._parameters.put(parameter, f"{kind}.{name}")
        if self._state.operators:
            for name, parameter in root.named_parameters():
                self.recognise(parameter, Role.PARAMETER, f"{kind}.{name}")
                self._recognise_gradient(parameter, f"{kind}.{name}")
            for name, buffer in root.named_buffers():
                self.recognise(buffer, Role.BUFFER, f"{kind}.{name}")
            for optimizer in self.optimizers:  # if training began before the recording
                self.recognise_states(optimizer)

    def recognise_all(self) -> None:
        """Look up what the script's modules and optimizers hold, after it failed before hooks could report that."""
        found = [o for o in gc.get_objects() if issubclass(type(o), (torch.nn.Module, torch.optim.Optimizer))]
        modules = [m for m in found if isinstance(m, torch.nn.Module) and "_modules" in vars(m)]  # some are half constructed
        inner = {id(child) for m in modules for child in m.children()}
        seen: set[Any] = {_shapes_of(m) for m in self.roots}
        for module in modules:
            if id(module) not in inner and module not in self.roots and _shapes_of(module) not in seen:
                seen.add(_shapes_of(module))  # a second one with the same shapes is a copy; without roles it shows as one
                self.meet(module)
        for optimizer in found:
            if isinstance(optimizer, torch.optim.Optimizer):
                self.recognise_states(optimizer)

    def recognise_gradients(self) -> None:
        """Recognise the gradients of known parameters, after a backward."""
        for parameter, name in self._parameters.items():
            self._recognise_gradient(parameter, name)

    def recognise_updated(self, optimizer: Any) -> None:
        """Recognise the parameters and gradients of an optimizer that is about to step."""
        for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = self._parameters.get(parameter) or self._parameters.put(parameter, f"parameter {i}")
            self.recognise(parameter, Role.PARAMETER, name)
            self._recognise_gradient(parameter, name)

    def recognise_states(self, optimizer: Any) -> None:
        """Recognise the states of an optimizer that has stepped, perhaps before the recording."""
        kind = type(optimizer).__name__
        for parameter, state in optimizer.state.items():
            name = self._parameters.get(parameter) if isinstance(parameter, torch.Tensor) else ""
            for key, value in state.items() if isinstance(state, dict) else ():
                for tensor in tensors_in(value):
                    self.recognise(tensor, Role.OPTIMIZER_STATE, f"{kind} {key} of {name}")


def _shapes_of(module: torch.nn.Module) -> tuple[Any, ...]:
    return tuple((p.dtype, p.size()) for p in module.parameters())
