"""What a process takes, in any framework: resident and unique set size, the heap, child processes; step by step.

Steps are marked by :func:`mark` (``lowtide.step()``), by Keras's batches (``fit`` gets a callback, ``train_on_batch`` is
wrapped), or, where neither comes, by time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, final

import psutil

from lowtide.live.native import preloaded
from lowtide.store import ProcessRow, Writer

INTERVAL_SECONDS: Final = 0.02
"""Between two looks at the resident size (one read of ``/proc``)."""
STEP_SECONDS: Final = 1.0
"""A step, where the script marks none."""
_PAGE: Final = resource.getpagesize()

_current: list[Coarse] = []


def mark(loss: float | None = None) -> None:
    """A step of the script is over. Does nothing where no recording is made."""
    for watcher in _current:
        watcher.step(loss)


@final
class Coarse:
    """Watches the process from a thread of its own."""

    def __init__(self, writer: Writer) -> None:
        """Nothing is watched yet."""
        self._writer = writer
        self._process = psutil.Process()
        self._heap = preloaded()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lowtide", daemon=True)
        self._began = self._since = time.perf_counter()
        self._highest = self._before = self._resident()
        self._number = 0
        self._marked = False

    def start(self) -> None:
        """Begin to watch."""
        _current.append(self)
        self._reset_heap()
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; the time since the last step is a step of its own."""
        _current.remove(self)
        self._stop.set()
        self._thread.join()
        self._close(None)

    def step(self, loss: float | None) -> None:
        """A step is over."""
        self._marked = True
        self._close(loss)

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            with self._lock:
                self._highest = max(self._highest, self._resident())
            if not self._marked and time.perf_counter() - self._since >= STEP_SECONDS:
                self._close(None)

    def _resident(self) -> int:
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - fifty times a second
                return int(file.read().split()[1]) * _PAGE
        except OSError:  # not Linux
            return int(self._process.memory_info().rss)

    def _reset_heap(self) -> None:
        if self._heap is not None:
            self._heap.heap_peak = self._heap.heap_live

    def _close(self, loss: float | None) -> None:
        now = time.perf_counter()
        resident = self._resident()
        with self._lock:
            highest = max(self._highest, resident)
            row = ProcessRow(
                step=self._number, start=self._since - self._began, seconds=now - self._since, resident_bytes=resident,
                highest_bytes=highest, change_bytes=resident - self._before, unique_bytes=self._unique(),
                children_bytes=self._children(), heap_bytes=0 if self._heap is None else int(self._heap.heap_live),
                heap_peak_bytes=0 if self._heap is None else int(self._heap.heap_peak), loss=loss, marked=self._marked,
            )
            self._number += 1
            self._since, self._highest, self._before = now, resident, resident
            self._reset_heap()
            self._writer.process(row)

    def _unique(self) -> int:
        with contextlib.suppress(psutil.Error, AttributeError):
            return int(self._process.memory_full_info().uss)
        return 0

    def _children(self) -> int:
        """Proportional set size of all child processes (loader workers): pages that they share are counted once."""
        total = 0
        with contextlib.suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error, AttributeError):
                    info = child.memory_full_info()
                    total += int(getattr(info, "pss", info.uss))
        return total


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
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
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


def watch_keras(keras: Any) -> None:
    """Mark a step at each of Keras's batches."""

    class Batches(keras.callbacks.Callback):  # type: ignore[misc]
        """One mark per batch, with its loss."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """A batch is over."""
            del batch
            mark(_number((logs or {}).get("loss")))

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
            mark(_number(first.get("loss") if isinstance(first, dict) else first))
            return found

        return train_on_batch

    keras.Model.fit = fitting(keras.Model.fit)
    keras.Model.train_on_batch = training(keras.Model.train_on_batch)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None

