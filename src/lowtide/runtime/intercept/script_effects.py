"""Finds out whether running a function of the script a second time changes anything besides its result.

The Python code that runs within a function is watched once. What that code can reach without arguments is then compared before
and after another run: the globals of its modules, the attributes of the objects whose methods it calls, and the variables of
enclosing functions. Random generators of Python and NumPy are compared, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from lowtide.runtime.device.accelerator import default_generators
from lowtide.runtime.storage.value import state_bytes
from lowtide.runtime.tensors import beneath_autograd, on_storage

_SCALARS: Final = (int, float, complex, bool, str, bytes, type(None))
_CONSTANTS: Final = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_LIBRARIES: Final = frozenset({*sys.stdlib_module_names, "torch"}) - {"__main__"}
"""Packages whose own state does not matter; of their methods' objects, only modules of the script's models do."""
_SKIPPED: Final = _LIBRARIES | {"lowtide"}
_MOST: Final = (1024, 256, 64, 16)
"""Items of a container that are compared one by one, by the number of containers around it; of a larger one, and of one in
more containers, only the number of items is compared."""
_MOST_BYTES: Final = 1 << 20
"""Bytes of a NumPy array that are compared."""


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


@final
@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of the random generators that `torch.utils.checkpoint` does not restore.

    Example:
        >>> before = RandomStates.now()
        >>> _ = random.random()
        >>> before == RandomStates.now()
        False
        >>> before.restore()
        >>> before == RandomStates.now()
        True
    """

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomStates:
        """The states now; NumPy's only if the script can have used it."""
        numpy = sys.modules.get("numpy.random")
        found = None if numpy is None else numpy.get_state()
        return cls(random.getstate(), found and (found[0], found[1].tobytes(), *found[2:]))

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            numpy: Any = sys.modules["numpy"]
            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def torch_states() -> tuple[bytes, ...]:
    """The states of torch's own generators."""
    return tuple(map(state_bytes, default_generators()))


def restore_torch(states: tuple[bytes, ...]) -> None:
    """Set torch's own generators to states that :func:`torch_states` returned."""
    for generator, state in zip(default_generators(), states, strict=False):  # a device may have been initialized since
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@final
class Footprint:
    """What the Python code of a function reaches besides its arguments.

    Attributes:
        is_complete: whether all of it could be found; not while the script profiles itself.
        varies: whether a variable of an enclosing function was assigned.
    """

    def __init__(self) -> None:
        """Start with nothing found."""
        self.is_complete = True
        self.varies = False
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._objects: dict[int, weakref.ref[Any]] = {}
        self._outer: list[tuple[Any, ...]] = []
        self._collectors: frozenset[Any] = frozenset()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the Python functions that are called."""
        if sys.getprofile() is not None:
            self.is_complete = False
            yield
            return
        self._collectors = frozenset(getattr(callback, "__code__", None) for callback in gc.callbacks)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.varies |= bool(self._outer)

    def _event(self, frame: types.FrameType, event: str, _: Any) -> None:
        package = _package(frame.f_globals.get("__name__"))
        code, of_library = frame.f_code, package in _LIBRARIES
        if event not in ("call", "return") or package == "lowtide" or code in self._collectors:
            return
        if event == "call":
            if not of_library:
                self._namespaces[id(frame.f_globals)] = frame.f_globals
            if code.co_argcount:
                self._meet(frame.f_locals.get(code.co_varnames[0]), of_library=of_library)
        if code.co_freevars and not of_library:
            self._compare_outer(frame, event)

    def _compare_outer(self, frame: types.FrameType, event: str) -> None:
        """Compare the enclosing functions' variables at a function's end with those at its beginning."""
        names, found = frame.f_code.co_freevars, frame.f_locals
        now = tuple(_print(found.get(name), 0) for name in names)
        if event == "call":
            self._outer.append((frame.f_code, now))
        elif self._outer and self._outer[-1][0] is frame.f_code:
            _, before = self._outer.pop()
            self.varies |= _differ(before, now, exact=False)

    def _meet(self, owner: Any, *, of_library: bool) -> None:
        kind = type(owner)
        if issubclass(kind, (*_SCALARS, tuple, torch.Tensor, *_CONSTANTS)):
            return
        if not issubclass(kind, torch.nn.Module) and (of_library or _package(kind.__module__) == "lowtide"):
            return
        try:
            self._objects[id(owner)] = weakref.ref(owner)
        except TypeError:
            self.is_complete &= issubclass(kind, (dict, list, set)) or not hasattr(kind, "__slots__")

    def modules(self) -> list[torch.nn.Module]:
        """The modules among the objects, as far as they are alive."""
        return [o for ref in self._objects.values() if isinstance(o := ref(), torch.nn.Module)]

    def prints(self) -> dict[Any, Any]:
        """What is reachable, in a form that :func:`changed` compares."""
        found: dict[Any, Any] = {}
        for place, namespace in self._namespaces.items():
            found[place] = {
                name: _print(item, 1) for name, item in list(namespace.items())
            }
        for place, ref in self._objects.items():
            if (owner := ref()) is not None:
                found[place] = _print_of_object(owner, 0), tuple(_print_of_class(kind, 1) for kind in type(owner).__mro__)
        return found


def changed(before: dict[Any, Any], after: dict[Any, Any], *, exact: bool) -> bool:
    """Whether two results of :meth:`Footprint.prints` differ.

    Args:
        before: the earlier one.
        after: the later one.
        exact: whether another tensor with the same bits is a difference, because it may have another graph.
    """
    common = before.keys() & after.keys()  # an object that died in between can change nothing any more
    return any(_differ(before[place], after[place], exact=exact) for place in common)


def prints_of(items: Any) -> Any:
    """Arguments, in a form that :func:`differ` compares."""
    return _print(items, 0)


def differ(before: Any, after: Any) -> bool:
    """Whether two results of :func:`prints_of` differ."""
    return _differ(before, after, exact=True)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _TensorPrint:
    """A tensor, and the number of writes to it so far."""

    tensor: torch.Tensor
    version: int

    def differs(self, other: _TensorPrint, *, exact: bool) -> bool:
        if self.tensor is other.tensor:
            return self.version != other.version
        return exact or not same_bits(self.tensor, other.tensor)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same elements, bit by bit; False also where that cannot be told."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if not (on_storage(one) and on_storage(other)) or one.is_meta:
        return False
    with beneath_autograd(), torch.no_grad():
        bytes_of_one, bytes_of_other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        return bool(torch.equal(bytes_of_one, bytes_of_other))


def _print(item: Any, depth: int) -> Any:
    """One item, in a form that :func:`_differ` compares; ``depth`` is the number of containers and objects around it."""
    kind = type(item)  # asking the item itself for its class may run code of the script
    if issubclass(kind, _SCALARS):
        return repr(item) if issubclass(kind, (float, complex)) else item
    if issubclass(kind, torch.Tensor):
        return _TensorPrint(item, 0 if item.is_inference() else item._version)
    if issubclass(kind, torch.Generator):
        return state_bytes(item)
    if issubclass(kind, random.Random):
        return item.getstate()
    if depth >= len(_MOST):
        return id(item)
    if issubclass(kind, _CONSTANTS):
        return id(item), _print_of_constant(item, kind, depth)
    if kind.__module__ in ("itertools", "_contextvars"):
        return _print(item.get(None), depth + 1) if issubclass(kind, contextvars.ContextVar) else repr(item)
    if issubclass(kind, types.GeneratorType):
        return id(item), getattr(item.gi_frame, "f_lasti", -1)
    if str(kind.__module__).partition(".")[0] == "numpy":
        return _print_of_numpy(item)
    if issubclass(kind, (dict, list, tuple, set, frozenset, deque)):
        if len(item) > _MOST[depth]:
            return id(item), len(item)
        if issubclass(kind, dict):
            return tuple((_print(k, depth + 1), _print(v, depth + 1)) for k, v in list(item.items()))
        return tuple(_print(element, depth + 1) for element in list(item))
    return _print_of_object(item, depth)


def _print_of_object(owner: Any, depth: int) -> Any:
    try:
        attributes = vars(owner) if type(owner) is threading.local else object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return id(owner)
    return id(owner), tuple((name, _print(item, depth + 1)) for name, item in list(attributes.items()))


def _print_of_constant(item: Any, kind: type, depth: int) -> Any:
    """What a module, a class or a function of the script holds by itself: numbers, texts and containers."""
    if issubclass(kind, types.FunctionType):
        own = (vars(item), item.__defaults__, item.__kwdefaults__)
        return tuple(_print(part, depth + 1) for part in own if part)
    if issubclass(kind, type):
        return _print_of_class(item, depth)
    if issubclass(kind, types.ModuleType) and _package(item.__name__) not in _SKIPPED and not _is_installed(item):
        return _print_of_attributes(item, depth)
    return None


def _print_of_class(kind: type, depth: int) -> Any:
    return None if _package(kind.__module__) in _SKIPPED else _print_of_attributes(kind, depth)


def _print_of_attributes(holder: Any, depth: int) -> Any:
    kept = (*_SCALARS, dict, list, set, deque, types.FunctionType)
    return tuple((n, _print(item, depth + 1)) for n, item in list(vars(holder).items()) if issubclass(type(item), kept))


@functools.cache
def _is_installed(module: types.ModuleType) -> bool:
    """Whether a module is an installed library's: of these, only the globals of the code that runs are compared."""
    return "site-packages" in (getattr(module, "__file__", None) or "")


def _print_of_numpy(item: Any) -> Any:
    if hasattr(item, "bit_generator"):
        return repr(item.bit_generator.state)
    few = getattr(item, "nbytes", _MOST_BYTES + 1) <= _MOST_BYTES
    return (id(item), item.tobytes()) if few else id(item)


def _differ(before: Any, after: Any, *, exact: bool) -> bool:
    if isinstance(before, _TensorPrint) and isinstance(after, _TensorPrint):
        return before.differs(after, exact=exact)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() != after.keys() or any(_differ(before[k], after[k], exact=exact) for k in before)
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) != len(after) or any(_differ(a, b, exact=exact) for a, b in zip(before, after, strict=True))
    return type(before) is not type(after) or bool(before != after)
