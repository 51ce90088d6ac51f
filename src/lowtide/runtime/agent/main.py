"""The agent: runs the script of ``lowtide run``, ``record`` or a short trial as ``__main__``, then writes the figures.

The script sees its own arguments, its own folder first on ``sys.path``, and the user's environment. Its traceback and its exit
code pass through; Lowtide's frames are removed from the printed traceback.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from lowtide.base import interrupts
from lowtide.base.errors import INTERRUPTED, NOT_HELD, BudgetError, LowtideError, RecordingError, UsageError
from lowtide.base.messages import tell
from lowtide.base.outputs import Written, replace_json, write_json
from lowtide.base.package import PACKAGE
from lowtide.runtime.agent.script_constants import with_constants
from lowtide.runtime.agent.task import ACTIVE, PRELOAD, TASK, RecordOptions, RunOptions, Task, read_task
from lowtide.runtime.early_stop import StepLimitReached

if TYPE_CHECKING:
    from lowtide.runtime.agent.measured_run import Trial
    from lowtide.runtime.units.earlier_runs import EarlierRuns

RECURSION: Final = 1000
"""Minimum recursion limit while Lowtide writes its figures, even if the script has set a lower one."""
_HIDDEN: Final = (str(PACKAGE) + os.sep, "<frozen runpy>", runpy.__file__)


_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which batch systems and terminals end a job."""
_WRITTEN_SHARE: Final = 0.01
"""Maximum share of a run's time that writing figures during the run may take ..."""
_WRITTEN_SECONDS: Final = 1.0
"""... and minimum seconds between two writes."""


class _Refusal(SystemExit):
    """Ends the script when its budget cannot be held; ``except Exception`` in the script does not catch it."""


def main() -> None:
    """Run the task given in the environment variable :data:`TASK`."""
    task = read_task(os.environ.pop(TASK))
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
    """Run the script and write the figures.

    Returns:
        The exit code, if the script ended normally or Lowtide ended it. Otherwise the script's exception passes through.
    """
    options = task.options
    job: _Budget | _Record | Trial
    if isinstance(options, RunOptions):
        job = _Budget(task, options)
    elif isinstance(options, RecordOptions):
        job = _Record(task, options)
    else:
        from lowtide.runtime.agent.measured_run import Trial

        job = Trial(options)
    code: Any = 0
    owner = os.getpid()
    ended = False

    def finish(code: int, error: BaseException | None = None) -> int:
        """Write and show the figures, once; returns the exit code: ``NOT_HELD`` if it was 0 and the budget was not held."""
        nonlocal ended
        if ended or os.getpid() != owner:  # a child that the script forked also ends here
            return code
        ended = True
        with _undisturbed():
            job.finish(code, error)
        return job.exit_code(code) if isinstance(job, _Budget) else code

    _at_sudden_ends(finish, owner)
    try:
        interrupts.allow()
        _execute(task)
    except StepLimitReached:
        finish(0)
        return 0
    except _Refusal:
        assert isinstance(job, _Budget)
        finish(1)
        tell(f"lowtide: error: {job.runtime.choice.refused}")
        return 1
    except SystemExit as leaving:
        code = leaving.code
        given = finish(code if isinstance(code, int) else int(code is not None))
        if given == NOT_HELD and code in (None, 0):
            return given
        raise
    except BaseException as error:
        finish(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1, error)
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    return finish(0)


def _at_sudden_ends(finish: Callable[[int], int], owner: int) -> None:
    """Have the figures written before ``os._exit``, or a signal that ends a job, ends the process."""
    leave = os._exit

    def _exit(status: int) -> None:
        with contextlib.suppress(Exception):
            finish(status)
        leave(status)

    def end(number: int, _: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:
            with contextlib.suppress(Exception):  # the signal may have interrupted anything
                finish(128 + number)
        os.kill(os.getpid(), number)

    os._exit = _exit  # type: ignore[assignment]
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Context for writing and showing the figures: keeps the script's exit code, whatever state the script has left.

    It raises the recursion limit to at least :data:`RECURSION`, and reports an interrupt or a missing recording in one line.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, RECURSION))
    try:
        yield
    except KeyboardInterrupt:
        tell("lowtide: interrupted while the figures were written")
    except RecordingError as error:  # it was removed in the meantime
        tell(f"lowtide: error: {error}")
    finally:
        sys.setrecursionlimit(limit)


def _refusal(_: BudgetError) -> BaseException:
    return _Refusal(1)


def _execute(task: Task) -> None:
    """Run the script as ``__main__``.

    Raises:
        UsageError: if the task's constants do not fit the script.
    """
    sys.argv = [task.target, *task.arguments]
    if task.module:
        runpy.run_module(task.target, run_name="__main__", alter_sys=True)
        return
    path = Path(os.path.abspath(task.target))  # noqa: PTH100 - keeps symlinks, as plain python does
    sys.path[0] = str(path.resolve().parent)  # replaces the working directory, put there by `-m`
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

    def __init__(self, task: Task, options: RunOptions) -> None:
        from lowtide.base.units import parse_budget
        from lowtide.planning.unit.plan_file import load_plan
        from lowtide.runtime.control.runtime import Runtime
        from lowtide.runtime.control.settings import BudgetSettings

        self._options = options
        self._earlier = _earlier_runs(task, options)
        self.runtime = Runtime(
            BudgetSettings(
                budget=parse_budget(options.budget),
                keep=options.keep,
                offload=options.offload,
                allow=frozenset(options.allow),
                without=frozenset(options.without),
                plan=None if options.plan is None else load_plan(Path(options.plan)),
                refusal=_refusal,
                keep_going=options.keep_going,
                on_step=None if options.json is None else self._step_ended,
                earlier=self._earlier,
            )
        )
        self._next_write = 0.0
        Runtime.of_command = self.runtime
        self.runtime.start()

    def _step_ended(self) -> None:
        """Write the figures so far, so that a process that is killed leaves them."""
        began = time.monotonic()
        if began < self._next_write:
            return
        assert self._options.json is not None
        with contextlib.suppress(OSError):  # reported by the last write
            replace_json(self._options.json + _rank_suffix(), self.runtime.outcome().to_json(None))
        now = time.monotonic()
        self._next_write = now + max(_WRITTEN_SECONDS, (now - began) / _WRITTEN_SHARE)

    def exit_code(self, code: int) -> int:
        """The exit code, given the script's own: ``NOT_HELD`` for 0 if the budget was not held, unless ``--keep-going``."""
        held = self._options.keep_going or self.runtime.outcome().held
        return code if code or held else NOT_HELD

    def finish(self, code: int, error: BaseException | None = None) -> None:
        """Stop watching; write and show the figures."""
        from lowtide.planning.unit.plan_file import save_plan
        from lowtide.probe.catalogue import out_of_memory
        from lowtide.report.terminal import show_outcome

        runtime, options = self.runtime, self._options
        runtime.stop(over=True)
        outcome = replace(runtime.outcome(), neighbours=runtime.neighbours())
        written = Written()
        if options.json is not None:
            written.attempt(replace_json, options.json + _rank_suffix(), outcome.to_json(self.exit_code(code)))
        if options.save_plan is not None and runtime.plan is not None:
            written.attempt(save_plan, runtime.plan, Path(options.save_plan + _rank_suffix()))
        if not options.quiet and not _rank_suffix():
            show_outcome(outcome)
        written.say()
        if self._earlier is not None:
            with contextlib.suppress(Exception):  # it only saves later runs time: the script's end must not depend on it
                self._earlier.keep(runtime.knowledge.recordings)
        if error is None or out_of_memory(error) is None:
            return
        if not outcome.asked:
            tell(
                "lowtide: --rescue did not save this step: it was predicted to fit, or evicting what autograd has saved did "
                "not suffice; a budget, such as --budget 6GiB, plans every step"
            )
        elif outcome.share and not outcome.budget_bytes:
            tell(
                f"lowtide: the first step ran out of memory: it has no budget, because a share of {outcome.share:.0%} is "
                "computed from its peak; give a size, such as --budget 6GiB, which holds from the first step on"
            )


@final
class _Record:
    """``lowtide record``: a plain run of the script, recorded."""

    def __init__(self, task: Task, options: RecordOptions) -> None:
        from lowtide.probe.marks import WhenImported, watch_keras
        from lowtide.recording.writer import Writer
        from lowtide.runtime.device.heap_counters import preloaded
        from lowtide.runtime.record.process_sampler import ProcessSampler

        self._options = options
        self._path = Path(options.output + _rank_suffix())
        self._watcher: Any = None
        if options.cap_bytes:
            found = preloaded()
            if found is None:
                raise UsageError("--cap needs the heap counter, which was not built: reinstall Lowtide with a C compiler")
            found.cap = options.cap_bytes
        about = {"script": task.target, "arguments": list(task.arguments), "cap_bytes": options.cap_bytes}
        if options.sizes:
            about["sizes"] = options.sizes
        self._writer = Writer(self._path, about)
        self._coarse = ProcessSampler(self._writer)
        self._coarse.start()
        self._awaited = [WhenImported("torch", self._torch_arrived), WhenImported("keras", watch_keras)]

    def _torch_arrived(self, _: types.ModuleType) -> None:
        from lowtide.runtime.record import run_recorder

        self._watcher = run_recorder.begin(self._writer, operators=self._options.operators, steps=self._options.steps)

    def finish(self, code: int, error: BaseException | None = None) -> None:
        """Close the recording; write and show what it explains."""
        for awaited in self._awaited:
            awaited.forget()
        if self._watcher is not None:
            from lowtide.runtime.record import run_recorder

            run_recorder.end(self._watcher, complete=error is None, whole=True)
        self._coarse.stop()
        from lowtide.probe.catalogue import out_of_memory

        short = error is not None and out_of_memory(error) is not None
        if not self._writer.close(code=code, error=error, always=short):
            if self._writer.stopped is None:  # otherwise it was reported
                tell(f"lowtide: no step was recorded: {self._path} is unchanged")
            return
        from lowtide.recording.explanation.explanation import explain
        from lowtide.recording.reader import read
        from lowtide.report.recording import show_recording, to_json

        options = self._options
        if options.json is None and (options.quiet or _rank_suffix()):
            return
        found, written = explain(read(self._path)), Written()
        if options.json is not None:
            figures = {"recording": str(self._path), **to_json(found)}
            written.attempt(write_json, options.json + _rank_suffix(), figures)
        if not options.quiet and not _rank_suffix():
            show_recording(found)
        written.say()


def _earlier_runs(task: Task, options: RunOptions) -> EarlierRuns | None:
    """What earlier runs of the task's script recorded with the same options; None if it is not to be used."""
    from lowtide.runtime.units.earlier_runs import EarlierRuns

    if not options.cache or options.plan is not None or options.keep or _rank_suffix():
        return None
    path = Path(task.target).resolve()  # of a module, where it would be if it were in this folder
    text = b"" if task.module else path.read_bytes()
    return EarlierRuns.of((str(path), text, options.offload, options.allow, options.without))


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

