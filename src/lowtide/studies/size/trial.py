"""Runs a script once, for a few steps, in its own process: what it took, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from lowtide.base.errors import RecordingError
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES
from lowtide.base.processes import end_with_parent
from lowtide.base.temporary_folders import Scratch
from lowtide.recording.file_format import tail_path
from lowtide.runtime.agent.task import PRELOAD, RecordOptions, Task, TrialOptions, agent_command, environment_of
from lowtide.studies.size.vary import ScriptSetting

MOST_SECONDS: Final = 3600.0
"""Time limit of one run by default, in seconds."""
LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at a running process."""
LINGER_SECONDS: Final = 5.0
"""Seconds that a process may take to end once it has written its result."""
TAIL_BYTES: Final = 2000
"""Bytes at the end of a failed script's output in which its last line is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A script to run.

    Attributes:
        script: path or module name.
        module: whether it is a module name.
        seconds: time limit of a run, in seconds.
    """

    script: str
    module: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """How a script is run once.

    Attributes:
        steps: number of steps after which it is ended.
        budget_bytes: budget to hold, as by ``lowtide run``; 0 for the plain run.
        cap_bytes: bytes beyond which torch's allocator refuses requests; 0 for no cap.
        allow, without: levers that may and must not be used.
        offload: whether values may be offloaded.
    """

    steps: int
    budget_bytes: int = 0
    cap_bytes: int = 0
    allow: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    offload: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a run.

    Attributes:
        asked: how it was run.
        ended: ``ok``; ``memory`` (an error of the allocator, or the kernel's out-of-memory killer); ``refused`` (the budget
            cannot be held); ``timeout``; ``error``.
        message: the error's message.
        steps: figures of each step, among them its seconds and its peak.
        resident_bytes: bytes of parameters, buffers and, under a budget, optimizer states.
        plan, levers: as in the JSON of ``lowtide run``.
    """

    asked: TrialRequest
    ended: str
    message: str
    steps: tuple[dict[str, Any], ...]
    resident_bytes: int
    plan: dict[str, Any] | None
    levers: tuple[dict[str, Any], ...]

    @property
    def cold_peak_bytes(self) -> int:
        """Peak of the first step; 0 if there were no steps."""
        return int(self.steps[0]["peak_bytes"]) if self.steps else 0

    @property
    def warm_peak_bytes(self) -> int:
        """Peak of the steps after the first; of the first if there are no others."""
        return max((int(s["peak_bytes"]) for s in self.steps[1:]), default=self.cold_peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of all steps."""
        return max(self.cold_peak_bytes, self.warm_peak_bytes)

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of the steps that are neither cold nor recorded; None if only the first step was run."""
        warm = [float(s["seconds"]) for s in self.steps[1:] if s.get("policy") != "online"]
        warm = warm or [float(s["seconds"]) for s in self.steps[1:]]
        return statistics.median(warm) if warm else None

    @property
    def over_bytes(self) -> int:
        """Bytes by which the budget was exceeded; 0 without a budget."""
        return max(0, self.peak_bytes - self.asked.budget_bytes) if self.asked.budget_bytes else 0

    @property
    def lacks_memory(self) -> bool:
        """Whether it failed for lack of memory, so that more memory might help."""
        return self.ended in ("memory", "refused")

    @property
    def passes(self) -> bool:
        """Whether the script ran its steps."""
        return self.ended == "ok" and bool(self.steps)


def run(target: Target, setting: ScriptSetting, asked: TrialRequest) -> TrialResult:
    """Run a script once; every process of its session has ended when this returns."""
    with Scratch() as folder:
        result, log = folder / "result.json", folder / "log"
        options = TrialOptions(
            steps=asked.steps,
            budget_bytes=asked.budget_bytes,
            cap_bytes=asked.cap_bytes,
            allow=tuple(sorted(asked.allow)),
            without=tuple(sorted(asked.without)),
            offload=asked.offload,
            json=str(result),
        )
        code = _process(target, setting, options, log, result)
        found = msgspec.json.decode(result.read_bytes()) if result.exists() else {}
        ended, message = found.get("ended", "error"), found.get("message", "")
        if code is None and not found:
            ended, message = "timeout", f"still running after {target.seconds:.0f} s"
        elif not found and code == -signal.SIGKILL:
            ended, message = "memory", "killed, probably by the kernel's out-of-memory killer"
        elif ended == "ok" and not found.get("steps"):
            ended, message = "error", "no training step was seen"
        if ended == "error" and not message:
            message = _why(code, len(found.get("steps", ())), log)
        return TrialResult(
            asked=asked,
            ended=ended,
            message=message,
            steps=tuple(found.get("steps", ())),
            resident_bytes=int(found.get("resident_bytes", 0)),
            plan=found.get("plan"),
            levers=tuple(found.get("levers", ())),
        )


def record(target: Target, setting: ScriptSetting, steps: int, file: Path) -> None:
    """Record the first steps of a script.

    Args:
        target: the script.
        setting: the values to set.
        steps: number of steps.
        file: where the recording is written.

    Raises:
        RecordingError: if the script fails before these steps are over, or if there is no room for the whole recording.
    """
    options = RecordOptions(
        output=str(file), operators=True, cap_bytes=0, steps=steps, sizes=dict(setting.sizes), json=None, quiet=True
    )
    with Scratch() as folder:
        log = folder / "log"
        code = _process(target, setting, options, log, None)
        if code != 0:
            sizes = ", ".join(f"{k}={v:g}" for k, v in setting.sizes.items())
            why = f"still running after {target.seconds:.0f} s" if code is None else _why(code, 0, log)
            raise RecordingError(f"the script fails with {sizes}: {why}")
        if not file.is_file() or tail_path(file).exists():
            raise RecordingError(f"no room for the recording in {file.parent}: {ROOM_FOR_TEMPORARY_FILES}")


def _process(
    target: Target, setting: ScriptSetting, options: TrialOptions | RecordOptions, log: Path, result: Path | None
) -> int | None:
    """Run the agent's process; returns its exit code, or None if it did not end in time. Its whole session has ended then.

    A process that has written its result but does not end (because of a thread of the script) is not waited for.
    """
    task = Task(
        target=target.script,
        module=target.module,
        arguments=setting.arguments,
        preload=os.environ.get(PRELOAD),
        constants=dict(setting.constants),
        options=options,
    )
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - this interpreter
            agent_command(),
            env={**environment_of(task), **setting.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has no threads that hold locks here
        )
        try:
            return _ended(process, target.seconds, result)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(process: subprocess.Popen[bytes], seconds: float, result: Path | None) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_SECONDS, max(end - time.monotonic(), 0.01)))
        if result is not None and result.exists() and time.time() - result.stat().st_mtime > LINGER_SECONDS:
            return None
    return None


def _why(code: int | None, steps: int, log: Path) -> str:
    """Why a run failed that reported no error: how it ended, and the last line that it printed."""
    how = ""
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name}: "
    elif code:
        how = f"exited with code {code}{f' after {steps} steps' if steps else ''}: "
    return how + _last_line(log)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
