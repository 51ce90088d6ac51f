"""What the process of ``lowtide run`` does: the script as ``__main__``, under a budget, then the figures.

The script sees its own arguments, its own folder first on ``sys.path``, and the environment that the user gave. Its
traceback and its exit code pass through; frames of Lowtide are taken out of what is printed.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final

import msgspec

from lowtide.cli.launch import ACTIVE, PRELOAD, TASK, Task
from lowtide.errors import BudgetError, LowtideError

_PACKAGE: Final = str(Path(__file__).resolve().parent.parent)
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
        sys.stderr.write(f"lowtide: error: {' '.join(str(error).split())}\n")
        code = 2
    if code:
        sys.exit(code)


def _run(task: Task) -> int:
    """Run the script; the exit code to leave with if it ended by itself."""
    from lowtide.live.runtime import Runtime, Settings
    from lowtide.planner import load_plan
    from lowtide.units import parse_budget

    settings = Settings(
        budget=parse_budget(task.budget),
        keep=task.keep,
        offload=task.offload,
        plan=None if task.plan is None else load_plan(Path(task.plan)),
        refusal=_refusal,
    )
    runtime = Runtime(settings)
    runtime.start()
    code: Any = 0
    try:
        _execute(task)
    except _Refusal:
        assert runtime.refused is not None
        _finish(task, runtime, 1)
        sys.stderr.write(f"lowtide: error: {runtime.refused}\n")
        return 1
    except SystemExit as leaving:
        code = leaving.code
        _finish(task, runtime, code if isinstance(code, int) else int(code is not None))
        raise
    except BaseException:
        _finish(task, runtime, 1)
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    _finish(task, runtime, 0)
    return 0


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
    exec(compile(path.read_bytes(), str(path), "exec"), main_module.__dict__)  # noqa: S102 - the user's own script


def _finish(task: Task, runtime: Any, code: int) -> None:
    """Stop watching; write and show the figures."""
    from lowtide.live.outcome import Outcome
    from lowtide.planner import save_plan
    from lowtide.report.terminal import show_outcome

    runtime.stop()
    outcome = Outcome(
        budget_bytes=runtime.budget_bytes,
        steps=tuple(runtime.steps),
        plan=runtime.figures,
        exact=runtime.meter.exact,
    )
    rank = int(os.environ.get("RANK", "0"))
    suffix = f".rank{rank}" if rank else ""
    if task.json is not None:
        Path(task.json + suffix).write_bytes(msgspec.json.format(msgspec.json.encode(outcome.to_json(code)), indent=1))
    if task.save_plan is not None and runtime.plan is not None:
        save_plan(runtime.plan, Path(task.save_plan + suffix))
    if not task.quiet and not rank:
        show_outcome(outcome)


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
