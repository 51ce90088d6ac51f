"""Where a step of a training script ends, in any framework: who marks it, and who is told.

Marks come from the script (``lowtide.step()``, or a line that it prints), from torch's optimizers, from Keras's batches, from
torch's data loaders, or, where none of these come, from the clock. Only the standard library is imported here.
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
    """Who marked a step; where several do, the lowest counts."""

    SCRIPT = 0
    OPTIMIZER = 1
    KERAS = 2
    LOADER = 3
    CLOCK = 4


listeners: Final[list[Callable[[MarkSource, float | None], None]]] = []
"""Who is told of each mark, with the step's loss where it is known."""


def mark(loss: float | None = None) -> None:
    """A step of the script is over (``lowtide.step()``). Does nothing where nobody listens."""
    tell(MarkSource.SCRIPT, loss)


def tell(kind: MarkSource, loss: float | None = None) -> None:
    """Tell all listeners of a mark."""
    for listener in listeners:
        listener(kind, loss)


# --- torch ----------------------------------------------------------------------------------------------------------------


@final
class Rounds:
    """What a training step is where optimizers end it, for every verb that counts such steps: one round of the optimizers.

    Optimizers that were made since the last step of any make up a round, and a step of training has ended when all of them
    have stepped: one, a GAN's two, or one for each parameter. One that steps again before the others have shows that these do
    not take part (any more): from then on those that did are the round, and what they did before counts as a step, too. One
    that does not belong to the round (it comes once in five steps, say) ends none. So a fold or a trial that makes its own
    optimizer is counted from its first step on, whether the former one is kept or not.

    Optimizers are only compared by identity, and not kept alive.
    """

    def __init__(self) -> None:
        """No optimizer was made."""
        self._fresh = weakref.WeakSet[Any]()
        self._cast = weakref.WeakSet[Any]()
        self._stepped = weakref.WeakSet[Any]()
        self._missing = weakref.WeakSet[Any]()

    def made(self, optimizer: Any) -> None:
        """An optimizer was made; one of which this is not told is met at its first step."""
        self._fresh.add(optimizer)

    def stepped(self, optimizer: Any) -> int:
        """An optimizer has stepped: so many steps of training are over by that, 0 to 2."""
        ended = 0
        if optimizer in self._fresh:
            self._begin(self._fresh)
            self._fresh = weakref.WeakSet()
        else:
            self._fresh.clear()
            if optimizer in self._stepped:  # what is missing does not come
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
    """Tell of each optimizer of torch that is made (``torch.optim.Optimizer``); returns what ends that."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands for it
        original(optimizer, *args, **kwargs)
        told(optimizer)

    kind.__init__ = __init__
    return lambda: setattr(kind, "__init__", original)


@functools.cache  # once, whoever else listens: each mark is told to all
def watch_optimizers(module: Any) -> None:
    """Mark a step where a round of torch's optimizers is over (``torch.optim.optimizer``)."""
    rounds = Rounds()

    def stepped(optimizer: Any, *_: Any) -> None:
        for _once in range(rounds.stepped(optimizer)):
            tell(MarkSource.OPTIMIZER)

    watch_made(module.Optimizer, rounds.made)
    module.register_optimizer_step_post_hook(stepped)


@functools.cache
def watch_loaders(module: Any) -> None:
    """Mark a step at each batch of a data loader (``torch.utils.data.dataloader``), for loops without an optimizer."""
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
    """Mark a step at each of Keras's batches."""

    class Batches(keras.callbacks.Callback):  # type: ignore[misc]
        """One mark per batch, with its loss."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """A batch is over."""
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


# --- imports that are waited for ------------------------------------------------------------------------------------------


@final
class WhenImported(importlib.abc.MetaPathFinder):
    """Calls something once a module has been imported by the script."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Wait for a module; if it is there already, it is now."""
        self._name, self._then = name, then
        if name in sys.modules:
            then(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader wrapped."""
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))  # others may wait for it too
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
        """Wait no more."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
