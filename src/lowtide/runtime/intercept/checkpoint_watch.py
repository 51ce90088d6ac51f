"""Watches both runs of a checkpoint's function, to find out whether the second one could be left out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from lowtide.runtime.device.accelerator import HOST
from lowtide.runtime.intercept.dispatch_mode import Mode, make_way
from lowtide.runtime.intercept.script_effects import Footprint, RandomStates, changed, differ, prints_of, torch_states
from lowtide.runtime.numeric_settings import Numerics, current
from lowtide.runtime.storage.arguments import PLAIN_TYPES, flatten
from lowtide.runtime.storage.checksum import checksum, digest
from lowtide.runtime.storage.op_schema import info_of
from lowtide.runtime.tensors import beneath_autograd, node_of, on_storage, tensors_in

if TYPE_CHECKING:
    from lowtide.runtime.intercept.checkpoint_calls import Call, CheckpointCalls


@final
@dataclass(slots=True)
class Verdict:
    """Whether the calls of one site may be plain.

    They stay as they are written if:

    - the second run writes to a tensor that existed before (a batch norm's statistics are updated twice), changes anything
      that its Python code reaches, or draws from a generator of Python or NumPy, or an explicit one;
    - it computes anything else than the first: numeric settings may have changed in between, or a flag of the script;
    - it draws other random numbers (``preserve_rng_state=False``);
    - the call has a ``context_fn``, or is debugged;
    - ``use_reentrant=True``, and gradients would be summed in another order or be there at all: a parameter is also used
      elsewhere, or has a hook; no argument requires a gradient; tensors are passed within containers; there is more than one
      result; or the first run, without gradients, gives other bits.

    Attributes:
        runs: how many calls were watched to the end.
        stays: whether a call of it must stay as it is written.
        modules: the modules that it runs and that have buffers.
    """

    runs: int = 0
    stays: bool = False
    modules: tuple[weakref.ref[torch.nn.Module], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether calls of this site may be plain."""
        return self.runs > 0 and not self.stays

    def versions(self) -> tuple[tuple[int, int], ...]:
        """The buffers of its modules, and how often each was written."""
        modules = (m for ref in self.modules if (m := ref()) is not None)
        buffers = (b for m in modules for b in m._buffers.values() if b is not None and not b.is_inference())
        return tuple((id(b), b._version) for b in buffers)


@final
@dataclass(slots=True, eq=False)
class Finding:
    """What was found out about one call.

    Attributes:
        verdict: what is known about its site.
        reentrant: whether it is reentrant.
        leaves: the parameters that the second run of a reentrant call reached.
        again: the events in the recording of its unit between which the function ran a second time.
    """

    verdict: Verdict
    reentrant: bool
    leaves: frozenset[int] = frozenset()
    again: tuple[int, int] = (0, 0)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        self._runs += 1
        with self._calls.within():
            if self._runs == 1:
                return self._first(args, kwargs)
            return self._second(args, kwargs) if self._runs == 2 else self._function(*args, **kwargs)

    def _first(self, args: Any, kwargs: Any) -> Any:
        self._numerics = current()
        trail = Trail()
        with self._footprint.following(), trail.followed(not self._finding.reentrant):
            result = self._function(*args, **kwargs)
        if self._finding.reentrant and not any(result is a for a in args):
            trail.add("result", result)
        self._trail = trail.found
        return result

    def _second(self, args: Any, kwargs: Any) -> Any:
        footprint, verdict = self._footprint, self._finding.verdict
        states, prints, given = RandomStates.now(), footprint.prints(), prints_of((args, kwargs))
        drawn = None if self._preserves else torch_states()
        start, trail = self._calls.events_so_far(), Trail()
        verdict.stays |= self._numerics != current()
        try:
            with footprint.following(), trail.followed(not self._finding.reentrant):
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
                or trail.found != self._trail[: len(trail.found)]
            )
            verdict.modules = tuple(weakref.ref(m) for m in footprint.modules() if m._buffers)
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
            or self._trail != [("result", digest_of(result))]
            or any(self._calls.is_hooked(leaf) for leaf in leaves)
            or any(m._backward_hooks or m._backward_pre_hooks for m in self._footprint.modules())
        )


@final
class Trail(Mode):
    """What a run computes: each operator, with digests of its results, except for views.

    A reentrant checkpoint's first run has no gradients and may run other operators: of it, only the result is compared.

    Attributes:
        found: the operators so far.
    """

    def __init__(self) -> None:
        """Start with no operators."""
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def followed(self, on: bool) -> AbstractContextManager[Any]:
        """Follow the operators of a block, if ``on``."""
        return self if on else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and note what it computes."""
        if types and not PLAIN_TYPES.issuperset(types):
            return make_way(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        info = info_of(func)
        if not (info.uninitialised or getattr(func, "is_view", False)):
            made = [t for t in flatten(out) if not (info.opaque and isinstance(t, torch.Tensor) and t.dtype is torch.uint8)]
            self.found.append((func, tuple(map(digest_of, made))))
        return out

    def add(self, name: str, result: Any) -> None:
        """Note a result under a name."""
        self.found.append((name, digest_of(result)))


def digest_of(result: Any) -> Any:
    """A digest of a tensor's bits, or a result that is no tensor itself; None for a tensor without bytes of its own."""
    if not isinstance(result, torch.Tensor):
        return repr(result)
    if not on_storage(result) or result.is_meta:
        return None
    if result.device == HOST:
        return digest(result)
    with beneath_autograd(), torch.no_grad():
        if result.is_contiguous():
            return checksum(result.reshape(-1).view(torch.uint8))
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(result.element_size())
        return None if kind is None else int(result.view(kind).sum())


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that the graphs of tensors reach."""
    found: dict[int, torch.Tensor] = {}
    stack = [node for tensor in tensors if (node := node_of(tensor)) is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(found.values())
