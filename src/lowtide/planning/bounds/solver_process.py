"""Runs HiGHS in a process that can be killed, because with whole variables it does not always look at the clock.

Run as a script, this file is that process. It reads programs from standard input and writes bounds and answers to standard
output as they come, so that none are lost if the process has to be killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

_EARLY = 0.25
"""Seconds between the deadline that a process is given and the time at which it is killed: it checks the clock only now and
then."""
_LOOKS = 1.0
"""Seconds between two checks that the parent process is still alive."""
_PRELOADED = "LD_PRELOAD"
"""Removed from the process's environment: a preloaded heap counter has nothing to count there."""
_LENGTH = struct.Struct("<q")


class _Pool:
    """Idle solver processes, which stay alive as long as there are keepers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._keepers = 0

    @property
    def is_kept(self) -> bool:
        return self._keepers > 0

    def keep(self) -> None:
        with self._lock:
            begun = None if self._waiting else _begin()
            if begun is not None:
                self._waiting.append(begun)
            self._keepers += 1

    def let_go(self) -> None:
        with self._lock:
            self._keepers -= 1
            if self._keepers:
                return
            ended, self._waiting = self._waiting, []
        for process in ended:
            _end(process)

    def take(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            while self._waiting:
                process = self._waiting.pop()
                if process.poll() is None:
                    return process
                _end(process)  # Ctrl-C or the kernel's out-of-memory killer may have ended it
            return _begin()

    def give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._keepers:
                self._waiting.append(process)
                return
        _end(process)


_pool: Final = _Pool()


@contextlib.contextmanager
def kept_ready() -> Iterator[None]:
    """Start a solver process ahead of its first use, reuse it within the context, and end it afterwards."""
    _pool.keep()
    try:
        yield
    finally:
        _pool.let_go()


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """What a solver has proven and found for a program so far.

    Attributes:
        bound: lower bound on the cost of every answer; minus infinity if nothing is proven.
        cost: cost of the best answer found; infinity if none was found.
        x: that answer; None if none was found.
        ended: whether the program was solved to optimality.
        impossible: whether the program was proven to have no answer.
    """

    bound: float = -np.inf
    cost: float = np.inf
    x: Any = None
    ended: bool = False
    impossible: bool = False


def solved_apart(
    asked: Mapping[str, Any],
    *,
    seconds: float,
    gap: float = 0.0,
    start: Any = None,
    tell: Callable[[SolverAnswer], None] | None = None,
) -> SolverAnswer:
    """What HiGHS proves and finds for a program within a time limit; nothing if no process can be started.

    Args:
        asked: the program: ``cost``, ``lower``, ``upper`` and ``whole`` per variable; ``low`` and ``high`` per row; the rows'
            entries as ``starts``, ``columns`` and ``values``.
        seconds: time limit, including the start of the process.
        gap: HiGHS may stop within this relative gap of the optimum.
        start: an answer to start from.
        tell: called with every better answer.
    """
    deadline = time.monotonic() + seconds
    process = _pool.take()
    if process is None:
        return SolverAnswer()
    overdue = threading.Timer(seconds, process.kill)  # whatever takes too long: a blocked write or read ends with it
    overdue.daemon = True
    told = SolverAnswer()
    lost = True
    try:
        overdue.start()
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, (dict(asked), gap, start, deadline - _EARLY))
        while lost:
            more, lost = _receive(process.stdout)
            told = replace(told, **more)
            if tell is not None and "x" in more:
                tell(told)
    except (OSError, EOFError, pickle.UnpicklingError):
        lost = True
    finally:
        overdue.cancel()
        if lost:
            _end(process)
        else:
            _pool.give_back(process)
    return told


def is_kept() -> bool:
    """Whether a process is kept ready; starting one takes half a second."""
    return _pool.is_kept


def _begin() -> subprocess.Popen[bytes] | None:
    environment = {k: v for k, v in os.environ.items() if k != _PRELOADED}
    if not sys.executable:
        return None
    command = [sys.executable, "-P", str(Path(__file__))]
    try:
        return subprocess.Popen(  # noqa: S603 - this file
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unread data cannot be flushed
                pipe.close()
    process.wait()


def _send(pipe: IO[bytes], what: object) -> None:
    data = pickle.dumps(what)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)  # noqa: S301 - written by our own process


def _highs_of(asked: Mapping[str, Any]) -> Any:
    """A HiGHS instance with the program ``asked`` (see :func:`solved_apart`), limited to one core."""
    import highspy  # only here: the asking process does not need it, and 1.16 prints a banner to its user's stdout

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(asked["cost"]), len(asked["low"])
    program.col_cost_, program.col_lower_, program.col_upper_ = asked["cost"], asked["lower"], asked["upper"]
    program.row_lower_, program.row_upper_ = asked["low"], asked["high"]
    rows = program.a_matrix_
    rows.format_ = highspy.MatrixFormat.kRowwise
    rows.num_col_, rows.num_row_ = program.num_col_, program.num_row_
    rows.start_, rows.index_, rows.value_ = asked["starts"], asked["columns"], asked["values"]
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    program.integrality_ = [kinds[int(w)] for w in asked["whole"]]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("parallel", "off")
    highs.passModel(program)
    return highs


def _solve(asked: Mapping[str, Any], gap: float, start: Any, deadline: float, tell: Callable[[dict[str, Any]], None]) -> None:
    import highspy

    highs = _highs_of(asked)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("time_limit", max(0.0, deadline - time.monotonic()))
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = start
        highs.setSolution(known)
    kind = highspy.cb.HighsCallbackType
    proven = -np.inf

    def heard(what: Any, _message: str, out: Any, back: Any, _user: Any) -> None:
        nonlocal proven
        if what == kind.kCallbackMipImprovingSolution:
            tell({"cost": out.objective_function_value, "x": np.array(out.mip_solution)})
        elif out.mip_dual_bound > proven:
            proven = out.mip_dual_bound
            tell({"bound": proven})
        if what == kind.kCallbackMipInterrupt:
            back.user_interrupt = time.monotonic() > deadline

    highs.setCallback(heard, None)
    highs.startCallback(kind.kCallbackMipImprovingSolution)
    highs.startCallback(kind.kCallbackMipInterrupt)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    ended, impossible = (status == getattr(highspy.HighsModelStatus, name) for name in ("kOptimal", "kInfeasible"))
    last = {"ended": ended and not gap, "impossible": impossible, "bound": max(proven, info.mip_dual_bound)}
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        last |= {"cost": info.objective_function_value, "x": np.array(highs.getSolution().col_value)}
    tell(last)


def _end_with_parent() -> None:
    """Exit once the parent is gone: HiGHS may run for a minute before it writes anything and would notice."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve() -> None:
    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # HiGHS may print to stdout although output is off
    with contextlib.suppress(EOFError):
        while True:
            asked, gap, start, deadline = _receive(sys.stdin.buffer)
            _solve(asked, gap, start, deadline, lambda more: _send(answers, (more, True)))
            _send(answers, ({}, False))


if __name__ == "__main__":
    _serve()
