"""Run-time values (resident, dropped or offloaded), what holds their bytes, and the records that rematerialize them.

A :class:`Value` is one version of one storage. References point one way: from a record to the values that it read, from a
value to the record that made it, from a handle (which autograd keeps) to its value. So reference counting alone frees memory.

One module: values, records, arguments and anchors refer to each other, and which of them holds which is the point.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, final

import torch
from lowtide.base.errors import ReplayError
from lowtide.runtime.device.accelerator import Accelerator, is_accelerator
from lowtide.runtime.device.offload import OffloadTier, Ticket
from lowtide.runtime.numeric_settings import Numerics, current, under
from lowtide.runtime.storage.arguments import flatten
from lowtide.runtime.storage.checksum import digest
from lowtide.runtime.storage.op_schema import OpInfo
from lowtide.runtime.storage.views import Meta, StorageRef, as_bytes, meta_of, view_on
from lowtide.runtime.tensors import beneath_autograd, node_of, on_storage


@final
class Value:
    """One version of one storage.

    Attributes:
        bytes: bytes of the storage.
        weak: weak reference to the storage that holds (or last held) its bytes.
        anchor: weak reference to the anchor that holds its bytes for replays, if it cannot be rematerialized.
        tensor: Lowtide's own reference, which keeps the bytes resident; None if Lowtide does not hold them.
        record: the operator that makes it; None if that operator is unknown or must not be run again.
        ticket: its place on the offload tier.
        saves: number of live handles that autograd has to it.
        superseded: whether the storage in which it was made now holds a later version.
        heir: the later version that keeps the bits of its saved tensors. The writes in between touched other parts of the
            storage: autograd's version counters, which distinguish such views, check this.
        elders: weak references to the earlier versions whose saved tensors it keeps now.
        tainted: whether foreign code may have written to its storage.
        number: its id in a trace or a plan; -1 outside of them.
        unit: the recording that ``number`` belongs to.
        checksum: checksum of its bytes when it was dropped, if they are to be checked after a replay.
        touched: in the full interception the time (by the evictor's clock) when it was last made or asked for; in the lean
            interception the number of needs that it has served.
        busy: number of running chains that still read it: it must not be evicted while there are any.
        is_read: whether a record has read it: otherwise nothing is made from it that a write could change.
        scratch: whether it is a kernel's workspace. Parts of it are never written, so its bytes differ from run to run.
    """

    __slots__ = (
        "__weakref__", "anchor", "busy", "bytes", "checksum", "elders", "heir", "is_read", "number", "record", "saves",
        "scratch", "superseded", "tainted", "tensor", "ticket", "touched", "unit", "weak",
    )

    def __init__(self, size: int, record: Record | None) -> None:
        """Create a value of ``size`` bytes that nothing holds yet."""
        self.bytes = size
        self.record = record
        self.weak: StorageRef | None = None
        self.anchor: weakref.ref[Anchor] | None = None
        self.tensor: torch.Tensor | None = None
        self.ticket: Ticket | None = None
        self.saves = 0
        self.superseded = False
        self.heir: Value | None = None
        self.elders: tuple[weakref.ref[Value], ...] = ()
        self.tainted = False
        self.number = -1
        self.unit: Any = None
        self.checksum: int | None = None
        self.touched = 0
        self.busy = 0
        self.is_read = False
        self.scratch = False

    def inherit(self, old: Value) -> None:
        """Take over the saved tensors of an older version."""
        old.heir, self.saves, old.saves = self, old.saves, 0
        self.elders = (*old.elders, weakref.ref(old))

    def is_doubtful(self) -> bool:
        """Whether foreign code may write to it, or to anything it would be rematerialized from."""
        return self.tainted or (self.record is not None and self.record.doubtful)

    def disown(self) -> None:
        """Unlink its elders once no saved tensor of it or of them is left.

        An elder refers to its heir, and the heir's record to what it overwrote: that would remain as a reference cycle.
        """
        for ref in self.elders:
            if (elder := ref()) is not None:
                elder.heir = None
        self.elders = ()

    def latest(self) -> Value:
        """The version that keeps the bits of its saved tensors now: the last heir, or the value itself."""
        value = self
        while value.heir is not None:
            value = value.heir
        return value

    def anchored(self) -> Anchor | None:
        """The anchor that holds its bytes for replays; None if no record that reads it is left."""
        return None if self.anchor is None else self.anchor()

    def own_aliases(self) -> int:
        """Number of tensors of Lowtide's own that refer to its storage."""
        anchor = self.anchored()
        return (self.tensor is not None) + (anchor is not None and anchor.held is not None)

    def storage(self) -> torch.UntypedStorage | None:
        """Its storage; None if its bytes are not resident."""
        if self.tensor is not None:
            return self.tensor.untyped_storage()
        return None if self.weak is None else self.weak()

    def move(self, tier: OffloadTier) -> bool:
        """Put its bytes on the offload tier and release them here.

        Returns:
            Whether bytes were written; False if the tier had them already.

        Raises:
            OSError: if the tier has no room.
        """
        wrote = self.ticket is None
        if wrote:
            storage = self.storage()
            assert storage is not None
            with beneath_autograd():
                self.ticket = tier.put(storage)
        self.tensor = None
        anchor = self.anchored()
        if anchor is not None and anchor.held is not None:
            assert self.ticket is not None
            anchor.leave(self.ticket)
        return wrote


@final
class Anchor:
    """Bytes that replays read and that cannot be rematerialized: held in memory, or on the offload tier.

    Attributes:
        held: the tensor that holds them; None once they are on the offload tier.
        ticket: their place on the offload tier.
        stale: whether they may have been overwritten, so that no replay may read them any more.
    """

    __slots__ = ("__weakref__", "held", "stale", "ticket")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the bytes by a tensor."""
        self.held: torch.Tensor | None = tensor
        self.ticket: Ticket | None = None
        self.stale = False

    def leave(self, ticket: Ticket) -> None:
        """Release the bytes here: they are on the offload tier, where nothing else can change them."""
        self.ticket, self.held = ticket, None

    def storage(self) -> torch.UntypedStorage:
        """The storage with the bytes, fetched if they were offloaded."""
        if self.held is not None:
            return self.held.untyped_storage()
        assert self.ticket is not None
        return self.ticket.fetch()


def _anchor(value: Value | None, tensor: torch.Tensor) -> Anchor:
    """The anchor of a tensor's bytes, whatever data the tensor shows later; arguments that read the same value share one."""
    if not on_storage(tensor):
        return Anchor(tensor if node_of(tensor) is None else tensor.detach())
    found = None if value is None else value.anchored()
    if found is None:
        found = Anchor(as_bytes(tensor.untyped_storage()))
        if value is not None:
            value.anchor = weakref.ref(found)
    return found


@final
class Argument:
    """A tensor that an operator read: as a value and view metadata, or as the tensor itself.

    Attributes:
        anchor: holds the bytes of a tensor that cannot be rematerialized.
        watched: weak reference to the leaf that it is, or is a view of; the leaf's version counter must not have moved since.
            (A tensor detached below autograd has a version counter of its own. The ledger sees writes to other tensors.)
        witness: digest of its elements, if code that torch does not see may write them.
    """

    __slots__ = ("anchor", "bytes", "device", "meta", "value", "version", "watched", "witness")

    def __init__(self, value: Value | None, tensor: torch.Tensor, *, anchored: bool, anchor: Anchor | None = None) -> None:
        """Refer to a tensor by its value or, if ``anchored``, hold its bytes: by ``anchor`` if its storage has one already."""
        self.value = value
        if value is not None:
            value.is_read = True
        self.device = tensor.device
        self.meta: Meta | None = meta_of(tensor) if on_storage(tensor) else None
        self.anchor = (anchor or _anchor(value, tensor)) if anchored else None
        self.bytes = tensor.untyped_storage().nbytes()
        leaf = _leaf_under(tensor) if anchored else None
        self.watched = None if leaf is None else weakref.ref(leaf)
        self.version = 0 if leaf is None else leaf._version
        self.witness: int | None = None

    def hold(self) -> Anchor:
        """Anchor the value, which is resident and will not be rematerialized any more, for the operator's replays."""
        assert self.value is not None
        storage = self.value.storage()
        assert storage is not None
        found = self.value.anchored()
        if found is None:
            found = Anchor(as_bytes(storage))
            self.value.anchor = weakref.ref(found)
        self.anchor = found
        return found

    def tensor(self) -> torch.Tensor:
        """The tensor, with the bits that the operator read; its value must be resident.

        Raises:
            ReplayError: if the tensor was changed in place since.
        """
        if self.anchor is not None:
            return self._anchored(self.anchor)
        assert self.value is not None
        assert self.meta is not None
        storage = self.value.storage()
        assert storage is not None
        return view_on(storage, self.meta)

    def _anchored(self, anchor: Anchor) -> torch.Tensor:
        if anchor.held is not None:
            leaf = None if self.watched is None else self.watched()
            stale = anchor.stale or (leaf is not None and leaf._version != self.version)
            stale = stale or anchor.held.untyped_storage().nbytes() != self.bytes
            if stale or (self.value is not None and self.value.superseded):
                raise ReplayError(
                    f"a tensor of {self.bytes} bytes was changed in place after a value computed from it was dropped: "
                    "exclude its module with --keep, or do not change it before backward"
                )
            if self.meta is None:
                return anchor.held
        assert self.meta is not None
        found = view_on(anchor.storage(), self.meta)
        if self.witness is not None and digest(found) != self.witness:
            raise ReplayError(
                f"a tensor of {self.bytes} bytes that the forward read was written before backward, unseen by torch (numpy, "
                "a thread, its storage): exclude its module with --keep, or do not change it before backward"
            )
        return found


def covers(info: OpInfo, tensor: torch.Tensor) -> bool:
    """Whether an operator overwrites the whole storage of a tensor, independently of its old contents."""
    return info.overwrites_fully and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def covers_blindly(info: OpInfo, argument: Argument) -> bool:
    """Like `covers`, for an argument of a record."""
    if not info.overwrites_fully or argument.value is None or argument.meta is None:
        return False
    size, _, _, dtype, *_ = argument.meta
    return size.numel() * dtype.itemsize == argument.value.bytes


def _leaf_under(tensor: torch.Tensor) -> torch.Tensor | None:
    leaf = tensor if node_of(tensor) is None else tensor._base
    return None if leaf is None or node_of(leaf) is not None or leaf.is_inference() else leaf


@final
class Record:
    """One operator that ran and may be run again.

    Attributes:
        func: the operator.
        info: facts about the operator.
        args: its positional arguments, with tensors replaced by :class:`Argument`.
        kwargs: its keyword arguments, likewise.
        inputs: every :class:`Argument` among them.
        grad: whether grad mode was on: some kernels keep a workspace for backward only then.
        settings: the numeric settings, which decide bits, when it ran.
        state: (generator, its state) if it may draw random numbers.
        outs: (position in the flattened outputs, weak reference to the value) of each value that it made.
        overs: (argument that it writes, weak reference to the version that it makes, whether the old bits matter).
        seconds: seconds that it took.
        order: position among all records, increasing with time.
        doubtful: whether foreign code may write something that it reads, directly or through other records, before it runs
            again.
    """

    __slots__ = (
        "args", "doubtful", "func", "grad", "info", "inputs", "kwargs", "order", "outs", "overs", "seconds", "settings",
        "state",
    )

    def __init__(self, func: Any, info: OpInfo, args: Any, kwargs: Any, inputs: list[Argument], order: int) -> None:
        """Record an operator and its arguments; outputs are added once they are known."""
        self.func = func
        self.grad = torch.is_grad_enabled()
        self.settings: Numerics = current()
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.order = order
        self.seconds = 0.0
        self.doubtful = False
        self.state: tuple[Any, bytes] | None = None
        self.outs: list[tuple[int, weakref.ref[Value]]] = []
        self.overs: list[tuple[Argument, weakref.ref[Value], bool]] = []

    def sources(self) -> list[Value]:
        """Values that must be resident before it can run again."""
        return [value for _, value in self.reads()]

    def reads(self) -> list[tuple[Argument, Value]]:
        """The arguments that it reads by their values, without holding their bytes; each with its value."""
        blind = {id(a) for a, _, matters in self.overs if not matters}
        return [(a, a.value) for a in self.inputs if a.anchor is None and a.value is not None and id(a) not in blind]

    def run(self, steal: Callable[[Value], bool], how: Replayer) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Run the operator again.

        Args:
            steal: whether the operator may overwrite a value's own storage instead of a copy.
            how: calls the operator, and makes room.

        Returns:
            Its flattened outputs, and the tensors that it wrote into by their position in :attr:`overs`.

        Raises:
            ReplayError: if an anchored argument was changed since.
        """
        written: dict[int, torch.Tensor] = {}
        stand_ins: dict[int, torch.Tensor] = {}
        for i, (argument, _, matters) in enumerate(self.overs):
            written[i] = stand_ins[id(argument)] = self._target(argument, matters=matters, steal=steal, how=how)

        args = _filled(self.args, stand_ins)
        kwargs = {k: _filled(v, stand_ins) for k, v in self.kwargs.items()}
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.grad)
        try:
            with under(self.settings):
                return flatten(self._draws_as_before(how, args, kwargs)), written
        finally:
            torch._C._set_grad_enabled(before)

    def _draws_as_before(self, how: Replayer, args: Any, kwargs: Any) -> Any:
        if self.state is None:
            return how.call(self, args, kwargs)
        generator, state = self.state
        now = generator.get_state()
        generator.set_state(_state_tensor(state))
        try:
            return how.call(self, args, kwargs)
        finally:
            generator.set_state(now)

    def _target(
        self, argument: Argument, *, matters: bool, steal: Callable[[Value], bool], how: Replayer
    ) -> torch.Tensor:
        """The tensor to write into instead of the argument that the operator wrote in its first run."""
        if argument.anchor is not None:
            return argument.tensor().clone()
        assert argument.value is not None
        assert argument.meta is not None
        if not matters:
            how.room(argument.value.bytes)
            return view_on(torch.UntypedStorage(argument.value.bytes, device=argument.device), argument.meta)
        storage = argument.value.storage()
        assert storage is not None
        if not steal(argument.value):
            how.room(argument.value.bytes)
            storage = argument.value.storage()
            assert storage is not None
            storage = storage.clone()
        return view_on(storage, argument.meta)


def _filled(item: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    """Arguments with every :class:`Argument` replaced by its stand-in or its tensor."""
    if type(item) is Argument:
        found = stand_ins.get(id(item))
        return item.tensor() if found is None else found
    if type(item) is list:
        return [_filled(x, stand_ins) for x in item]
    if type(item) is tuple:
        return tuple(_filled(x, stand_ins) for x in item)
    return item


def _state_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def generator_of(args: Any, kwargs: Any, devices: Iterable[torch.device]) -> Any:
    """The generator that an operator draws from: one of its arguments (positional or keyword), or its device's default.

    None if torch does not expose the device's generators (MPS): an operator that draws there cannot be run again with the same
    bits.
    """
    given = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None)
    if given is not None:
        return given
    named = kwargs.get("device")  # factories read no tensor
    all_devices = (*devices, *([torch.device(named)] if named is not None else []))
    device = next((d for d in all_devices if is_accelerator(d)), None)
    return torch.default_generator if device is None else Accelerator(device).generator()


def state_bytes(generator: Any) -> bytes:
    """A generator's state, as bytes."""
    return bytes(torch._C.TensorBase.numpy(generator.get_state()).data)


def records_behind(value: Value, through: Callable[[Argument], bool]) -> Iterator[Record]:
    """The records that made a value, directly or indirectly, following the arguments for which ``through`` is true."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        record = stack.pop().record
        if record is None or id(record) in seen:
            continue
        seen.add(id(record))
        yield record
        stack += [a.value for a in record.inputs if a.value is not None and through(a)]


class Replayer(Protocol):
    """What a chain calls while it brings values back; the online policy and the plan each implement it."""

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Note that a value's bytes are in a new storage."""

    def hold(self, value: Value) -> bool:
        """Decide whether an intermediate value of the chain is held for its own later need."""

    def call(self, record: Record, args: Any, kwargs: Any) -> Any:
        """Call a record's operator again."""

    def room(self, size: int) -> None:
        """Make room for ``size`` bytes that are about to be allocated outside any operator."""

    def ran(self, record: Record, seconds: float) -> None:
        """Note that a replay took this many seconds."""

    def fetched(self, value: Value, seconds: float) -> None:
        """Note that fetching a value from the offload tier took this many seconds."""

    def taken(self, value: Value) -> None:
        """Note that a replayed in-place operator consumed the storage of a remade value."""
