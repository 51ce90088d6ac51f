"""Wraps a data loader so that its position within an epoch can be saved and restored."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, final

from lowtide.checkpoint.parts import is_generator, put_back, random_state, set_random_state, state_of
from lowtide.checkpoint.tree import loaded_torch

_PLACES: Final = ("", "sampler", "batch_sampler", "batch_sampler.sampler", "dataset")
"""Attribute paths from a loader to the objects that may have generators of their own, or a position."""
_resumed = False
"""Whether a position was loaded and no epoch has resumed since: the first that does restores the global generators."""


@final
class Batches:
    """Wraps a data loader, or any iterable that can be iterated again, so that it can be one of a checkpoint's parts.

    After a restart, the interrupted epoch starts with the random number generators in the state they had at its beginning,
    skips the batches already delivered, and continues with the generators as they were saved. For a map-style data set loaded
    in this process only the indices are skipped; otherwise the batches are loaded again, so that workers draw the same random
    numbers.

    Generators that are attributes of the loader, its samplers or its data set are saved too, and so are the positions of
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
                "persistent_workers carry their random state from epoch to epoch: an epoch that is resumed after a restart is "
                "exact only if the workers draw no random numbers",
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or over the rest of the saved one. Leaving the loop early ends the epoch."""
        global _resumed  # noqa: PLW0603 - it is about the process's global generators
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
            # reading the batches again has already restored the positions of what was read
            self._set_generators({**saved["now"], "global": now, **({"inner": {}} if read else {})})
        try:
            for batch in found:
                self._given += 1
                yield batch
        finally:
            if mine == self._turn:
                self._given, self._inside = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position within the epoch, and the generators' states."""
        if self._saved is not None:  # nothing has been read since the last restart
            return dict(self._saved)
        if not self._inside:
            return {"inside": False, "own": self._own(), "inner": self._inner()}
        return {"inside": True, "given": self._given, "began": dict(self._began), "now": self._generators()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position: the next iteration continues from there."""
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
        """The loader and its parts with their attribute paths, each object once."""
        seen: set[int] = set()
        for path in _PLACES:
            found: Any = self.loader
            for name in filter(None, path.split(".")):
                found = getattr(found, name, None)
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                yield path, found

    def _own(self) -> dict[str, Any]:
        """The states of the generators that the loader and its parts have as attributes."""
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
        """The positions of the loader's parts that have one (a ``state_dict``)."""
        return {path: dict(place.state_dict()) for path, place in self._places() if hasattr(place, "load_state_dict")}

    def _set_inner(self, states: Mapping[str, Any]) -> None:
        for path, place in self._places():
            if path in states:
                place.load_state_dict(states[path])


def _skip(batches: Iterator[Any], count: int) -> bool:
    """Skip batches by their indices if nothing is loaded ahead, else by loading them; return whether they were loaded."""
    sampler = getattr(batches, "_sampler_iter", None)
    indices = sampler is not None and not getattr(batches, "_num_workers", 0) and _map_style(batches)
    if sampler is not None and indices:
        found = sum(1 for _ in itertools.islice(sampler, count))
        batches._num_yielded = count  # type: ignore[attr-defined]
    else:
        found = sum(1 for _ in itertools.islice(batches, count))
    if found != count:
        warnings.warn(f"the loader has only {found} of the {count} batches to skip: its data have changed", stacklevel=3)
    return not indices


def _map_style(batches: Any) -> bool:
    return bool(batches._dataset_kind == loaded_torch().utils.data._DatasetKind.Map)
