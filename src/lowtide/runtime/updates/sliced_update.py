"""Runs an optimizer's own update of a parameter slice by slice, so that its gradient and states are never resident as a whole.

The optimizers in :data:`~lowtide.runtime.updates.single_update.KNOWN` compute each element from the same element of the
gradient and of the states, so updating slices gives the same bits. That the lanes of a vector and the rest of a slice, which
torch computes element by element, agree on this machine is tried once for each optimizer and its options, on a few numbers.
Types of lower precision than float32 are not sliced: there they do not agree.
"""

from __future__ import annotations

import collections
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import torch
from lowtide.runtime.device.offload import SlicedTicket, SlicedTier
from lowtide.runtime.storage.views import Meta, meta_of
from lowtide.runtime.tensors import GRAD, beneath_autograd, is_plain, states_of
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.offloaded_states import LEAST_BYTES, Moved, OffloadedStates
from lowtide.runtime.updates.single_update import update_one
from lowtide.runtime.updates.sliced_optimizer import TEMPORARIES
from lowtide.runtime.updates.sliced_values import (
    SLICE_BYTES,
    Buffers,
    Offloaded,
    Resident,
    Sliced,
    Transfers,
    can_be_sliced,
    flat_of,
)
from lowtide.runtime.updates.stand_in import StandIns

_PROBE: Final = 133
"""Elements on which it is tried whether slices are updated alike: whole vectors of any width, and a rest."""
_NARROW: Final = 3
"""Elements of the probe's slices: fewer than a vector has, so that each is computed by itself."""
_ALIGNED: Final = 64
"""The same for fused updates, which split their work only at cache lines, as slices do."""
_PROBE_STEPS: Final = 2
_GRADIENT: Final = -1
"""Number of the gradient's buffer; the states' are numbered from 0."""


@final
class SlicedUpdate:
    """Updates parameters, and changes offloaded gradients, slice by slice.

    Attributes:
        buffers: memory for the slices in use; to be dropped after a step.
    """

    def __init__(
        self, gradients: OffloadedGradients, states: OffloadedStates, stand_ins: StandIns, tier: Callable[[], object],
        make_room: Callable[[int], object], transferred: Callable[[float, int], object],
        unseen: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Update nothing yet.

        Args:
            gradients: the gradients that are offloaded.
            states: the states that are offloaded.
            stand_ins: tell what updates write to.
            tier: returns the offload tier.
            make_room: called with the bytes that are about to be allocated.
            unseen: a context in which operators pass by Lowtide's dispatch modes, if no other mode is on.
            transferred: called with the seconds of each transfer, and with the bytes that it wrote.
        """
        self._gradients, self._states, self._stand_ins, self._tier = gradients, states, stand_ins, tier
        self._make_room, self._unseen = make_room, unseen
        self.buffers = Buffers(make_room)
        self._transfers = Transfers(transferred)
        self._alike: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()

    def update(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Update a parameter, which is in ``group``, and hide its gradient from the script's own step.

        Returns:
            False if nothing was done: the parameter, its gradient or a state cannot be sliced.
        """
        tier = self._tier()
        if not isinstance(tier, SlicedTier) or not _is_whole(parameter) or parameter.nbytes < LEAST_BYTES:
            return False
        if torch.is_inference_mode_enabled():  # it would make states that cannot be written outside it
            return False
        try:
            leaves = self._states.may_leave(optimizer, parameter)
            states = _States(self, tier, optimizer, parameter, leaves=leaves)
            writes = self._shown(optimizer, group, parameter, states)
            gradient = self._gradient(parameter, writes=writes)
        except (_Unsliced, OSError):  # OSError: the disk has no room for a copy
            return False
        self._make_room(TEMPORARIES * min(SLICE_BYTES, parameter.nbytes))
        _note_write(parameter)
        try:
            with self._unseen():
                self._update_slices(optimizer, group, parameter, gradient, states, writes=writes)
        finally:
            states.over()
            del gradient, states  # whoever holds a state keeps it resident
            torch.autograd.graph.increment_version(parameter)
            self._states.updated(optimizer, parameter)
        self._gradients.updated(parameter)
        return True

    @staticmethod
    def _update_slices(
        optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, gradient: Sliced, states: _States, *, writes: bool
    ) -> None:
        for start, end in _slices(parameter):
            part = _part(parameter, start, end, gradient)
            own = states.read(start, end)
            try:
                update_one(optimizer, group, part, collections.defaultdict(dict, {part: own}))
            finally:  # an update that raises has changed what it has changed in a plain run
                if writes:
                    gradient.write(start, part.grad)  # type: ignore[arg-type]
                states.write(start, end, own)

    def change_gradient(self, parameter: torch.Tensor, change: Callable[[torch.Tensor], object]) -> bool:
        """Change an offloaded gradient element by element.

        Args:
            parameter: whose gradient it is.
            change: called with one tensor for each slice, to change its ``grad`` in place.

        Returns:
            False if nothing was done: the gradient is not offloaded, or cannot be sliced.
        """
        if not (self._gradients.is_away(parameter) and isinstance(self._tier(), SlicedTier) and _is_whole(parameter)):
            return False
        try:
            gradient = self._gradient(parameter, writes=True)
        except (_Unsliced, OSError):
            return False
        with self._unseen():
            for start, end in _slices(parameter):
                part = _part(parameter, start, end, gradient)
                change(part)
                gradient.write(start, part.grad)  # type: ignore[arg-type]
        return True

    def offloaded(
        self, number: int, ticket: SlicedTicket, dtype: torch.dtype, brought_back: Callable[[], torch.Tensor | None],
        lock: Any,
    ) -> Sliced:
        """A value on the tier, read into the buffer of a number."""
        return Offloaded(ticket, dtype, lambda size: self.buffers.take(number, size), self._transfers, brought_back, lock)

    @property
    def states_lock(self) -> Any:
        """Held while states cannot be brought back."""
        return self._states.lock

    def _gradient(self, parameter: torch.Tensor, *, writes: bool) -> Sliced:
        gradients = self._gradients
        with gradients.lock:
            moved = gradients.place_of(parameter)
            grad: torch.Tensor | None = GRAD.__get__(parameter)
            if moved is None:
                if grad is None or not is_plain(grad) or not _is_like(meta_of(grad), parameter):
                    raise _Unsliced
                return Resident(grad)
            if grad is not None or not _is_like(moved.meta, parameter):
                raise _Unsliced
            ticket = moved.sliced(writes=writes)

        def brought_back() -> torch.Tensor | None:
            return None if gradients.is_away(parameter) else GRAD.__get__(parameter)

        return self.offloaded(_GRADIENT, ticket, parameter.dtype, brought_back, gradients.lock)

    def _shown(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, states: _States) -> bool:
        """Try an update on a few numbers.

        Returns:
            Whether it writes to the gradient.

        Raises:
            _Unsliced: if slices get other bits than the whole, or if the update fails, which is left to the script's own step.
        """
        try:
            if self._are_alike(optimizer, group, parameter, states):
                return self._stand_ins.writes_gradient(optimizer, group, parameter)
        except Exception as error:
            if not _is_from_torch(error):
                raise
            raise _Unsliced from error
        raise _Unsliced

    def _are_alike(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, states: _States) -> bool:
        """Whether slices are updated with the same bits as the whole, as far as a few numbers show."""
        options = tuple(sorted((name, bool(value)) for name, value in group.items() if not isinstance(value, list)))
        key = (parameter.dtype, options, *states.names)
        known = self._alike.setdefault(optimizer, {})
        if key not in known:
            width = _ALIGNED if group.get("fused") else _NARROW
            with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                known[key] = _probe(optimizer, group, states, parameter.dtype, width)
        return known[key]


def _is_from_torch(error: BaseException) -> bool:
    """Whether an error was raised within torch and not in the script's code, such as a signal's handler."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "lowtide") for frame in frames)


class _Unsliced(Exception):
    """A value cannot be sliced as its parameter is."""


@final
class _States:
    """One parameter's states, in slices: those that are there, and those that its update makes.

    Attributes:
        names: of the states that are there.
    """

    def __init__(
        self, update: SlicedUpdate, tier: SlicedTier, optimizer: Any, parameter: torch.Tensor, *, leaves: bool
    ) -> None:
        """Look at the states that are there; those that are made are offloaded if they ``leave``.

        Raises:
            _Unsliced: if one has other sizes or strides than the parameter, and is not a single number.
            OSError: if a copy is needed for which the tier has no room.
        """
        self._update, self._tier, self._optimizer, self._parameter = update, tier, optimizer, parameter
        self._leaves = leaves
        states = states_of(optimizer)
        self._given: Any = states.get(parameter, {})
        if type(self._given) is not dict:
            raise _Unsliced
        self.names = tuple(self._given)
        self._sliced: dict[str, Sliced] = {}
        self._made: dict[str, Moved | torch.Tensor] = {}
        self._rest: dict[str, Any] = {}
        self._written = 0
        with update.states_lock:
            for number, (name, value) in enumerate(self._given.items()):
                if isinstance(value, Moved):
                    self._sliced[name] = self._offloaded(number, name, value)
                elif isinstance(value, torch.Tensor) and value.dim():
                    if not is_plain(value) or not _is_like(meta_of(value), parameter):
                        raise _Unsliced
                    self._sliced[name] = Resident(value)

    def _offloaded(self, number: int, name: str, moved: Moved) -> Sliced:
        if not _is_like(moved.meta, self._parameter):
            raise _Unsliced
        given = self._given

        def brought_back() -> torch.Tensor | None:
            return None if given[name] is moved else given[name]

        ticket, lock = moved.sliced(writes=True), self._update.states_lock
        return self._update.offloaded(number, ticket, self._parameter.dtype, brought_back, lock)

    def read(self, start: int, end: int) -> dict[str, Any]:
        """States of a slice, for its update. Single numbers are copied for all slices but the last one."""
        own: dict[str, Any] = {}
        for name in self.names:
            value = self._given[name]
            if name in self._sliced:
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
            if name not in self._sliced and isinstance(value, torch.Tensor) and value.dim():
                self._sliced[name] = self._new(name, value.dtype)
            if name in self._sliced:
                self._sliced[name].write(start, value)
            elif name not in self.names or end == self._parameter.numel():
                self._rest[name] = value

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
                self._made[name] = Moved(ticket, meta, size)
                return self._update.offloaded(len(self._sliced), ticket, dtype, lambda: None, self._update.states_lock)
        with beneath_autograd():
            made = self._made[name] = torch.empty_strided(parameter.size(), parameter.stride(), dtype=dtype)
        return Resident(made)

    def over(self) -> None:
        """The update is over: enter what it made; if it has raised, the rest of that is zero, as it was made."""
        for name in self._made:
            for start, end in _slices(self._parameter):
                if start >= self._written:
                    with beneath_autograd():
                        self._sliced[name].write(start, torch.zeros(end - start, dtype=self._parameter.dtype))
        changed = {name: self._made.get(name, value) for name, value in self._rest.items()}
        self._sliced.clear()
        if changed:
            with self._update.states_lock:
                own = states_of(self._optimizer).setdefault(self._parameter, self._given)
                for name, value in changed.items():
                    if name not in own or own[name] is not value:
                        own[name] = value

    def sample(self, size: int, generator: torch.Generator) -> dict[str, Any]:
        """States like these of a parameter of ``size`` elements, with random numbers."""
        own: dict[str, Any] = {}
        for name, value in self._given.items():
            if name in self._sliced:
                dtype = value.meta[3] if isinstance(value, Moved) else value.dtype
                own[name] = torch.rand(size, generator=generator, dtype=dtype)
            else:
                own[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return own


def _is_whole(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a plain tensor on the CPU whose slices are slices of its storage."""
    plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and is_plain(parameter) and parameter.device.type == "cpu"
    return plain and can_be_sliced(parameter)


def _is_like(meta: Meta, parameter: torch.Tensor) -> bool:
    """Whether a value has the parameter's type, sizes and strides."""
    return meta[:2] == (parameter.size(), parameter.stride()) and meta[3:] == (parameter.dtype, False, False)


def _slices(parameter: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Start and end of each slice, in elements."""
    length, count = SLICE_BYTES // parameter.element_size(), parameter.numel()
    return ((start, min(start + length, count)) for start in range(0, count, length))


def _note_write(parameter: torch.Tensor) -> None:
    """Show a write to the parameter to the dispatch modes, which may not see those of the slices; it writes no element."""
    nothing = flat_of(parameter)
    with beneath_autograd():
        nothing = nothing[:0]
    with torch.no_grad():
        nothing.zero_()


def _part(parameter: torch.Tensor, start: int, end: int, gradient: Sliced) -> torch.Tensor:
    """A slice of a parameter, with the slice of its gradient."""
    flat = flat_of(parameter)
    with beneath_autograd():
        part = flat[start:end]
        part.grad = gradient.read(start, end)
    return part


def _probe(optimizer: Any, group: dict[str, Any], states: _States, dtype: torch.dtype, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        """Random numbers of many magnitudes."""
        scale = torch.rand(_PROBE, generator=generator, dtype=dtype).mul_(16).sub_(12).exp_()
        return torch.randn(_PROBE, generator=generator, dtype=dtype).mul_(scale)

    first, gradients, own = numbers(), [numbers() for _ in range(_PROBE_STEPS)], states.sample(_PROBE, generator)

    def updated(size: int) -> list[torch.Tensor]:
        """The parameter and the states after updates in slices of a size."""
        found: list[list[torch.Tensor]] = []
        for start in range(0, _PROBE, size):
            at = slice(start, start + size)
            part = first[at].clone()
            mine = {name: _sample_of(value, at) for name, value in own.items()}
            table = collections.defaultdict(dict, {part: mine})
            for gradient in gradients:
                part.grad = gradient[at].clone()
                update_one(optimizer, group, part, table)
            found.append([part, part.grad, *(v for v in mine.values() if _is_sliced(v))])  # type: ignore[list-item]
        return [torch.cat(list(parts)) for parts in zip(*found, strict=True)]

    with torch.no_grad():
        bits = torch.int64 if dtype == torch.float64 else torch.int32
        return all(torch.equal(a.view(bits), b.view(bits)) for a, b in zip(updated(_PROBE), updated(width), strict=True))


def _sample_of(value: Any, at: slice) -> Any:
    """A slice of a state, a copy of a single number, or what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return value[at].clone() if value.dim() else value.clone()


def _is_sliced(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim())
