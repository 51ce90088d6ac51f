"""Streams a parameter's gradient and states through buffers, and runs the optimizer's own update slice by slice.

The optimizers in :data:`~lowtide.runtime.updates.single_update.KNOWN` compute each element from the same element of the
gradient and of the states, so updating slices gives the same bits. That the lanes of a vector and the rest of a slice, which
torch computes element by element, agree on this machine is tried once for each optimizer and its options, on a few numbers.
Types of lower precision than float32 are not sliced: there they do not agree.
"""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.device.offload import SlicedTier
from lowtide.runtime.storage.views import meta_of
from lowtide.runtime.tensors import GRAD, beneath_autograd, is_plain
from lowtide.runtime.updates import streamed_values
from lowtide.runtime.updates.offloaded_gradients import OffloadedGradients
from lowtide.runtime.updates.offloaded_states import LEAST_BYTES, OffloadedStates
from lowtide.runtime.updates.single_update import update_one
from lowtide.runtime.updates.sliced_optimizer import TEMPORARIES
from lowtide.runtime.updates.stand_in import StandIns
from lowtide.runtime.updates.streamed_states import StreamedStates, Unsliced, has_elements, is_like, slices_of
from lowtide.runtime.updates.streamed_values import (
    Buffers,
    Offloaded,
    Place,
    Resident,
    Sliced,
    SliceReader,
    can_be_sliced,
    flat_of,
)

_PROBE: Final = 133
"""Elements on which it is tried whether slices are updated alike: whole vectors of any width, and a rest."""
_NARROW: Final = 3
"""Elements of the probe's slices: fewer than a vector has, so that each is computed by itself."""
_ALIGNED: Final = 64
"""The same for fused updates, which split their work only at cache lines, as slices do."""
_PROBE_STEPS: Final = 2
_SPECIAL: Final = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45)
"""Numbers that vectors and single elements may treat differently: not-a-numbers, infinities, zeros, a denormal one."""
_SPECIAL_AT: Final = 17
"""Every so many elements of the probe, one of these comes next."""
_NOT_THE_SCRIPTS: Final = frozenset(("torch", "lowtide", *sys.stdlib_module_names))
"""Packages whose code is not the script's."""
_GRADIENT: Final = -1
"""Number of the gradient's buffer; the states' are numbered from 0."""


@final
class StreamedUpdate:
    """Updates parameters, and changes offloaded gradients, slice by slice."""

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
        self._make_room, self._transferred, self._unseen = make_room, transferred, unseen
        self._own = threading.local()
        self._alike: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def buffers(self) -> Iterator[Buffers]:
        """Memory for the slices of what is streamed within the context.

        A thread has its own, and so has a signal's handler, which may clip or step while a slice is in use.
        """
        outer: SliceReader | None = getattr(self._own, "reader", None)
        reader = self._own.reader = SliceReader(self._make_room, self._transferred)
        try:
            yield reader.buffers
        finally:
            self._own.reader = outer

    @property
    def _reader(self) -> SliceReader:
        """What reads slices in this thread."""
        return self._own.reader  # type: ignore[no-any-return]

    def update(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor) -> bool:
        """Update a parameter, which is in ``group``, and hide its gradient from the script's own step, within :meth:`buffers`.

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
            states = StreamedStates(self._reader, tier, self._states.lock, optimizer, parameter, leaves=leaves)
            writes = self._shown(optimizer, group, parameter, states)
            gradient = self._gradient(parameter, writes=writes)
        except (Unsliced, OSError):  # OSError: the disk has no room for a copy
            return False
        self._make_room(TEMPORARIES * min(streamed_values.SLICE_BYTES, parameter.nbytes))
        _note_write(parameter)
        with self._states.while_updating(optimizer):
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
        optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, gradient: Sliced, states: StreamedStates, *,
        writes: bool,
    ) -> None:
        flat = flat_of(parameter)
        for start, end in slices_of(parameter):
            part = _part(flat, start, end, gradient)
            own = states.read(start, end)
            try:
                update_one(optimizer, group, part, collections.defaultdict(dict, {part: own}))
            finally:  # an update that raises has changed what it has changed in a plain run
                if writes:
                    gradient.write(start, part.grad)  # type: ignore[arg-type]
                states.write(start, end, own)

    def change_gradient(self, parameter: torch.Tensor, change: Callable[[torch.Tensor], object]) -> bool:
        """Change an offloaded gradient element by element, within :meth:`buffers`.

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
        except (Unsliced, OSError):
            return False
        flat = flat_of(parameter)
        with self._unseen():
            for start, end in slices_of(parameter):
                part = _part(flat, start, end, gradient)
                change(part)
                gradient.write(start, part.grad)  # type: ignore[arg-type]
        return True

    def _gradient(self, parameter: torch.Tensor, *, writes: bool) -> Sliced:
        gradients = self._gradients
        with gradients.lock:
            moved = gradients.place_of(parameter)
            grad: torch.Tensor | None = GRAD.__get__(parameter)
            if moved is None:
                if grad is None or not is_plain(grad) or not is_like(meta_of(grad), parameter):
                    raise Unsliced
                return Resident(grad)
            if grad is not None or not is_like(moved.meta, parameter):
                raise Unsliced
            if writes:
                moved.own()
        last = moved

        def where() -> Place | torch.Tensor:
            nonlocal last
            there: torch.Tensor | None = GRAD.__get__(parameter)
            last = gradients.place_of(parameter) or last
            return last.place() if there is None or gradients.is_away(parameter) else there

        return Offloaded(self._reader, _GRADIENT, where, parameter.dtype, gradients.lock)

    def _shown(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, states: StreamedStates) -> bool:
        """Try an update on a few numbers.

        Returns:
            Whether it writes to the gradient.

        Raises:
            Unsliced: if slices get other bits than the whole, or if the update fails, which is left to the script's own step.
        """
        try:
            if self._are_alike(optimizer, group, parameter, states):
                return self._stand_ins.writes_gradient(optimizer, group, parameter)
        except Exception as error:
            if not _is_from_torch(error):
                raise
            raise Unsliced from error
        raise Unsliced

    def _are_alike(self, optimizer: Any, group: dict[str, Any], parameter: torch.Tensor, states: StreamedStates) -> bool:
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
    return all(str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_SCRIPTS for frame in frames)


def _is_whole(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a plain tensor on the CPU whose slices are slices of its storage."""
    plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and is_plain(parameter) and parameter.device.type == "cpu"
    return plain and can_be_sliced(parameter)


def _note_write(parameter: torch.Tensor) -> None:
    """Show a write to the parameter to the dispatch modes, which may not see those of the slices; it writes no element."""
    nothing = flat_of(parameter)
    with beneath_autograd():
        nothing = nothing[:0]
    with torch.no_grad():
        nothing.zero_()


def _part(flat: torch.Tensor, start: int, end: int, gradient: Sliced) -> torch.Tensor:
    """A slice of a parameter's elements, with the slice of its gradient."""
    grad = gradient.read(start, end)
    with beneath_autograd():
        part = flat[start:end]
        part.grad = grad
    return part


def _probe(optimizer: Any, group: dict[str, Any], states: StreamedStates, dtype: torch.dtype, width: int) -> bool:
    generator = torch.Generator(HOST).manual_seed(0)

    def numbers() -> torch.Tensor:
        """Random numbers of many magnitudes, and some that are none."""
        scale = torch.rand(_PROBE, generator=generator, dtype=dtype, device=HOST).mul_(16).sub_(12).exp_()
        found = torch.randn(_PROBE, generator=generator, dtype=dtype, device=HOST).mul_(scale)
        found[_SPECIAL_AT :: _SPECIAL_AT] = torch.tensor(_SPECIAL, dtype=dtype, device=HOST)
        return found

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
            found.append([part, part.grad, *(v for v in mine.values() if has_elements(v))])  # type: ignore[list-item]
        return [torch.cat(list(parts)) for parts in zip(*found, strict=True)]

    with torch.no_grad():
        bits = torch.int64 if dtype == torch.float64 else torch.int32
        return all(torch.equal(a.view(bits), b.view(bits)) for a, b in zip(updated(_PROBE), updated(width), strict=True))


def _sample_of(value: Any, at: slice) -> Any:
    """A slice of a state, a copy of a single number, or what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    return value[at].clone() if has_elements(value) else value.clone()
