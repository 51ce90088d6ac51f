"""Watches both runs of a checkpoint's function, to find out whether the second one could be left out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.intercept.dispatch_mode import Mode, call_under, leaves_autograd_on, make_way
from lowtide.runtime.intercept.script_effects import Footprint, RandomStates, changed, differ, prints_of, torch_states
from lowtide.runtime.numeric_settings import Numerics, current
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten, written_by
from lowtide.runtime.storage.checksum import checksum, digest, in_memory_order
from lowtide.runtime.storage.op_schema import info_of
from lowtide.runtime.storage.views import version_probe
from lowtide.runtime.tensors import beneath_autograd, is_hooked, node_of, nodes_behind, on_storage, own_tensors, tensors_in

if TYPE_CHECKING:
    from lowtide.runtime.intercept.checkpoint_calls import Call, CheckpointCalls

_CAST: Final = "aten._to_copy.default"


@final
@dataclass(slots=True)
class Verdict:
    """Whether the calls of one site may be plain.

    They stay as they are written if:

    - the second run writes to a tensor that existed before (a batch norm's statistics are updated twice), changes anything
      that its Python code reaches, or draws from a generator of Python or NumPy, or an explicit one;
    - it computes anything else than the first, or what a plain call saves would be out of date: weights, numeric settings or
      a flag of the script may have changed in between, or the result was overwritten;
    - it draws other random numbers (``preserve_rng_state=False``);
    - the call has a ``context_fn``, or is debugged, or there are several processes;
    - ``use_reentrant=True``, and gradients would be summed in another order or be there at all: a parameter is also used
      elsewhere, or has a hook or a gradient; no argument requires a gradient; tensors are passed within containers; there is
      more than one result; the first run, without gradients, gives other bits, or makes a tensor that the script keeps.

    Attributes:
        modules: the modules that its key names, by their ids.
        runs: how many calls were watched to the end.
        stays: whether a call of it must stay as it is written.
    """

    modules: tuple[weakref.ref[torch.nn.Module], ...] = ()
    runs: int = 0
    stays: bool = False

    @property
    def is_of_the_living(self) -> bool:
        """Whether all its modules are alive; otherwise other modules may have their ids by now."""
        return all(ref() is not None for ref in self.modules)

    @property
    def is_plain(self) -> bool:
        """Whether calls of this site may be plain."""
        return self.runs > 0 and not self.stays


@final
@dataclass(slots=True, eq=False)
class Finding:
    """What was found out about one call.

    Attributes:
        verdict: what is known about its site.
        reentrant: whether it is reentrant.
        leaves: the parameters that the second run of a reentrant call reached.
        again: the events in the recording of its unit between which the function ran a second time.
        is_fed: whether a gradient of its result has come.
    """

    verdict: Verdict
    reentrant: bool
    leaves: frozenset[int] = frozenset()
    again: tuple[int, int] = (0, 0)
    is_fed: bool = False

    def follow(self, result: Any) -> None:
        """Follow the gradients of the call's results.

        A reentrant call takes one that does not come for zeros, and makes gradients of its parameters from it.
        """
        def came(gradient: torch.Tensor | None) -> None:
            self.is_fed |= gradient is not None

        for tensor in tensors_in([result]):
            if tensor.requires_grad:
                tensor.register_hook(came)


@final
class Watched:
    """A function whose first two runs are watched; it holds neither arguments nor results."""

    def __init__(self, calls: CheckpointCalls, call: Call, finding: Finding) -> None:
        """Watch a call's function."""
        self._calls, self._function, self._preserves, self._finding = calls, call.function, call.preserves, finding
        self._footprint = Footprint()
        self._runs = 0
        self._trail: list[Any] = []
        self._numerics: Numerics | None = None
        self._versions: tuple[Any, ...] = ()
        self._results: list[tuple[torch.Tensor, int]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        self._runs += 1
        with self._calls.within():
            if self._runs == 1:
                return self._first(args, kwargs)
            return self._second(args, kwargs) if self._runs == 2 else self._function(*args, **kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        self._numerics = current()
        reentrant, trail = self._finding.reentrant, Trail(digests=not self._finding.reentrant)
        with self._footprint.following(), trail:
            result = self._function(*args, **kwargs)
        self._finding.verdict.stays |= trail.writes_outside or (reentrant and trail.leaves_behind(result))
        unchanged = any(result is a for a in args)
        self._trail = trail.found if not reentrant else [] if unchanged else [digest_of(result)]
        self._versions = versions_of(own_tensors(self._footprint.modules()))
        if not unchanged:
            self._results = [(version_probe(t), t._version) for t in tensors_in([result]) if not t.is_inference()]
        return result

    def _second(self, args: Any, kwargs: Any) -> Any:
        footprint, verdict = self._footprint, self._finding.verdict
        states, prints, given = RandomStates.now(), footprint.prints(), prints_of((args, kwargs))
        drawn = None if self._preserves else torch_states()
        start, trail = self._calls.events_so_far(), Trail(digests=not self._finding.reentrant)
        modules = footprint.modules()
        verdict.stays |= (
            self._numerics != current()
            or self._versions != versions_of(own_tensors(modules))
            or any(probe._version != version for probe, version in self._results)
        )
        contents = list(map(digest_of, buffers_of(modules)))  # code besides torch's operators may write buffers, too
        try:
            with footprint.following(), trail:
                result = self._function(*args, **kwargs)
        finally:  # torch ends the run, by an exception, when it has made the last saved tensor
            self._finding.again = start, self._calls.events_so_far()
            verdict.stays |= (
                states != RandomStates.now()
                or (drawn is not None and drawn != torch_states())
                or footprint.varies
                or not footprint.is_complete
                or changed(prints, footprint.prints(), exact=self._finding.reentrant)
                or differ(given, prints_of((args, kwargs)))
                or trail.writes_outside
                or contents != list(map(digest_of, buffers_of(modules)))
                or trail.found != self._trail[: len(trail.found)]
            )
            verdict.runs += 1
        if self._finding.reentrant:
            self._compare(result, args)
        return result

    def _compare(self, result: Any, args: Any) -> None:
        """Compare a reentrant call's result with the first one, and find the parameters that its backward will reach."""
        finding = self._finding
        leaves = [leaf for leaf in leaves_of(tensors_in([result])) if not any(leaf is a for a in args)]
        finding.leaves = frozenset(map(id, leaves))
        finding.verdict.stays |= (
            not isinstance(result, torch.Tensor)
            or not finding.is_fed
            or self._trail != [digest_of(result)]
            or any(is_hooked(leaf, self._calls.is_our_hook) for leaf in leaves)
            or any(m._backward_hooks or m._backward_pre_hooks for m in self._footprint.modules())
        )


def versions_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Which tensors these are, and how often each was written."""
    return tuple((id(t), t._version) for t in tensors if not t.is_inference())


def buffers_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The modules' own buffers."""
    return (b for m in modules for b in m._buffers.values() if b is not None)


@final
class Trail(Mode):
    """What a run computes.

    Attributes:
        found: each operator, with digests of its results, except for views; empty without digests.
        writes_outside: whether an operator writes to a storage that existed before.
    """

    def __init__(self, *, digests: bool) -> None:
        """Start with no operators."""
        super().__init__()
        self._digests = digests
        self.found: list[tuple[Any, Any]] = []
        self.writes_outside = False
        self._made: set[int] = set()
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and note what it computes."""
        kwargs = kwargs or {}
        if types and not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        if leaves_autograd_on(func):
            return call_under(self, func, args, kwargs)
        info = info_of(func)
        if info.mutates:
            written = (t for t, _ in written_by(info, args, kwargs) if on_storage(t))
            self.writes_outside |= any(t.untyped_storage()._cdata not in self._made for t in written)
        out = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return out
        given = {t.untyped_storage()._cdata for t in tensors_in([list(args), kwargs]) if on_storage(t)}
        made = [t for t in flatten(out) if isinstance(t, torch.Tensor) and on_storage(t)]
        fresh = [t for t in made if t.untyped_storage()._cdata not in given]
        self._made |= {t.untyped_storage()._cdata for t in fresh}
        if info.name != _CAST or given <= self._made:  # autocast keeps the weights that it has cast
            self._tensors += map(weakref.ref, fresh)
        if self._digests and not info.uninitialised:
            kept = [t for t in flatten(out) if not (info.opaque and isinstance(t, torch.Tensor) and t.dtype is torch.uint8)]
            self.found.append((func, tuple(map(digest_of, kept))))
        return out

    def leaves_behind(self, result: Any) -> bool:
        """Whether a tensor that was made is alive besides the result, and not on the same storage."""
        given = {t.untyped_storage()._cdata for t in tensors_in([result]) if on_storage(t)}
        alive = (t for ref in self._tensors if (t := ref()) is not None)
        return any(t.untyped_storage()._cdata not in given for t in alive)


def digest_of(result: Any) -> Any:
    """A digest of a tensor's bits, or a result that is no tensor itself; None for a tensor without bytes of its own."""
    if not isinstance(result, torch.Tensor):
        return repr(result)
    if not on_storage(result) or result.is_meta:
        return None
    if result.device == HOST:
        return digest(result)
    with beneath_autograd(), torch.no_grad():
        result = in_memory_order(result)
        if result.is_contiguous():
            return checksum(result.reshape(-1).view(torch.uint8))
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(result.element_size())
        return None if kind is None else int(result.view(kind).sum())


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that the graphs of tensors reach."""
    nodes = nodes_behind(map(node_of, tensors))
    return [leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None]
