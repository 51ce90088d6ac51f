"""Finds what grows in a process: allocating lines, types, containers, tensors, autograd graphs, native stacks.

Tracing slows a process down and makes it larger, so a separate process is run for the census, after the verdict. Tracing
begins at the first look, and growth is measured from the second look to the last, so that objects which are merely replaced
(a ring buffer's) do not count as growth. Standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import json
import os
import site
import sys
import sysconfig
import tracemalloc
import types
from typing import Any, Final, final

from lowtide.probe.holder_names import HERE, holder_of

FRAMES: Final = 16
"""Stack frames kept per allocation."""
TOP: Final = 12
"""Most entries reported of each kind."""
LEAST_LENGTH: Final = 8
"""Shortest container whose length is followed."""
NODES: Final = 200_000
"""Most nodes of an autograd graph that are counted."""
_LIBRARIES: Final = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *(sysconfig.get_path(n) for n in ("stdlib", "platstdlib"))}
)
_OURS: Final = ("torch.storage.UntypedStorage",)
"""Types whose instances the census itself creates."""
_FOUND: Final = (list, dict, set, collections.deque)


def users(filename: str) -> bool:
    """Whether a source file is the user's own: neither a library's, nor generated, nor the probe's."""
    return not filename.startswith((*_LIBRARIES, "<", HERE))


@final
class Census:
    """Looks at the process several times, and reports what grew between the second look and the last."""

    def __init__(self, folder: str, *, deep: bool) -> None:
        """Trace nothing yet.

        Args:
            folder: where findings are written.
            deep: whether to record native stacks with memray instead of tracing Python allocations.
        """
        self._folder, self._deep = folder, deep
        self._looks = 0
        self._before: dict[str, Any] = {}
        self._tracker: Any = None
        self._mode: Any = None

    def forget(self) -> None:
        """Start again: the looks so far were between marks of another source."""
        self._looks, self._before = 0, {}

    def look(self, step: int, *, kind: int, last: bool) -> None:
        """Look at the process after a step.

        Args:
            step: number of the step.
            kind: source of the marks (a ``MarkSource``).
            last: whether this is the last look, which writes the findings.
        """
        self._looks += 1
        if self._looks == 1 and not last:
            if not self._deep:
                tracemalloc.start(FRAMES)
                if self._mode is None:
                    self._tag_tensors()
            return
        if last and self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            self._tracker = None
        now = self._now(step)
        if not self._before:
            self._before = now
            if self._deep and not last:
                self._trace_natively()
        if last:
            if self._mode is not None:
                self._mode.__exit__(None, None, None)
                self._mode = None
            found = {"kind": kind, **self._grown(self._before, now)}
            tracemalloc.stop()
            with open(f"{self._folder}/census-{os.getpid()}", "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")

    # --- looking -----------------------------------------------------------------------------------------------------

    def _now(self, step: int) -> dict[str, Any]:
        lines: dict[Any, list[int]] = {}
        if tracemalloc.is_tracing():
            for found in tracemalloc.take_snapshot().statistics("traceback"):
                key = tuple((f.filename, f.lineno) for f in found.traceback)
                lines[key] = [found.size, found.count]
        objects = gc.get_objects()
        kinds = collections.Counter(map(type, objects))
        lengths = {id(o): (type(o), len(o)) for o in objects if type(o) in _FOUND and len(o) >= LEAST_LENGTH}
        memos = {id(o): o.cache_info().currsize for o in objects if type(o) is functools._lru_cache_wrapper}
        tensors, graph = self._tensors(objects)
        del objects
        return {
            "step": step,
            "lines": lines,
            "types": {f"{t.__module__}.{t.__qualname__}": n for t, n in kinds.items()},
            "lengths": lengths,
            "memos": memos,
            "tensors": tensors,
            "graph": graph,
        }

    def _tensors(self, objects: list[Any]) -> tuple[dict[Any, list[int]], int]:
        """Bytes and number of live tensors by shape, dtype, module and source line; and the size of the largest graph.

        The size is the highest number of autograd nodes behind one of the last `TOP` tensors that have any.
        """
        torch: Any = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):
            return {}, 0
        found: dict[Any, list[int]] = {}
        seen: set[int] = set()
        heads = []
        names = _module_names(_of(objects, torch.nn.Module))
        for thing in _of(objects, torch.Tensor):
            with contextlib.suppress(Exception):  # a tensor subclass may refuse any of this
                source, module = getattr(thing, "_lowtide_made", ("", 0))
                storage = thing.untyped_storage()
                size = 0 if storage.data_ptr() in seen else storage.nbytes()
                seen.add(storage.data_ptr())
                entry = found.setdefault((tuple(thing.shape), str(thing.dtype), names.get(module, ""), source), [0, 0])
                entry[0] += size
                entry[1] += 1
                if thing.grad_fn is not None:
                    heads.append(thing.grad_fn)
        return found, max((_nodes(head) for head in heads[-TOP:]), default=0)

    def _tag_tensors(self) -> None:
        """From now on, tag each tensor that a torch call from Python returns with its line and module (``_lowtide_made``)."""
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        running: list[int] = []

        class Tag(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
            """Tags results."""

            def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for part in result if isinstance(result, (tuple, list)) else (result,):
                    if type(part) is torch.Tensor and not hasattr(part, "_lowtide_made"):
                        part._lowtide_made = _caller(), running[-1] if running else 0
                return result

        def enters(module: Any, *_: Any) -> None:
            running.append(id(module))

        def leaves(*_: Any) -> None:
            if running:
                running.pop()

        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(enters)
        hooks.register_module_forward_hook(leaves, always_call=True)
        self._mode = Tag()
        self._mode.__enter__()

    def _trace_natively(self) -> None:
        with contextlib.suppress(ImportError):
            import memray

            destination = memray.FileDestination(f"{self._folder}/native-{os.getpid()}", overwrite=True)
            self._tracker = memray.Tracker(destination=destination, native_traces=True)
            self._tracker.__enter__()

    # --- reporting ---------------------------------------------------------------------------------------------------

    def _grown(self, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        steps = max(1, now["step"] - before["step"])
        least = steps / 4
        lines = []
        for frames, (size, count) in now["lines"].items():
            old = before["lines"].get(frames, (0, 0))
            ours = any(name.startswith(HERE) for name, _ in frames)
            if size - old[0] > 0 and count - old[1] >= least / 2 and not ours:
                lines.append({"bytes": size - old[0], "count": count - old[1], **_place(frames)})
        kinds = [
            {"name": name, "count": n - before["types"].get(name, 0)}
            for name, n in now["types"].items()
            if n - before["types"].get(name, 0) >= least and name not in _OURS
        ]
        tensors = []
        for key, (size, count) in now["tensors"].items():
            old = before["tensors"].get(key, (0, 0))
            if count - old[1] >= least / 2:
                shape, dtype, module, source = key
                tensors.append(
                    {
                        "bytes": size - old[0],
                        "count": count - old[1],
                        "name": f"{dtype}{list(shape)}",
                        "module": module,
                        "source": source,
                    }
                )
        return {
            "steps": steps,
            "lines": _largest(_merged(lines), "bytes"),
            "types": _largest(kinds, "count"),
            "tensors": _largest(tensors, "bytes"),
            "containers": self._containers(before, now, least),
            "graph": {"nodes": now["graph"] - before["graph"], "holder": self._graph_holder()}
            if now["graph"] - before["graph"] >= least
            else None,
        }

    def _containers(self, before: dict[str, Any], now: dict[str, Any], least: float) -> list[dict[str, Any]]:
        grown: dict[int, int] = {}
        for key, (kind, length) in now["lengths"].items():
            old = before["lengths"].get(key)
            if old is not None and old[0] is kind and length - old[1] >= least / 2:
                grown[key] = length - old[1]
        for key, size in now["memos"].items():
            if key in before["memos"] and size - before["memos"][key] >= least / 2:
                grown[key] = size - before["memos"][key]
        ours = {id(before), id(now), *(id(v) for v in (*before.values(), *now.values()))}
        largest = sorted((n, key) for key, n in grown.items() if key not in ours)[-TOP:]
        wanted = {key for _, key in largest}
        things = {id(o): o for o in gc.get_objects() if id(o) in wanted} if wanted else {}
        found = [
            {"name": type(things[key]).__name__, "count": n, "holder": holder_of(things[key])}
            for n, key in reversed(largest)
            if key in things
        ]
        things.clear()
        return found

    def _graph_holder(self) -> str:
        torch: Any = sys.modules["torch"]
        heads = [tensor for tensor in _of(gc.get_objects(), torch.Tensor) if tensor.grad_fn is not None]
        return holder_of(max(heads, key=lambda t: _nodes(t.grad_fn))) if heads else ""


def _of(objects: list[Any], base: type) -> list[Any]:
    """The instances of a class and its subclasses; each type is tested once, as there are many more objects than types."""
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, base)}
    return [thing for thing in objects if type(thing) in kinds]


def _caller() -> str:
    """The innermost line of the user's code on the stack; the innermost line of all if there is none."""
    frame: types.FrameType | None = sys._getframe(2)
    first = ""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if users(frame.f_code.co_filename):
            return place
        first = first or place
        frame = frame.f_back
    return first


def _module_names(modules: list[Any]) -> dict[int, str]:
    """The path of each module within its outermost module, keyed by the module's ``id``."""
    inner = {id(child) for module in modules for child in module.children()}
    found: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            for path, part in module.named_modules():
                found.setdefault(id(part), f"{path or 'the model'} ({type(part).__name__})")
    return found


def _nodes(head: Any) -> int:
    """Number of nodes of the autograd graph behind a node, itself included."""
    seen, todo = {head}, [head]
    while todo and len(seen) < NODES:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return len(seen)


def _place(frames: tuple[tuple[str, int], ...]) -> dict[str, str]:
    """The innermost user's line among an allocation's frames (outermost first), and the innermost library line below it."""
    own = [f"{name}:{line}" for name, line in frames if users(name)]
    inner = [f"{name}:{line}" for name, line in frames if not name.startswith("<")]
    source = own[-1] if own else (inner[-1] if inner else "")
    return {"source": source, "inside": inner[-1] if inner and inner[-1] != source else ""}


def _merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Allocations added up per user's line, whatever it called; the call that allocated most is named."""
    found: dict[str, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda x: -x["bytes"]):
        entry = found.setdefault(line["source"], {**line, "bytes": 0, "count": 0})
        entry["bytes"] += line["bytes"]
        entry["count"] += line["count"]
    return list(found.values())


def _largest(found: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    return sorted(found, key=lambda x: -x[by])[:TOP]
