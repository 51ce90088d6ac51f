"""Detects where a step of a training script ends, in any framework, and notifies listeners.

Marks come from the script (``lowtide.step()``, or a line that it prints), from torch's optimizers, from Keras's batches, from
torch's data loaders or, if there are none of these, from the clock. Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.abc
import importlib.machinery
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, final


class MarkSource(enum.IntEnum):
    """The source of a mark; if there are several, the lowest counts."""

    SCRIPT = 0
    OPTIMIZER = 1
    KERAS = 2
    LOADER = 3
    CLOCK = 4


listeners: Final[list[Callable[[MarkSource, float | None], None]]] = []
"""Functions that are called for each mark, with its source and the step's loss (None if unknown)."""


def mark(loss: float | None = None) -> None:
    """Mark the end of a step from the script (``lowtide.step()``). Does nothing if there is no listener."""
    tell(MarkSource.SCRIPT, loss)


def tell(kind: MarkSource, loss: float | None = None) -> None:
    """Call all listeners for a mark."""
    for listener in listeners:
        listener(kind, loss)


# --- torch ----------------------------------------------------------------------------------------------------------------


@final
class Rounds:
    """Counts training steps as rounds of the optimizers, in the same way for every command that counts them.

    The optimizers that were constructed since any optimizer last stepped form a round; a training step ends when all of them
    have stepped: a single one, a GAN's two, or one per parameter. If one steps again before the others have stepped, the
    others do not take part (any more): those that have stepped are the round from then on, and their steps so far count as a
    training step too. An optimizer outside the round (one that steps once in five steps, say) ends no step. So a fold or a
    trial that constructs its own optimizer is counted from its first step, whether the previous optimizer is kept or not.

    Optimizers are compared by identity and not kept alive.
    """

    def __init__(self) -> None:
        """Start without optimizers."""
        self._fresh = weakref.WeakSet[Any]()
        self._cast = weakref.WeakSet[Any]()
        self._stepped = weakref.WeakSet[Any]()
        self._missing = weakref.WeakSet[Any]()

    def made(self, optimizer: Any) -> None:
        """Note that an optimizer was constructed; one that was not noted is taken in at its first step."""
        self._fresh.add(optimizer)

    def stepped(self, optimizer: Any) -> int:
        """Note that an optimizer has stepped; return how many training steps that ends, 0 to 2."""
        ended = 0
        if optimizer in self._fresh:
            self._begin(self._fresh)
            self._fresh = weakref.WeakSet()
        else:
            self._fresh.clear()
            if optimizer in self._stepped:  # the missing ones do not take part
                ended = 1
                self._begin(self._stepped)
                self._stepped = weakref.WeakSet()
        self._stepped.add(optimizer)
        self._missing.discard(optimizer)
        if not len(self._missing):
            ended += 1
            self._begin(self._cast if len(self._cast) else self._stepped)
            self._stepped = weakref.WeakSet()
        return ended

    def _begin(self, cast: weakref.WeakSet[Any]) -> None:
        self._cast = cast
        self._missing = weakref.WeakSet(cast)


def watch_made(kind: Any, told: Callable[[Any], None]) -> Callable[[], None]:
    """Call `told` with each torch optimizer once it is constructed; return a function that ends this.

    Args:
        kind: ``torch.optim.Optimizer``.
        told: called with the optimizer.
    """
    original = kind.__init__

    @functools.wraps(original)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces it
        original(optimizer, *args, **kwargs)
        told(optimizer)

    kind.__init__ = __init__
    return lambda: setattr(kind, "__init__", original)


@functools.cache  # once per process: every mark goes to all listeners
def watch_optimizers(module: Any) -> None:
    """Mark a step at the end of each round of torch's optimizers; `module` is ``torch.optim.optimizer``."""
    rounds = Rounds()

    def stepped(optimizer: Any, *_: Any) -> None:
        for _once in range(rounds.stepped(optimizer)):
            tell(MarkSource.OPTIMIZER)

    watch_made(module.Optimizer, rounds.made)
    module.register_optimizer_step_post_hook(stepped)


@functools.cache
def watch_loaders(module: Any) -> None:
    """Mark a step at each batch of a torch data loader, for loops without an optimizer.

    Args:
        module: ``torch.utils.data.dataloader``.
    """
    kind = module._BaseDataLoaderIter
    original = kind.__next__

    @functools.wraps(original)
    def following(self: Any) -> Any:
        found = original(self)
        tell(MarkSource.LOADER)
        return found

    kind.__next__ = following


# --- Keras ----------------------------------------------------------------------------------------------------------------


@functools.cache
def watch_keras(keras: Any) -> None:
    """Mark a step at each training batch of Keras (``fit`` and ``train_on_batch``)."""

    class Batches(keras.callbacks.Callback):  # type: ignore[misc]
        """Marks each batch, with its loss."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Mark the end of a batch."""
            del batch
            tell(MarkSource.KERAS, _number((logs or {}).get("loss")))

    def fitting(original: Any) -> Any:
        @functools.wraps(original)
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("callbacks")
            if given is None or isinstance(given, (list, tuple)):
                kwargs["callbacks"] = [*(given or ()), Batches()]
            return original(self, *args, **kwargs)

        return fit

    def training(original: Any) -> Any:
        @functools.wraps(original)
        def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            first = found[0] if isinstance(found, (list, tuple)) else found
            tell(MarkSource.KERAS, _number(first.get("loss") if isinstance(first, dict) else first))
            return found

        return train_on_batch

    keras.Model.fit = fitting(keras.Model.fit)
    keras.Model.train_on_batch = training(keras.Model.train_on_batch)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# --- lines ---------------------------------------------------------------------------------------------------------------


def watch_lines(pattern: str) -> None:
    """Mark a step at each line of standard output that matches a regular expression."""
    wanted, stream = re.compile(pattern), sys.stdout
    original, rest = stream.write, ""

    def write(text: str) -> int:
        nonlocal rest
        written = original(text)
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if wanted.search(line):
                mark()
        return written

    stream.write = write  # type: ignore[method-assign]


# --- import hooks ---------------------------------------------------------------------------------------------------------


@final
class WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function with a module once the script has imported it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Wait for the import of a module; if it has already been imported, call `then` at once."""
        self._name, self._then = name, then
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with its loader wrapped; None for any other module."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))  # others may await it too
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            loader.exec_module = execute  # type: ignore[method-assign]
            then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def forget(self) -> None:
        """Stop waiting."""
        if sys.meta_path is not None:  # it is None once the interpreter ends
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
