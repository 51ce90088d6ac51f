"""A loader whose position inside an epoch can be saved and put back."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

from lowtide.checkpoint.parts import random_state, set_random_state
from lowtide.checkpoint.tree import loaded_torch

_GENERATORS: Final = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")
"""Where torch's loaders keep generators of their own."""


@final
class Batches:
    """Wraps a data loader, or anything that can be iterated again: put it among the parts of a checkpoint.

    An epoch that goes on after a restart begins with the generators as they were when it began, passes over the batches that
    were given before (their indices only, where torch loads in this process; else the batches themselves are made again, so
    that workers draw the same random numbers), and goes on with the generators as they were saved.

    Not exact: a sampler that draws from the *global* generators at each index, and loaders with ``persistent_workers`` whose
    workers draw random numbers (a warning says so).
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap a loader."""
        self.loader = loader
        self._given = 0
        self._inside = False
        self._began: Mapping[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None
        if getattr(loader, "persistent_workers", False):
            warnings.warn(
                "persistent_workers carry their random numbers from epoch to epoch: an epoch that goes on after a restart is "
                "exact only if workers draw none",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """An epoch, or the rest of the one that was saved."""
        saved, self._saved = self._saved, None
        self._inside = True
        if saved is None:
            self._given, self._began = 0, self._generators()
            found = iter(self.loader)
        else:
            self._given, self._began = saved["given"], saved["began"]
            self._set_generators(self._began)
            found = iter(self.loader)
            _skip(found, self._given)
            self._set_generators(saved["now"])
        for batch in found:
            self._given += 1
            yield batch
        self._given, self._inside = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        if self._saved is not None:  # nothing was read since the last restart
            return dict(self._saved)
        if not self._inside:
            return {"inside": False, "own": self._own()}
        return {"inside": True, "given": self._given, "began": dict(self._began), "now": self._generators()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there when iterated next."""
        self._inside = False
        self._saved = state if state["inside"] else None
        if not state["inside"]:
            self._set_own(state["own"])

    def _generators(self) -> dict[str, Any]:
        return {"global": random_state(), "own": self._own()}

    def _set_generators(self, state: Mapping[str, Any]) -> None:
        set_random_state(state["global"])
        self._set_own(state["own"])

    def _own(self) -> dict[str, Any]:
        found = {path: _at(self.loader, path) for path in _GENERATORS}
        return {path: generator.get_state() for path, generator in found.items() if generator is not None}

    def _set_own(self, states: Mapping[str, Any]) -> None:
        for path, state in states.items():
            generator = _at(self.loader, path)
            if generator is not None:
                generator.set_state(state)


def _at(loader: Any, path: str) -> Any:
    for name in path.split("."):
        loader = getattr(loader, name, None)
    return loader if hasattr(loader, "get_state") else None


def _skip(batches: Iterator[Any], count: int) -> None:
    """Pass over batches: by their indices where nothing is loaded ahead, by making them again otherwise."""
    sampler = getattr(batches, "_sampler_iter", None)
    if sampler is not None and not getattr(batches, "_num_workers", 0) and _map_style(batches):
        found = sum(1 for _ in itertools.islice(sampler, count))
        batches._num_yielded = count  # type: ignore[attr-defined]
    else:
        found = sum(1 for _ in itertools.islice(batches, count))
    if found != count:
        warnings.warn(f"the loader gave {found} batches where {count} were passed over: its data have changed", stacklevel=3)


def _map_style(batches: Any) -> bool:
    return bool(batches._dataset_kind == loaded_torch().utils.data._DatasetKind.Map)
