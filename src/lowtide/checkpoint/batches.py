"""A loader whose position inside an epoch can be saved and put back."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

from lowtide.checkpoint.parts import is_generator, put_back, random_state, set_random_state, state_of
from lowtide.checkpoint.tree import loaded_torch

_PLACES: Final = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")
"""Objects of a loader that may have generators of their own among their attributes, or a position."""
_resumed = False
"""Whether a position was loaded and none has gone on yet: the first that does puts back the generators that all share."""


@final
class Batches:
    """Wraps a data loader, or anything that can be iterated again: put it among the parts of a checkpoint.

    An epoch that goes on after a restart begins with the generators as they were when it began, passes over the batches that
    were given before (their indices only, where torch loads in this process; else the batches themselves are made again, so
    that workers draw the same random numbers), and goes on with the generators as they were saved.

    Generators that the loader, its samplers or its data set have as attributes come along, and so do the positions of
    `Blocks` and of isolated data sets. Not exact: a sampler that draws from the *global* generators at each index, and loaders
    with ``persistent_workers`` whose workers draw random numbers (a warning says so).
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap a loader."""
        self.loader = loader
        self._given = 0
        self._inside = False
        self._began: Mapping[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None
        self._turn = 0
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
        """An epoch, or the rest of the one that was saved. Left before its end, the epoch is over."""
        global _resumed  # noqa: PLW0603 - the generators that it is about are the process's
        saved, self._saved = self._saved, None
        self._turn += 1
        mine, self._inside = self._turn, True
        if saved is None:
            self._given, self._began = 0, self._generators()
            found = iter(self.loader)
        else:
            now = saved["now"]["global"] if _resumed else random_state()
            _resumed = False
            self._given, self._began = saved["given"], saved["began"]
            self._set_generators(self._began)
            found = iter(self.loader)
            read = _skip(found, self._given)
            # what was read again stands where it stood by itself
            self._set_generators({**saved["now"], "global": now, **({"inner": {}} if read else {})})
        try:
            for batch in found:
                self._given += 1
                yield batch
        finally:
            if mine == self._turn:
                self._given, self._inside = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands."""
        if self._saved is not None:  # nothing was read since the last restart
            return dict(self._saved)
        if not self._inside:
            return {"inside": False, "own": self._own(), "inner": self._inner()}
        return {"inside": True, "given": self._given, "began": dict(self._began), "now": self._generators()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there when iterated next."""
        global _resumed  # noqa: PLW0603 - as above
        self._turn += 1
        self._inside = False
        self._saved = state if state["inside"] else None
        _resumed = _resumed or bool(state["inside"])
        if not state["inside"]:
            self._set_own(state["own"])
            self._set_inner(state["inner"])

    def _generators(self) -> dict[str, Any]:
        return {"global": random_state(), "own": self._own(), "inner": self._inner()}

    def _set_generators(self, state: Mapping[str, Any]) -> None:
        set_random_state(state["global"])
        self._set_own(state["own"])
        self._set_inner(state["inner"])

    def _places(self) -> Iterator[tuple[str, Any]]:
        """The loader and what it is made of, each once."""
        seen: set[int] = set()
        for path in _PLACES:
            found: Any = self.loader
            for name in filter(None, path.split(".")):
                found = getattr(found, name, None)
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                yield path, found

    def _own(self) -> dict[str, Any]:
        """The states of generators that the loader has of its own."""
        return {
            f"{path}.{name}": state_of(value, name)
            for path, place in self._places()
            for name, value in getattr(place, "__dict__", {}).items()
            if is_generator(value)
        }

    def _set_own(self, states: Mapping[str, Any]) -> None:
        for path, place in self._places():
            for name, value in getattr(place, "__dict__", {}).items():
                if f"{path}.{name}" in states:
                    put_back(value, states[f"{path}.{name}"], name)

    def _inner(self) -> dict[str, Any]:
        """The positions of what the loader reads from, where that has one."""
        return {path: dict(place.state_dict()) for path, place in self._places() if hasattr(place, "load_state_dict")}

    def _set_inner(self, states: Mapping[str, Any]) -> None:
        for path, place in self._places():
            if path in states:
                place.load_state_dict(states[path])


def _skip(batches: Iterator[Any], count: int) -> bool:
    """Pass over batches: by their indices where nothing is loaded ahead, by making them again otherwise; whether they were."""
    sampler = getattr(batches, "_sampler_iter", None)
    indices = sampler is not None and not getattr(batches, "_num_workers", 0) and _map_style(batches)
    if sampler is not None and indices:
        found = sum(1 for _ in itertools.islice(sampler, count))
        batches._num_yielded = count  # type: ignore[attr-defined]
    else:
        found = sum(1 for _ in itertools.islice(batches, count))
    if found != count:
        warnings.warn(f"the loader gave {found} batches where {count} were passed over: its data have changed", stacklevel=3)
    return not indices


def _map_style(batches: Any) -> bool:
    return bool(batches._dataset_kind == loaded_torch().utils.data._DatasetKind.Map)
