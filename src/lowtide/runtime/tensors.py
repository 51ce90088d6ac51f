"""Gradients, storages and nested tensors of modules and optimizers, and running operators below autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

import torch

GRAD: Any = torch._C.TensorBase.grad
"""torch's own property, whatever stands in its place on ``Parameter``."""
_GRAD_FN: Any = torch._C.TensorBase.grad_fn


def on_storage(tensor: torch.Tensor) -> bool:
    """Whether a storage and view metadata (including lazy conjugation and negation) describe a tensor completely."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()  # a zero tangent of forward mode has no bytes
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are exactly those in its storage: a view, neither conjugated nor negated lazily."""
    return on_storage(tensor) and not tensor.is_conj() and not tensor.is_neg()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a contiguous range of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@final
class beneath_autograd:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Run operators at the level where a dispatch mode sees them: no autograd, no autocast, no dispatch mode.

    Nor inference mode, whose tensors could never be written outside it.
    """

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        """Exclude the dispatch keys, by guards that :meth:`__exit__` lifts in reverse order."""
        guards = (
            torch._C._DisableTorchDispatch(),  # type: ignore[attr-defined]
            torch._C._DisableAutocast(),
            torch._C._AutoDispatchBelowAutograd(),  # type: ignore[attr-defined]
        )
        infers = torch.is_inference_mode_enabled()
        self._guards = (torch._C._InferenceMode(False), *guards) if infers else guards  # type: ignore[attr-defined]
        for guard in self._guards:
            guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Include the dispatch keys again."""
        for guard in reversed(self._guards):
            guard.__exit__(*error)


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's gradient, read by torch's own getter, past any property in place of ``Parameter.grad``.

    Returns None for a tensor that is not a leaf and does not retain its gradient: there torch warns on reading.
    """
    if not tensor.is_leaf and not tensor.retains_grad:
        return None
    found: torch.Tensor | None = GRAD.__get__(tensor)
    return found


def states_of(optimizer: Any) -> dict[Any, Any]:
    """An optimizer's states by parameter, as they are, past any property in place of ``Optimizer.state``.

    Empty if the optimizer has no such attribute of its own.
    """
    found = vars(optimizer).get("state")
    return found if isinstance(found, dict) else {}


def node_of(tensor: torch.Tensor) -> Any:
    """The autograd node that made a tensor, or None; read by torch's own getter, past a wrapper of ``Tensor.grad_fn``."""
    return _GRAD_FN.__get__(tensor)


def nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """All nodes of the graphs behind some of their nodes, these included, each once; None among them is skipped."""
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack += [following for following, _ in node.next_functions if following not in seen]


def is_hooked(parameter: torch.Tensor, is_ours: Callable[[Any], bool]) -> bool:
    """Whether a parameter has a hook that runs in backward, apart from Lowtide's own (``is_ours``)."""
    after = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or any(not is_ours(hook) for hook in (after or {}).values())


def with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, followed by their gradients."""
    return [*tensors, *(g for t in tensors if (g := grad_of(t)) is not None)]


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of tensors, each once, by address; tensors without a storage, such as sparse ones, are skipped.

    For a wrapper (a ``DTensor``) these are the storages of its inner tensors: its own has the full size and no memory.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__"):
            wrapper: Any = tensor
            names, _ = wrapper.__tensor_flatten__()
            found |= storages_of(tensors_in([getattr(wrapper, name) for name in names]))  # the names may include a mesh
            continue
        if isinstance(tensor, UninitializedTensorMixin):
            continue  # a lazy module's parameter before the first call: it has no storage to ask for
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            continue
        found[storage._cdata] = storage
    return found


def tensors_so_far() -> list[torch.Tensor]:
    """All tensors, of any type, that Python's garbage collector tracks now."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def tensors_in(state: Any) -> list[torch.Tensor]:
    """Tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for s in state.values() for t in tensors_in(s)]
    if isinstance(state, (list, tuple)):
        return [t for s in state for t in tensors_in(s)]
    return []


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and its submodules, each once: like ``modules()``, but several times as fast, as that builds names too."""
    found: dict[int, torch.nn.Module] = {id(root): root}
    stack = [root]
    while stack:
        for module in stack.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                stack.append(module)
    return list(found.values())


def own_tensors(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The modules' own parameters and buffers; shared ones may occur several times."""
    for module in modules:
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
