"""One parameter's optimizer states in slices: those that are there, and those that its update makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.offload import SlicedTier
from lowtide.runtime.storage.views import Meta, meta_of
from lowtide.runtime.tensors import beneath_autograd, is_plain, states_of
from lowtide.runtime.updates import streamed_values
from lowtide.runtime.updates.offloaded_states import LEAST_BYTES, Moved
from lowtide.runtime.updates.streamed_values import Offloaded, Place, Resident, Sliced, SliceReader


class Unsliced(Exception):
    """A value cannot be sliced as its parameter is."""


@final
class StreamedStates:
    """One parameter's states, in slices: those that are there, and those that its update makes.

    Attributes:
        names: of the states that are there.
    """

    def __init__(
        self, reader: SliceReader, tier: SlicedTier, lock: AbstractContextManager[object], optimizer: Any,
        parameter: torch.Tensor, *, leaves: bool,
    ) -> None:
        """Look at the states that are there.

        Args:
            reader: reads and writes what is offloaded.
            tier: where states that the update makes are offloaded.
            lock: held while states cannot be brought back.
            optimizer: the optimizer.
            parameter: whose states they are.
            leaves: whether states that the update makes are offloaded.

        Raises:
            Unsliced: if one has other sizes or strides than the parameter, and is not a single number.
            OSError: if a copy is needed for which the tier has no room.
        """
        self._reader, self._tier, self._lock, self._leaves = reader, tier, lock, leaves
        self._optimizer, self._parameter = optimizer, parameter
        states = states_of(optimizer)
        self._given: Any = states.get(parameter, {})
        if type(self._given) is not dict:
            raise Unsliced
        self.names = tuple(self._given)
        self._sliced: dict[str, Sliced] = {}
        self._made: dict[str, Moved | torch.Tensor] = {}
        self._resident: list[torch.Tensor] = []
        self._rest: dict[str, Any] = {}
        self._start = dict(self._given)
        self._counts: dict[str, torch.Tensor] = {}
        self._written = 0
        with lock:
            for number, (name, value) in enumerate(self._given.items()):
                if isinstance(value, Moved):
                    self._sliced[name] = self._offloaded(number, name, value)
                elif has_elements(value):
                    if not is_plain(value) or not is_like(meta_of(value), parameter):
                        raise Unsliced
                    self._sliced[name] = Resident(value)
                    self._resident.append(value)
        self._there = frozenset(self._sliced)

    def _offloaded(self, number: int, name: str, moved: Moved) -> Sliced:
        if not is_like(moved.meta, self._parameter):
            raise Unsliced
        moved.own()
        given = self._given

        def where() -> Place | torch.Tensor:
            there = given.get(name)
            return there if isinstance(there, torch.Tensor) else moved.place()

        return Offloaded(self._reader, number, where, self._parameter.dtype, self._lock)

    def read(self, start: int, end: int) -> dict[str, Any]:
        """States of a slice, for its update. Single numbers are copied for all slices but the last one."""
        own: dict[str, Any] = {}
        for name, value in self._start.items():
            if name in self._there:
                own[name] = self._sliced[name].read(start, end)
            elif isinstance(value, torch.Tensor) and end < self._parameter.numel():
                own[name] = value.clone()
            else:
                own[name] = value
        return own

    def write(self, start: int, end: int, own: dict[str, Any]) -> None:
        """States of a slice after its update."""
        self._written = end
        for name, value in own.items():
            if name not in self._sliced and has_elements(value):
                self._sliced[name] = self._new(name, value.dtype)
            if name in self._sliced:
                self._sliced[name].write(start, value)
            elif name not in self.names or end == self._parameter.numel():
                self._rest[name] = value
            elif isinstance(value, torch.Tensor):
                self._counts[name] = value

    def _new(self, name: str, dtype: torch.dtype) -> Sliced:
        """A state that the update makes: offloaded at once, or resident where that is not possible."""
        parameter = self._parameter
        self._rest[name] = None
        size = parameter.numel() * dtype.itemsize
        if size >= LEAST_BYTES and self._leaves:
            try:
                ticket = self._tier.empty(size)
            except OSError:  # no room
                pass
            else:
                meta = (parameter.size(), parameter.stride(), 0, dtype, False, False)
                moved = self._made[name] = Moved(ticket, meta, size)
                return Offloaded(self._reader, len(self._sliced), moved.place, dtype, self._lock)
        with beneath_autograd():
            made = self._made[name] = torch.empty_strided(parameter.size(), parameter.stride(), dtype=dtype, device=HOST)
        return Resident(made)

    def over(self) -> None:
        """The update is over: enter what it made; if it has raised, the rest of that is zero, as it was made."""
        for name in self._made:
            for start, end in slices_of(self._parameter):
                if start >= self._written:
                    with beneath_autograd():
                        self._sliced[name].write(start, torch.zeros(end - start, dtype=self._parameter.dtype, device=HOST))
        if self._written < self._parameter.numel():  # an update counts its step first
            for name, value in self._counts.items():
                self._start[name].copy_(value)
        changed = {name: self._made.get(name, value) for name, value in self._rest.items()}
        self._sliced.clear()
        for state in self._resident:
            torch.autograd.graph.increment_version(state)
        self._resident.clear()
        self._start.clear()
        if changed:
            with self._lock:
                states_of(self._optimizer).setdefault(self._parameter, self._given).update(changed)

    def sample(self, size: int, generator: torch.Generator) -> dict[str, Any]:
        """States like these of a parameter of ``size`` elements, with random numbers."""
        own: dict[str, Any] = {}
        for name, value in self._start.items():
            if name in self._there:
                own[name] = torch.rand(size, generator=generator, dtype=self._parameter.dtype, device=HOST)
            else:
                own[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return own


def has_elements(value: Any) -> bool:
    """Whether a state is a tensor of elements, and not a single number or no tensor at all."""
    return isinstance(value, torch.Tensor) and bool(value.dim())


def is_like(meta: Meta, parameter: torch.Tensor) -> bool:
    """Whether a value has the parameter's type, sizes and strides."""
    return meta[:2] == (parameter.size(), parameter.stride()) and meta[3:] == (parameter.dtype, False, False)


def slices_of(parameter: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Start and end of each slice, in elements."""
    length, count = streamed_values.SLICE_BYTES // parameter.element_size(), parameter.numel()
    return ((start, min(start + length, count)) for start in range(0, count, length))
