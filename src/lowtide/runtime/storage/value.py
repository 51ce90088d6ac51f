"""Values at run time, resident, dropped or offloaded; what holds their bytes; the operators that make them again.

A :class:`Value` is one version of one storage. References point one way: a record refers to the values that it read, a value
to the record that made it, a handle (what autograd keeps) to its value. So memory is freed by reference counts alone.

One module: values, records, arguments and anchors refer to each other, and who holds whom is the point.
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
        bytes: size of the storage.
        weak: the storage that has (or last had) its bytes.
        anchor: what holds its bytes for replays that read it, where it cannot be made again.
        tensor: our own reference that keeps the bytes resident; None where we do not.
        record: the operator that makes it; None if that is not known or must not be run again.
        ticket: its place on the second board.
        saves: handles of autograd that are alive.
        superseded: whether the storage it was made in holds a later version now.
        heir: the later version that keeps the bits of its saved tensors: the writes between went to other parts of the
            storage (autograd's version counters, which know views apart, are the judge of that).
        elders: the versions whose heir it is, at last.
        tainted: whether foreign code may have written to its storage.
        number: its id in a trace or a plan; -1 outside.
        unit: the recording that ``number`` belongs to.
        checksum: of its bytes when it was dropped, where that is to be checked.
        touched: when it was last made or asked for (full), or how many needs it has served (lean).
        busy: chains under way that read it: it must not be let go.
        scratch: whether it is a kernel's workspace, parts of which nobody writes: its bytes differ from run to run.
    """

    __slots__ = (
        "__weakref__", "anchor", "busy", "bytes", "checksum", "elders", "heir", "number", "record", "saves", "scratch",
        "superseded", "tainted", "tensor", "ticket", "touched", "unit", "weak",
    )

    def __init__(self, size: int, record: Record | None) -> None:
        """A value that nothing holds yet."""
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
        self.scratch = False

    def inherit(self, old: Value) -> None:
        """Keep the bits of an older version's saved tensors from now on."""
        old.heir, self.saves, old.saves = self, old.saves, 0
        self.elders = (*old.elders, weakref.ref(old))

    def is_doubtful(self) -> bool:
        """Whether foreign code may write to it, or to what it would be made from."""
        return self.tainted or (self.record is not None and self.record.doubtful)

    def disown(self) -> None:
        """No saved tensor is left of it or of its elders: a version and what made its heir would hold each other."""
        for ref in self.elders:
            if (elder := ref()) is not None:
                elder.heir = None
        self.elders = ()

    def latest(self) -> Value:
        """The version that keeps the bits of its saved tensors now."""
        value = self
        while value.heir is not None:
            value = value.heir
        return value

    def anchored(self) -> Anchor | None:
        """What holds its bytes for replays, if any is left that reads it."""
        return None if self.anchor is None else self.anchor()

    def own_aliases(self) -> int:
        """How many tensors of ours refer to its storage."""
        anchor = self.anchored()
        return (self.tensor is not None) + (anchor is not None and anchor.held is not None)

    def storage(self) -> torch.UntypedStorage | None:
        """Its storage, where its bytes are resident."""
        if self.tensor is not None:
            return self.tensor.untyped_storage()
        return None if self.weak is None else self.weak()

    def move(self, board: OffloadTier) -> bool:
        """Put it on the second board and let go of it; whether bytes were written."""
        wrote = self.ticket is None
        if wrote:
            storage = self.storage()
            assert storage is not None
            with beneath_autograd():
                self.ticket = board.put(storage)
        self.tensor = None
        anchor = self.anchored()
        if anchor is not None and anchor.held is not None:
            assert self.ticket is not None
            anchor.leave(self.ticket)
        return wrote


@final
class Anchor:
    """Bytes that replays read and that cannot be made again: held, or on the second board.

    Attributes:
        held: the tensor that holds them; None once they are on the second board.
        ticket: their place there.
        stale: whether they were written, perhaps, so that no replay may read them any more.
    """

    __slots__ = ("__weakref__", "held", "stale", "ticket")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold a tensor."""
        self.held: torch.Tensor | None = tensor
        self.ticket: Ticket | None = None
        self.stale = False

    def leave(self, ticket: Ticket) -> None:
        """The bytes are on the second board, and nobody else can change them: let go of them."""
        self.ticket, self.held = ticket, None

    def storage(self) -> torch.UntypedStorage:
        """The bytes, fetched if they were moved."""
        if self.held is not None:
            return self.held.untyped_storage()
        assert self.ticket is not None
        return self.ticket.fetch()


def _anchor(value: Value | None, tensor: torch.Tensor) -> Anchor:
    """What holds a tensor's bytes, whatever it shows later: one for all arguments that read the same value."""
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
    """A tensor that an operator read: a value and view metadata, or a tensor held as it is.

    Attributes:
        anchor: holds the bytes of what cannot be made again.
        watched: the leaf it is a view of, whose version must not have moved since. (A detached tensor made beneath
            autograd has a version counter of its own; writes to other tensors are seen by the ledger.)
        witness: of its elements, where somebody whom torch does not see may write them.
    """

    __slots__ = ("anchor", "bytes", "device", "meta", "value", "version", "watched", "witness")

    def __init__(self, value: Value | None, tensor: torch.Tensor, *, anchored: bool, anchor: Anchor | None = None) -> None:
        """Refer to a tensor by its value, or hold it, by an anchor that its storage has already."""
        self.value = value
        self.device = tensor.device
        self.meta: Meta | None = meta_of(tensor) if on_storage(tensor) else None
        self.anchor = (anchor or _anchor(value, tensor)) if anchored else None
        self.bytes = tensor.untyped_storage().nbytes()
        leaf = _leaf_under(tensor) if anchored else None
        self.watched = None if leaf is None else weakref.ref(leaf)
        self.version = 0 if leaf is None else leaf._version
        self.witness: int | None = None

    def hold(self) -> Anchor:
        """Hold the value, which is there and will not be made again, for the operator's replays."""
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
        """The tensor, with the bits that the operator saw.

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
    """Whether what an operator writes into a tensor covers its whole storage and does not depend on what was there."""
    return info.overwrites_fully and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def covers_blindly(info: OpInfo, argument: Argument) -> bool:
    """The same of a noted argument."""
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
        args: its positional arguments, tensors replaced by :class:`Argument`.
        kwargs: its keyword arguments, likewise.
        inputs: the arguments among them.
        grad: whether gradients were on: some kernels keep a workspace for backward only then.
        settings: what was in force of what decides bits.
        state: (generator, its state) where it may draw.
        outs: (position in the flattened outputs, weak reference to the value).
        overs: (argument that is written, weak reference to the version it makes, whether the old bits matter).
        seconds: how long it took.
        order: position among all records, rising with time.
        doubtful: whether what it reads, at whatever remove, may be written by foreign code before it runs again.
    """

    __slots__ = (
        "args", "doubtful", "func", "grad", "info", "inputs", "kwargs", "order", "outs", "overs", "seconds", "settings",
        "state",
    )

    def __init__(self, func: Any, info: OpInfo, args: Any, kwargs: Any, inputs: list[Argument], order: int) -> None:
        """Note an operator and what it reads; outputs are added once they are known."""
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
        """Values that must be present before it can run again."""
        blind = {id(a) for a, _, matters in self.overs if not matters}
        return [a.value for a in self.inputs if a.anchor is None and a.value is not None and id(a) not in blind]

    def run(self, steal: Callable[[Value], bool], how: Replayer) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Run again: flattened outputs, and the tensors it wrote into, by position in :attr:`overs`.

        Args:
            steal: whether an overwritten value's own storage may be used up.
            how: calls the operator, and makes room.
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
        """What the operator may write into in place of the argument it wrote into the first time."""
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
    """Arguments with their tensors put back."""
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
    """The generator that an operator draws from: the one it is given, by name or in its place, or its device's own.

    None where the device does not show its generators (MPS): what draws there cannot be run again with the same bits.
    """
    given = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), None)
    if given is not None:
        return given
    named = kwargs.get("device")  # factories read no tensor
    all_devices = (*devices, *([torch.device(named)] if named is not None else []))
    device = next((d for d in all_devices if is_accelerator(d)), None)
    return torch.default_generator if device is None else Accelerator(device).generator()


def state_bytes(generator: Any) -> bytes:
    """A generator's state."""
    return bytes(torch._C.TensorBase.numpy(generator.get_state()).data)


def records_behind(value: Value, through: Callable[[Argument], bool]) -> Iterator[Record]:
    """The operators that made a value, at whatever remove, through those of their arguments that are to be followed."""
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
    """How values come back: the online policy's way, or the plan's."""

    def attach(self, value: Value, storage: torch.UntypedStorage) -> None:
        """A value's bytes are in a new storage."""

    def hold(self, value: Value) -> bool:
        """Whether a value that was made on the way is held for its own later need."""

    def call(self, record: Record, args: Any, kwargs: Any) -> Any:
        """Call an operator again."""

    def room(self, size: int) -> None:
        """So many bytes are about to be taken outside any operator."""

    def ran(self, record: Record, seconds: float) -> None:
        """An operator ran again, and took so long."""

    def fetched(self, value: Value, seconds: float) -> None:
        """A value came from the second board, and took so long."""

    def taken(self, value: Value) -> None:
        """An in-place operator used up a remade value's storage."""
