"""Inspects the script's own frames: which line is running, and which variables hold a tensor."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MemberDescriptorType
from typing import Any, Final

import torch
from lowtide.base.package import PACKAGE

_HIDDEN: Final = (str(Path(torch.__file__).parent) + os.sep, str(PACKAGE) + os.sep, "<frozen", "<string>")
_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep
"""Folder of Python's standard library; other packages may be installed below it (``site-packages``)."""
_DEPTH: Final = 3
"""Levels of nested containers that are searched."""
_WIDTH: Final = 256
"""Elements of one container that are searched, at most."""
_MODULES: Final = 2048
"""Submodules of a model that are searched, at most."""
_FUNCTION: Final = 0x1
"""``CO_OPTIMIZED``: flag of a function's code; ``f_locals`` of its frame is a copy."""

_visible: dict[CodeType, bool] = {}


def _is_visible(code: CodeType) -> bool:
    found = _visible.get(code)
    if found is None:
        name = code.co_filename
        library = name.startswith(_LIBRARY) and "-packages" not in name[len(_LIBRARY) :]
        found = _visible[code] = not (library or name.startswith(_HIDDEN))
    return found


def user_line(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost line outside torch, Lowtide and Python's standard library, with its code; None if there is none."""
    while frame is not None:
        code = frame.f_code
        if _is_visible(code):
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def holders(frame: FrameType | None) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors that variables of the script's frames hold, innermost frame first, each with "name (file:line in function)".

    The line is that of the last assignment to the name up to the running line.
    """
    seen: set[int] = set()
    while frame is not None:
        code = frame.f_code
        if _is_visible(code) and "site-packages" not in code.co_filename:
            found = frame.f_locals
            items = list(found.items())
            if code.co_flags & _FUNCTION and type(found) is dict:
                found.clear()  # up to Python 3.12 the frame would keep this copy and what it refers to
            for name, value in items:
                for tensor, suffix in _tensors(value, "", 0, seen):
                    line = _assigned(code, name, frame.f_lineno)
                    yield tensor, f"{name}{suffix} ({Path(code.co_filename).name}:{line} in {code.co_name})"
            del items, found
        frame = frame.f_back


def _tensors(value: Any, suffix: str, depth: int, seen: set[int]) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors in a variable's value: in containers, closures, and attributes of the script's own objects and modules."""
    if issubclass(type(value), torch.Tensor):
        yield value, suffix
        return
    if depth >= _DEPTH or id(value) in seen:
        return
    for item, name in _parts(value):
        seen.add(id(value))
        yield from _tensors(item, f"{suffix}{name}", depth + 1, seen)


def _parts(value: Any) -> Iterator[tuple[Any, str]]:
    """Objects that a value refers to, each with the suffix that the script would write; runs no code of the script."""
    kind = type(value)  # isinstance could run the object's `__class__`
    if issubclass(kind, dict):
        for key in list(value)[:_WIDTH]:
            yield value[key], f"[{key!r}]"
    elif issubclass(kind, (list, tuple, deque)):
        for i, item in enumerate(islice(value, _WIDTH)):
            yield item, f"[{i}]"
    elif issubclass(kind, torch.nn.Module):
        for path, module in islice(value.named_modules(), _MODULES):
            if _is_scripts(type(module).__module__):
                prefix = f".{path}." if path else "."
                yield from ((x, prefix + name) for name, x in list(vars(module).items()) if not name.startswith("_"))
    elif issubclass(kind, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents, f" (its {name})"
    elif _is_scripts(kind.__module__):
        with contextlib.suppress(AttributeError):
            yield from ((x, f".{name}") for name, x in list(object.__getattribute__(value, "__dict__").items())[:_WIDTH])
        for name, slot in _slots(kind):
            with contextlib.suppress(AttributeError):
                yield slot.__get__(value), f".{name}"


@cache
def _is_scripts(module: str) -> bool:
    """Whether the module of this name is one of the script's own files."""
    if module == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool(file) and "-packages" not in file and not file.startswith((_LIBRARY, *_HIDDEN))


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    every = (item for base in reversed(kind.__mro__) for item in vars(base).items())
    return ((name, x) for name, x in every if isinstance(x, MemberDescriptorType))


@cache
def _assignments(filename: str) -> dict[str, list[int]]:
    """The lines of a file at which each name is assigned; empty if the file cannot be read or parsed."""
    found: dict[str, list[int]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(node.lineno)
    return found


@cache
def _assigned(code: CodeType, name: str, line: int) -> int:
    """The last line of a function, up to ``line``, that assigns a name.

    If there is none, the last assignment after it; if there is none either, the function's first line.
    """
    first = code.co_firstlineno
    lines = [n for n in _assignments(code.co_filename).get(name, ()) if first <= n]
    before = [n for n in lines if n <= line]
    return max(before, default=max(lines, default=first))
