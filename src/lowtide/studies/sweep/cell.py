"""Runs one cell of a sweep: a fresh process of the command, watched (``python -m lowtide.studies.sweep.cell TASK``).

The cell's runner is a process beside the sweep, so that a killed sweep loses nothing: the cell goes on and leaves its result,
which the next sweep picks up. The result is written under another name and then renamed, so that a result that exists is
complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.files import is_full, reserve, write
from lowtide.base.processes import end_on_sigterm
from lowtide.studies.leak.findings import spread_of
from lowtide.studies.leak.study import audits_of
from lowtide.studies.leak.verdict import TOLERANCE, judge
from lowtide.studies.leak.watch import Progress, Run, Watch, Watched

CLAIM_SECONDS: Final = 2.0
NO_ROOM: Final = 74
"""Exit code of a cell's process that cannot write its result or its samples (``EX_IOERR`` of ``sysexits.h``)."""
_RESULT_BYTES: Final = 1 << 14
MOST_SAID: Final = 200
"""Maximum number of characters of a last line that are shown."""
LEAST: Final = 3
"""Minimum number of steps for a measurement."""


NOTHING: Final[dict[str, Any]] = {
    "ended": "",
    "exit": None,
    "steps": 0,
    "seconds": 0.0,
    "change_bytes": None,
    "growth_bytes": None,
    "samples_per_second": None,
    "verdict": None,
    "bytes_per_step": None,
    "peak_bytes": None,
    "tail": "",
}
"""The result of a cell that did not run."""


def measure(command: Sequence[str], environment: Mapping[str, str], watch: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command once and return its figures; a process that fails is a result, too.

    Args:
        command: the command.
        environment: the environment of its process.
        watch: ``steps``, ``step_line``, ``timeout_seconds``, ``cap_bytes`` and ``samples_per_step`` of the sweep.
    """
    wanted = Watch(
        steps=watch["steps"],
        audits=audits_of(watch["steps"]),
        lines=watch["step_line"],
        timeout_seconds=watch["timeout_seconds"],
        cap_bytes=watch["cap_bytes"],
    )
    with Watched(command, wanted, environment=environment) as process:
        run = process.wait(Progress())
    return figures(run, samples_per_step=watch["samples_per_step"])


def figures(run: Run, *, samples_per_step: float) -> dict[str, Any]:
    """The figures of a run as JSON: growth per step of resident memory and child processes, throughput, verdict, ending."""
    ended = "ok"
    if run.ended == "timeout":
        ended = "timeout"
    elif run.code < 0:
        ended = f"killed by {signal.Signals(-run.code).name}"
    elif run.code:
        ended = f"exit code {run.code}"
    elif run.steps < LEAST:
        ended = "no steps seen"
    found = {
        **NOTHING,
        "ended": ended,
        "exit": run.code,
        "steps": run.steps,
        "seconds": run.seconds,
        "tail": run.tail if ended != "ok" else "",
    }
    spread = spread_of(run) if run.steps >= LEAST else None
    if spread is None:
        return found
    judgement = judge(run, TOLERANCE)
    children = run.column("children_bytes")
    children[children == 0] = np.nan
    resident = run.column("resident_bytes")
    return {
        **found,
        "change_bytes": spread.to_json(),
        "growth_bytes": _per_step(resident) + _per_step(children),
        "samples_per_second": samples_per_step / run.step_seconds if run.step_seconds else None,
        "verdict": judgement.verdict.value,
        "bytes_per_step": None if judgement.culprit is None else judgement.culprit.trend.rate,
        "peak_bytes": float(np.nanmax(resident)),
    }


def _per_step(values: NDArray[np.float64]) -> float:
    """Growth per step from the second step, or the first reading after it, to the last reading; 0 without two readings."""
    at = np.flatnonzero(np.isfinite(values))
    at = at[at >= 1]
    return float((values[at[-1]] - values[at[0]]) / (at[-1] - at[0])) if len(at) > 1 else 0.0


def last_words(result: Mapping[str, Any]) -> str:
    """How a failed cell ended, with the last line that it printed; empty for a cell that did not fail."""
    if result["ended"] == "ok":
        return ""
    lines = [line.strip() for line in str(result.get("tail") or "").splitlines() if line.strip()]
    return f"{result['ended']}: {lines[-1][:MOST_SAID]}" if lines else str(result["ended"])


def claimed(lock: Path) -> int | None:
    """Claim a cell for as long as this process lives.

    The lock file then contains this process's id. The lock is retried for a while, because a process that merely checks for a
    claim holds it for a moment, too.

    Returns:
        The file descriptor that holds the claim; None if another process has claimed the cell.
    """
    file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(file)
                return None
            time.sleep(0.02)
        else:
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
            return file


def main() -> None:
    """Run the cell of a task file, unless another process is running it or has run it."""
    end_on_sigterm()
    try:
        _run(Path(sys.argv[1]))
    except OSError as error:
        if not is_full(error):
            raise
        sys.exit(NO_ROOM)


def _run(task: Path) -> None:
    result = task.with_suffix(".result")
    if claimed(task.with_suffix(".lock")) is None or result.exists() or task.with_suffix(".taken").exists():
        return
    asked = json.loads(task.read_text())
    partial = task.with_suffix(".partial")
    with partial.open("wb", buffering=0) as file:
        reserve(file.fileno(), _RESULT_BYTES)  # before the run, which may take hours
        data = json.dumps(measure(asked["command"], asked["environment"], asked["watch"])).encode()
        write(file.fileno(), data)
        file.truncate(len(data))
        os.fsync(file.fileno())
    partial.rename(result)


if __name__ == "__main__":
    main()
