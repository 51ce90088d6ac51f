"""A torchvision of empty modules, for libraries that import it and use nothing of it here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Attributes(type):
    """Classes whose every attribute is their name's text."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    """Whatever is asked of it is a class that can be derived from, and does nothing."""

    __path__: list[str] = []  # noqa: RUF012 - a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing."""


sys.meta_path.insert(0, _Finder())
