"""State that outlives steps: the script's models and optimizers, with their parameters, gradients and states."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from lowtide.runtime.storage.views import bytes_of
from lowtide.runtime.tensors import grad_of, is_hooked, modules_of, own_tensors, states_of, storages_of, tensors_in


@final
class PersistentState:
    """The models and optimizers seen so far.

    Attributes:
        roots: modules that were called from outside any module.
        optimizers: optimizers that have stepped, or updated a parameter within the backward.
    """

    def __init__(self) -> None:
        """Start with no models and no optimizers."""
        self.roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def tensors(self) -> list[torch.Tensor]:
        """All parameters, buffers and optimizer states; a tensor may occur several times."""
        found: list[torch.Tensor] = []
        for root in self.roots:
            found += own_tensors(modules_of(root))
        for optimizer in self.optimizers:
            found += [p for group in optimizer.param_groups for p in group["params"]]
            found += tensors_in(list(states_of(optimizer).values()))
        return found

    def bytes(self, counts: Callable[[torch.UntypedStorage], bool] | None = None) -> int:
        """Bytes of the storages of :meth:`tensors`; where ``counts`` is given, only of those for which it is true."""
        storages = storages_of(self.tensors()).values()
        return sum(s.nbytes() for s in storages if counts is None or counts(s))

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist: of the optimizers' parameters, or of the models' if there are no optimizers."""
        optimized = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        parameters = {id(p): p for p in optimized or own_tensors(m for root in self.roots for m in modules_of(root))}
        return sum(bytes_of(g) for p in parameters.values() if (g := grad_of(p)) is not None)

    def missing_gradient_bytes(self) -> int:
        """Bytes of the gradients that do not exist, of parameters for which a backward makes one."""
        tensors = {id(t): t for t in self.tensors() if t.requires_grad and grad_of(t) is None}
        return sum(bytes_of(t) for t in tensors.values())

    def states(self) -> dict[int, int]:
        """Storages of the optimizer states, by address, with the bytes of each."""
        states = (t for optimizer in self.optimizers for t in tensors_in(list(states_of(optimizer).values())))
        return {where: storage.nbytes() for where, storage in storages_of(states).items()}

    def has_hooks(self, is_ours: Callable[[Any], bool]) -> bool:
        """Whether a parameter or module has a hook that runs in backward, apart from Lowtide's own (``is_ours``)."""
        return any(
            m._backward_hooks or m._backward_pre_hooks
            or any(p is not None and is_hooked(p, is_ours) for p in m._parameters.values())
            for root in self.roots for m in modules_of(root)
        )

