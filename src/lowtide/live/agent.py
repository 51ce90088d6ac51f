"""What the process of ``lowtide run`` or ``record`` does: the script as ``__main__``, watched, then the figures.

The script sees its own arguments, its own folder first on ``sys.path``, and the environment that the user gave. Its
traceback and its exit code pass through; frames of Lowtide are taken out of what is printed.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from lowtide.cli.launch import write_json
from lowtide.errors import INTERRUPTED, BudgetError, LowtideError, UsageError
from lowtide.live.constants import with_constants
from lowtide.live.enough import Enough
from lowtide.live.task import ACTIVE, PRELOAD, TASK, RecordOptions, RunOptions, Task
from lowtide.tell import tell

if TYPE_CHECKING:
    from lowtide.live.trial import Trial

_PACKAGE: Final = str(Path(__file__).resolve().parent.parent)
RECURSION: Final = 1000
"""Depth that our own figures need, whatever limit the script has set."""
_HIDDEN: Final = (_PACKAGE, "<frozen runpy>", runpy.__file__)


class _Refusal(SystemExit):
    """Ends the script when its budget cannot be held; scripts do not catch it by ``except Exception``."""


def main() -> None:
    """Run the task that the environment carries."""
    task = msgspec.json.decode(os.environ.pop(TASK), type=Task)
    if task.preload is None:
        os.environ.pop(PRELOAD, None)
    else:
        os.environ[PRELOAD] = task.preload
    os.environ[ACTIVE] = str(os.getpid())
    try:
        code = _run(task)
    except LowtideError as error:
        tell(f"lowtide: error: {' '.join(str(error).split())}")
        code = 2
    if code:
        sys.exit(code)


def _run(task: Task) -> int:
    """Run the script; the exit code to leave with if it ended by itself."""
    options = task.options
    job: _Budget | _Record | Trial
    if isinstance(options, RunOptions):
        job = _Budget(options)
    elif isinstance(options, RecordOptions):
        job = _Record(task, options)
    else:
        from lowtide.live.trial import Trial

        job = Trial(options)
    code: Any = 0
    owner = os.getpid()

    def finish(code: int, error: BaseException | None = None) -> None:
        if os.getpid() == owner:  # a child that the script has forked ends here too
            with _undisturbed():
                job.finish(code, error)

    try:
        _execute(task)
    except Enough:
        finish(0)
        return 0
    except _Refusal:
        assert isinstance(job, _Budget)
        finish(1)
        tell(f"lowtide: error: {job.runtime.refused}")
        return 1
    except SystemExit as leaving:
        code = leaving.code
        finish(code if isinstance(code, int) else int(code is not None))
        raise
    except BaseException as error:
        finish(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, error)
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    finish(0)
    return 0


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While figures are written and shown: whatever the script has left, its own exit code passes through."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, RECURSION))
    try:
        yield
    except KeyboardInterrupt:
        tell("lowtide: interrupted while the figures were written")
    finally:
        sys.setrecursionlimit(limit)


def _refusal(_: BudgetError) -> BaseException:
    return _Refusal(1)


def _execute(task: Task) -> None:
    """The script, as ``__main__``."""
    sys.argv = [task.target, *task.arguments]
    if task.module:
        runpy.run_module(task.target, run_name="__main__", alter_sys=True)
        return
    path = Path(os.path.abspath(task.target))  # noqa: PTH100 - links stay, as plain python has it
    sys.path[0] = str(path.resolve().parent)  # in place of the working directory, which `-m` has put there
    main_module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    main_module.__dict__.update(
        __file__=str(path), __builtins__=builtins, __spec__=None, __cached__=None, __loader__=loader, __annotations__={}
    )
    sys.modules["__main__"] = main_module
    source = with_constants(path.read_bytes(), task.constants, path.name) if task.constants else path.read_bytes()
    exec(compile(source, str(path), "exec"), main_module.__dict__)  # noqa: S102 - the user's own script


@final
class _Budget:
    """``lowtide run``: the script under a budget."""

    def __init__(self, options: RunOptions) -> None:
        from lowtide.live.runtime import Runtime, Settings
        from lowtide.planner import load_plan
        from lowtide.units import parse_budget

        self._options = options
        self.runtime = Runtime(
            Settings(
                budget=parse_budget(options.budget),
                keep=options.keep,
                offload=options.offload,
                allow=frozenset(options.allow),
                without=frozenset(options.without),
                plan=None if options.plan is None else load_plan(Path(options.plan)),
                refusal=_refusal,
            )
        )
        self.runtime.start()

    def finish(self, code: int, _: BaseException | None = None) -> None:
        """Stop watching; write and show the figures."""
        from lowtide.planner import save_plan
        from lowtide.report.terminal import show_outcome

        runtime, options = self.runtime, self._options
        runtime.stop(over=True)
        outcome = runtime.outcome()
        if options.json is not None:
            write_json(options.json + _rank_suffix(), outcome.to_json(code))
        if options.save_plan is not None and runtime.plan is not None:
            save_plan(runtime.plan, Path(options.save_plan + _rank_suffix()))
        if not options.quiet and not _rank_suffix():
            show_outcome(outcome)


@final
class _Record:
    """``lowtide record``: the script as it is, into a recording."""

    def __init__(self, task: Task, options: RecordOptions) -> None:
        from lowtide.live.coarse import Coarse
        from lowtide.live.native import preloaded
        from lowtide.probe.marks import WhenImported, watch_keras
        from lowtide.store import Writer

        self._options = options
        self._path = Path(options.output + _rank_suffix())
        self._watcher: Any = None
        if options.cap_bytes:
            found = preloaded()
            if found is None:
                raise UsageError("--cap needs the heap counter, which was not built: install Lowtide where a C compiler is")
            found.cap = options.cap_bytes
        about = {"script": task.target, "arguments": list(task.arguments), "cap_bytes": options.cap_bytes}
        if options.sizes:
            about["sizes"] = options.sizes
        self._writer = Writer(self._path, about)
        self._coarse = Coarse(self._writer)
        self._coarse.start()
        self._awaited = [WhenImported("torch", self._torch_arrived), WhenImported("keras", watch_keras)]

    def _torch_arrived(self, _: types.ModuleType) -> None:
        from lowtide.live import watch

        self._watcher = watch.begin(self._writer, operators=self._options.operators, steps=self._options.steps)

    def finish(self, code: int, error: BaseException | None = None) -> None:
        """Close the recording; write and show what it says."""
        for awaited in self._awaited:
            awaited.forget()
        if self._watcher is not None:
            from lowtide.live import watch

            watch.end(self._watcher, complete=error is None, whole=True)
        self._coarse.stop()
        from lowtide.probe.catalogue import out_of_memory

        short = error is not None and out_of_memory(error) is not None
        if not self._writer.close(code=code, error=error, always=short):
            tell(f"lowtide: no step was recorded: {self._path} is as it was before")
            return
        from lowtide.report.recording import show_recording, to_json
        from lowtide.store import read

        options = self._options
        if options.json is None and (options.quiet or _rank_suffix()):
            return
        recording = read(self._path)
        if options.json is not None:
            write_json(options.json + _rank_suffix(), {"recording": str(self._path), **to_json(recording)})
        if not options.quiet and not _rank_suffix():
            show_recording(recording)


def _rank_suffix() -> str:
    rank = int(os.environ.get("RANK", "0"))
    return f".rank{rank}" if rank else ""


def _without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that shows a traceback without Lowtide's frames."""

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        chained: BaseException | None = error
        seen: set[int] = set()
        while chained is not None and id(chained) not in seen:
            seen.add(id(chained))
            chained.__traceback__ = _stripped(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        hook(kind, error, _stripped(trace))

    return shown


def _stripped(trace: types.TracebackType | None) -> types.TracebackType | None:
    if trace is None:
        return None
    rest = _stripped(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_HIDDEN) or trace.tb_frame.f_globals.get("__name__") == "runpy":
        return rest
    return types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


if __name__ == "__main__":
    # The script becomes __main__, so this module must be found under its own name.
    from lowtide.live import agent  # noqa: PLW0406 - by its own name

    agent.main()
