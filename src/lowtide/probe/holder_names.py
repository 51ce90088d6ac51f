"""Names what holds an object, in the words of the script: a variable, an attribute, a closure."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import sys
import types
from typing import Any, Final

DEPTH: Final = 7
"""Levels of referrers above an object in which its holder is sought."""
HERE: Final = os.path.dirname(os.path.abspath(__file__))
WIDTH: Final = 400
"""Most referrers followed on each level."""




def holder_of(thing: Any) -> str:
    """The path to an object from a name; empty if none is found.

    Examples: ``__main__.kept``, ``Model.cache``, ``losses (local of main, train.py:12)``.
    """
    named = _name(thing)
    if named:
        return named
    locals_ = _locals()
    level: dict[int, tuple[Any, str]] = {id(thing): (thing, "")}
    seen = {id(thing)}
    for _ in range(DEPTH):
        for key, (_, tail) in level.items():
            if key in locals_:
                return _with(locals_[key], tail)
        found = gc.get_referrers(*(o for o, _ in level.values()))
        seen.update((id(found), id(level), id(locals_)))
        following: dict[int, tuple[Any, str]] = {}
        for referrer in found:
            if id(referrer) in seen or len(following) >= WIDTH:
                continue
            for held, tail in list(level.values()):
                way = _way(referrer, held)
                if way is None:
                    continue
                kind, text = way
                if kind == "name":
                    return _with(text, tail)
                seen.add(id(referrer))
                following[id(referrer)] = (referrer, text + tail)
                break
        level = following
        if not level:
            break
    return ""


def _with(name: str, tail: str) -> str:
    """Append the path from a name to that name, before any remark in parentheses."""
    head, bracket, rest = name.partition(" (")
    return head + tail + bracket + rest


def _locals() -> dict[int, str]:
    """Local variables of all running functions, keyed by the ``id`` of their value."""
    found: dict[int, str] = {}
    for frame in sys._current_frames().values():
        at: types.FrameType | None = frame
        while at is not None:
            code = at.f_code
            if not code.co_filename.startswith(HERE) and code.co_name != "<module>":
                where = f"{os.path.basename(code.co_filename)}:{at.f_lineno}"
                for name, value in at.f_locals.items():
                    found.setdefault(id(value), f"{name} (local of {code.co_name}, {where})")
            at = at.f_back
    return found


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if type(thing) is functools._lru_cache_wrapper else ""


def _way(referrer: Any, held: Any) -> tuple[str, str] | None:
    """How one object holds another; None if that says nothing.

    ``("name", ...)`` names the holder; ``("part", ...)`` is a step of the path, whose own holder is to be found.
    """
    if isinstance(referrer, types.FrameType):
        return None
    if isinstance(referrer, dict):
        key = next((k for k, v in list(referrer.items()) if v is held), None)
        module = referrer.get("__name__") if "__builtins__" in referrer or "__spec__" in referrer else None
        if isinstance(module, str) and isinstance(key, str):
            return "name", f"{module}.{key}"
        return ("part", f".{key}") if isinstance(key, str) and key.isidentifier() else ("part", "[...]")
    if isinstance(referrer, types.CellType):
        return "part", ""
    if isinstance(referrer, types.FunctionType):
        names = dict(zip(referrer.__code__.co_freevars, referrer.__closure__ or (), strict=False))
        name = next((n for n, cell in names.items() if cell is held), None)
        return None if name is None else ("name", f"{name} (closure of {referrer.__qualname__})")
    if isinstance(referrer, (list, tuple, set, frozenset, collections.deque)):
        return "part", "[...]"
    attributes = getattr(type(referrer), "__module__", "") not in ("builtins", "_thread")
    if attributes and not isinstance(referrer, type):
        name = next((n for n, v in _attributes(referrer) if v is held), None)
        return None if name is None else ("name", f"{type(referrer).__qualname__}.{name}")
    return None


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    with contextlib.suppress(Exception):  # an object may run any code when its attributes are read
        return list(vars(thing).items())
    return []
