"""Handles the script's own calls of ``torch.utils.checkpoint.checkpoint``: a plan decides better what to recompute.

A checkpoint drops what its function saved, and runs the function a second time in the backward. A call is *plain* if the
function runs once instead, as any other code does. The results have the same bits if the second run has no other effect than
to make the saved tensors again. So calls are first *watched*: they run as written, and the effects of the second run
are looked for. What keeps a call as it is written is listed at :class:`.checkpoint_watch.Verdict`.

Source: ``torch/utils/checkpoint.py`` (torch 2.13): ``checkpoint``, ``CheckpointFunction``, and
``_checkpoint_without_reentrant_generator``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from torch.utils import checkpoint as of_torch

import torch
from lowtide.base.lever_catalogue import CHECKPOINTS
from lowtide.runtime.intercept.checkpoint_watch import Finding, Verdict, Watched, buffers_of, leaves_of, versions_of
from lowtide.runtime.intercept.inplace_accumulation import graph_task
from lowtide.runtime.intercept.script_effects import RandomStates, restore_torch, torch_states
from lowtide.runtime.monkeypatch import Wraps
from lowtide.runtime.run_figures import LeverFigures
from lowtide.runtime.tensors import is_dense, modules_of, tensors_in
from lowtide.runtime.torch_state import in_process_group

_HOOK: Final = "__dynamo_disable"
"""Where ``torch._disable_dynamo`` keeps what it calls instead of the function: all names of ``checkpoint`` lead there."""
_SITES: Final = 256
"""Sites, at least, after which those are forgotten whose modules are gone, or that were never watched to the end."""
_DEEPEST: Final = 4
"""Partial functions, methods and closures within others that a call's site is made from."""


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of ``checkpoint``.

    Attributes:
        function: the function to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        reentrant: whether the backward runs another backward within.
        preserves: whether the second run draws the same random numbers.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reentrant: bool
    preserves: bool

    @classmethod
    def of(cls, function: Any, *args: Any, **kwargs: Any) -> Call | None:
        """The call with these arguments of ``checkpoint``; None if it uses an option that must be left to torch."""
        reentrant = kwargs.pop("use_reentrant", None)
        context = kwargs.pop("context_fn", of_torch.noop_context_fn)
        debug = kwargs.pop("debug", False)
        preserves = kwargs.pop("preserve_rng_state", True)
        for name in ("determinism_check", "early_stop"):
            kwargs.pop(name, None)
        debugged = debug or getattr(of_torch, "_checkpoint_debug_enabled", None)
        reentrant = reentrant is None or bool(reentrant)
        if context is not of_torch.noop_context_fn or debugged or (reentrant and kwargs):
            return None
        return cls(function, args, kwargs, reentrant, bool(preserves))

    def is_ordinary(self) -> bool:
        """Whether its arguments allow a plain call with the same gradients."""
        if not self.reentrant:
            return True
        flat = [a for a in self.args if isinstance(a, torch.Tensor)]
        return any(t.requires_grad for t in flat) and len(tensors_in(list(self.args))) == len(flat)

    def site(self) -> Site:
        """What calls of the same code on the same modules have in common."""
        site = Site([self.reentrant, self.preserves], [])
        site.add(self.function)
        for item in (*self.args, *self.kwargs.values()):
            if not isinstance(item, torch.Tensor):
                site.add(item)
        return site


@final
@dataclass(slots=True)
class Site:
    """What a call's function is made from.

    Attributes:
        key: the code, modules and constants, in a form that can be compared.
        modules: the modules.
    """

    key: list[Any]
    modules: list[torch.nn.Module]

    def add(self, item: Any, depth: int = 0) -> None:
        """Add a part of the function, or an argument."""
        if depth > _DEEPEST:
            return
        if isinstance(item, functools.partial):
            for part in (item.func, *item.args, *item.keywords.values()):
                self.add(part, depth + 1)
        elif isinstance(item, torch.nn.Module):
            self.key += [id(item), item.training]
            self.modules.append(item)
        elif hasattr(item, "__self__") and hasattr(item, "__func__"):
            self.add(item.__func__, depth + 1)
            self.add(item.__self__, depth + 1)
        elif hasattr(item, "__code__"):
            self.key.append(item.__code__)
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # the variable has no value yet
                    self.add(cell.cell_contents, depth + 1)
        elif isinstance(item, (int, str, type(None))):
            self.key.append(item)
        elif isinstance(item, (list, tuple)):
            for element in item:
                self.add(element, depth + 1)
        elif callable(item):
            self.key.append(type(item))

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """The buffers of the modules and of those within them, and how often each was written."""
        modules = {id(m): m for root in self.modules for m in modules_of(root)}
        return versions_of(buffers_of(modules.values()))


@final
class CheckpointCalls:
    """Handles the calls of ``checkpoint`` in the thread that Lowtide follows; one per runtime.

    Attributes:
        watches: whether calls of which nothing is known are watched now; outside units, none are.
        plain: how many calls were plain.
        kept: how many were left as written although calls were to be plain.
    """

    def __init__(
        self, is_ours: Callable[[], bool], is_our_hook: Callable[[Any], bool], events_so_far: Callable[[], int]
    ) -> None:
        """Handle nothing yet.

        Args:
            is_ours: whether Lowtide follows the code that runs: the calling thread, and what autograd saves in it.
            is_our_hook: whether a hook of a parameter is Lowtide's own.
            events_so_far: returns how many events of the running unit have been recorded.
        """
        self.events_so_far = events_so_far
        self.watches = False
        self.plain = self.kept = 0
        self._is_ours, self.is_our_hook = is_ours, is_our_hook
        self._wraps = Wraps()
        self._as_torch: Callable[[], Callable[..., Any]]
        self._within = 0
        self._may_be_plain = self._accumulates = False
        self._room = _SITES
        self._scope: Any = None
        self._verdicts: dict[Any, Verdict] = {}
        self._findings: list[Finding] = []
        self._outside: set[int] = set()

    def install(self) -> None:
        """Handle calls from now on, by whatever name the script knows the function."""
        function: Any = getattr(of_torch.checkpoint, "__wrapped__", None)
        if function is None:  # another version of torch: its calls stay as they are written
            return
        before = vars(function).get(_HOOK)
        setattr(function, _HOOK, self._called)

        def undo() -> None:
            if before is None:
                delattr(function, _HOOK)
            else:
                setattr(function, _HOOK, before)

        def as_torch() -> Callable[..., Any]:
            nonlocal before
            if before is None:
                before = torch._dynamo.disable(function, wrapping=False)  # type: ignore[no-untyped-call]
            found: Callable[..., Any] = before
            return found

        self._as_torch = as_torch
        self._wraps.also(undo)

    def remove(self) -> None:
        """Leave calls to torch again."""
        self._wraps.undo()
        self.watches = self._may_be_plain = False

    # --- units ---------------------------------------------------------------------------------------------------------

    def unit_begins(self, scope: Any, *, plain: bool, watches: bool, accumulates: bool) -> None:
        """A unit begins.

        Args:
            scope: what it has in common with those for which the same verdicts are valid.
            plain: whether calls run plain where that gives the same results.
            watches: whether calls of which nothing is known are watched.
            accumulates: whether gradients exist already.
        """
        self._scope, self._may_be_plain, self.watches, self._accumulates = scope, plain, watches, accumulates

    def backward_begins(self, outputs: Iterable[Any], *, differentiable: bool) -> None:
        """A backward begins: no call that it goes through may be plain if it builds a graph of its own."""
        for finding in self._findings:
            finding.verdict.stays |= differentiable
        if any(finding.reentrant for finding in self._findings):
            self._outside |= set(map(id, leaves_of(tensors_in(list(outputs)))))

    def unit_ends(self) -> list[tuple[int, int]]:
        """The unit is over.

        Returns:
            For each call that was watched in it and may be plain from now on, the events of its second run.
        """
        findings, self._findings = self._findings, []
        outside, self._outside = self._outside, set()
        self.watches = self._may_be_plain = False
        met = Counter(leaf for finding in findings for leaf in finding.leaves)
        shared = outside | {leaf for leaf, times in met.items() if times > 1}
        for finding in findings:
            finding.verdict.stays |= not shared.isdisjoint(finding.leaves)
        return [finding.again for finding in findings if finding.verdict.is_plain]

    def figures(self) -> list[LeverFigures]:
        """Figures of this memory optimization, for the summary; empty if the script has no checkpoints."""
        if not self._verdicts:
            return []
        text = f"{self.plain} calls of torch.utils.checkpoint ran as plain calls"
        if self.kept:
            text += f"; {self.kept} stayed as written, as running their functions only once could change the results"
        return [LeverFigures(name=CHECKPOINTS, used=self.plain > 0, text=text)]

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """A call that runs as written: those within it do, too."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    # --- calls ---------------------------------------------------------------------------------------------------------

    def _called(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        leave = (
            not (self._may_be_plain or self.watches) or self._within or not self._is_ours()
            or not torch.is_grad_enabled() or graph_task() >= 0 or in_process_group()
        )  # fmt: skip
        call = None if leave else Call.of(function, *args, **dict(kwargs))
        if call is None or not call.is_ordinary():
            with self.within():
                return self._as_torch()(function, *args, **kwargs)
        site = call.site()
        verdict = self._verdict_of(site)
        if self._may_be_plain and verdict.is_plain and not (call.reentrant and self._accumulates):
            return self._run_plain(call, site, verdict, kwargs)
        self.kept += self._may_be_plain
        if verdict.stays or verdict.runs or not self.watches:
            with self.within():
                return self._as_torch()(function, *args, **kwargs)
        finding = Finding(verdict, call.reentrant)
        self._findings.append(finding)
        with self.within():
            result = self._as_torch()(Watched(self, call, finding), *args, **kwargs)
        if call.reentrant:
            finding.follow(result)
        return result

    def _verdict_of(self, site: Site) -> Verdict:
        key = (self._scope, *site.key)
        found = self._verdicts.get(key)
        if found is None or not found.is_of_the_living:
            if len(self._verdicts) >= self._room:  # modules that are made for each call have ever new sites
                self._verdicts = {k: v for k, v in self._verdicts.items() if v.runs and v.is_of_the_living}
                self._room = max(_SITES, 2 * len(self._verdicts))
            found = self._verdicts[key] = Verdict(tuple(map(weakref.ref, site.modules)))
        return found

    def _run_plain(self, call: Call, site: Site, verdict: Verdict, options: dict[str, Any]) -> Any:
        """Run a call's function once, and see to it that this has the effects of running it as written."""
        states, torchs, buffers = RandomStates.now(), torch_states(), site.buffers()
        args = tuple(_entering(a) for a in call.args) if call.reentrant else call.args
        result = call.function(*args, **call.kwargs)
        if states != RandomStates.now() or (not call.preserves and torchs != torch_states()):
            verdict.stays = True
            states.restore()
            restore_torch(torchs)
            with self.within():
                return self._as_torch()(call.function, *call.args, **options)
        if buffers != site.buffers():  # a second run would write once more, in the backward
            verdict.stays = True
            for tensor in [t for t in tensors_in([result]) if t.requires_grad][:1]:
                tensor.register_hook(lambda _: self._run_again(call, torchs))
        self.plain += 1
        return result

    def _run_again(self, call: Call, states: tuple[Any, ...]) -> None:
        """Run a call's function for its other effects, with the random numbers of the first run."""
        now = torch_states()
        restore_torch(states)
        with torch.no_grad(), self.within():
            call.function(*call.args, **call.kwargs)
        restore_torch(now)


def _entering(argument: Any) -> Any:
    """An argument of a reentrant call: the gradients of its uses within are summed before those of its other uses are added.

    As ``AccumulateGrad`` does for the detached copy that torch passes, the sum gets the strides of the argument.
    """
    if not (isinstance(argument, torch.Tensor) and argument.requires_grad):
        return argument
    entered = torch.ops.aten.alias.default(argument)
    shape, strides = argument.shape, argument.stride()
    dense = argument.is_contiguous() or is_dense(argument)

    def arranged(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.layout is not torch.strided:
            return None
        if not dense:
            return None if gradient.is_contiguous() else gradient.contiguous()
        if all(size == 1 or a == b for size, a, b in zip(shape, gradient.stride(), strides, strict=True)):
            return None
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    entered.register_hook(arranged)
    return entered
