"""Runs a command in a fresh process and watches it step by step from inside (``probe``)."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.package import PACKAGE
from lowtide.base.processes import end_with_parent
from lowtide.base.temporary_folders import Scratch
from lowtide.probe.census import users
from lowtide.probe.counters import ABSENT, COLUMNS, INDEX
from lowtide.probe.lend import lend
from lowtide.probe.marks import MarkSource
from lowtide.probe.sampler import ENOUGH, TASK
from lowtide.runtime.device.heap_counters import library_path

LOOK_SECONDS: Final = 0.1
"""Seconds between two looks at a running process."""
PATIENCE_SECONDS: Final = 10.0
"""Seconds that a process gets to end on its own before it is killed."""
LOOKING_SECONDS: Final = 600.0
"""The same if it takes a census before: with several million objects, that takes minutes."""
STACKS, FRAMES, REPEATED = 8, 24, 8
"""Number of native stacks reported, frames of each, and minimum number of allocations of a stack that is reported."""
TAIL: Final = 12
"""Number of last lines of a process's output that are kept, to explain a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a process is watched.

    Attributes:
        steps: number of steps after which it is ended; 0 lets it run to its own end.
        audits: steps at which audits are taken.
        lines: regular expression for lines of standard output that mark steps; empty for none.
        every_seconds: length of a step in seconds, if nothing else marks steps; 0 for no such steps.
        least_seconds: a process whose steps only the clock marks is not ended before this time.
        census: whether the process also looks for what grows in it (costs time and memory).
        census_kind: the source of the marks between which the census is taken; None for any.
        deep: whether native stacks are noted, too, if memray is installed.
        collect_every: steps after which garbage in cycles is collected; 0 to leave that to Python.
        arm: the arm of an ablation (``probe.arms.Arm``); None for the program as it is.
        timeout_seconds: seconds after which the process is killed; 0 for never.
        cap_bytes: address space that the process may have (``RLIMIT_AS``); 0 for no cap.
    """

    steps: int = 300
    audits: tuple[int, ...] = ()
    lines: str = ""
    every_seconds: float = 0.1
    least_seconds: float = 60.0
    census: bool = False
    census_kind: MarkSource | None = None
    deep: bool = False
    collect_every: int = 0
    arm: Mapping[str, Any] | None = None
    timeout_seconds: float = 0.0
    cap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the watched model.

    Attributes:
        path: its name within the model; names in the second model begin with ``1:``. The model itself has no name.
        type: the name of its class.
        holds: whether it contains other modules.
    """

    path: str
    type: str
    holds: bool = False

    @property
    def name(self) -> str:
        """Its path without the number of the model."""
        return self.path.rpartition(":")[2]

    @property
    def depth(self) -> int:
        """Depth of its path: the number of separators in it."""
        return self.path.count(".") + self.path.count("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was seen of one process.

    Attributes:
        rows: int64 [step, column] (``probe.counters.COLUMNS``); ``ABSENT`` where a counter was not read.
        kind: what marked the steps; None if there was no sample.
        audits: the audits, in order of their steps.
        census: what grew, as ``probe.census`` wrote it; empty if no census was taken.
        native: native stacks that memray found, largest first; empty if they were not asked for.
        modules: the modules of the model, if an arm was run.
        code: exit code, negative for a signal; 0 if the process was ended because enough was seen.
        ended: why it ended: ``enough`` (it was ended), ``itself`` or ``timeout``.
        seconds: from start to end.
        tail: the last lines of its output.
    """

    rows: NDArray[np.int64]
    kind: MarkSource | None
    audits: tuple[dict[str, Any], ...]
    census: tuple[dict[str, Any], ...]
    native: tuple[dict[str, Any], ...] = ()
    modules: tuple[Module, ...] = ()
    code: int
    ended: str
    seconds: float
    tail: str = field(default="", repr=False)

    def column(self, name: str) -> NDArray[np.float64]:
        """A counter after each step; NaN where it was not read."""
        values = self.rows[:, INDEX[name]].astype(np.float64)
        values[self.rows[:, INDEX[name]] == ABSENT] = np.nan
        return values

    @property
    def steps(self) -> int:
        """Number of steps seen."""
        return len(self.rows)

    @property
    def children(self) -> int:
        """Maximum number of other processes that the program had at once, as far as they were counted."""
        return int(self.rows[:, INDEX["children"]].max(initial=0))

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step; 0 if there are fewer than two."""
        times = self.rows[:, INDEX["time_ns"]]
        return float(np.median(np.diff(times))) / 1e9 if len(times) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """A look at a process before it has ended.

    Attributes:
        steps: number of steps after which the look is taken.
        enough: decides from the rows of these steps whether the process may end.
    """

    steps: int
    enough: Callable[[NDArray[np.int64]], bool]


class Progress:
    """Receives the progress of running processes; this class ignores it."""

    def process(self) -> None:
        """A process of a study begins."""

    def arm(self, name: str) -> None:
        """An arm of an ablation begins."""

    def stepped(self, steps: int) -> None:
        """This many steps have been seen so far."""


def environment_of(given: Mapping[str, str], task: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a watched process: the probe on its path, and the heap counter preloaded if it was built."""
    made = dict(given)
    made[TASK] = json.dumps(task)
    lend(made)
    library = library_path()
    if library is not None:
        made["LD_PRELOAD"] = ":".join([str(library), *filter(None, [made.get("LD_PRELOAD")])])
    return made


@final
class Watched:
    """A running process that is watched; leaving the ``with`` block ends it and everything that it started."""

    def __init__(
        self, command: Sequence[str], watch: Watch, *, environment: Mapping[str, str] | None = None, quiet: bool = True
    ) -> None:
        """Start nothing yet.

        Args:
            command: the program and its arguments.
            watch: how it is watched.
            environment: the process's environment, before the probe is added; None for this process's own.
            quiet: whether standard output is captured, too; standard error always is, for `Run.tail`.
        """
        self._command, self._watch, self._quiet = list(command), watch, quiet
        self._given = os.environ if environment is None else environment

    def __enter__(self) -> Watched:
        """Start the process."""
        self._scratch = Scratch()
        self._folder = self._scratch.path
        w = self._watch
        task = {
            "folder": str(self._folder),
            "watcher": os.getpid(),
            "steps": w.steps,
            "audits": list(w.audits),
            "lines": w.lines,
            "every_seconds": w.every_seconds,
            "least_seconds": w.least_seconds,
            "census": w.census,
            "census_kind": w.census_kind,
            "deep": w.deep,
            "arm": w.arm,
            "collect_every": w.collect_every,
        }
        with contextlib.ExitStack() as undone:
            undone.callback(self._scratch.remove)
            self._output = undone.enter_context((self._folder / "output").open("wb"))
            self._began = time.perf_counter()
            self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._command,
                env=environment_of(self._given, task),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._output if self._quiet else None,
                stderr=subprocess.STDOUT if self._quiet else self._output,
                preexec_fn=self._limit,  # noqa: PLW1509 - this process has no threads that hold locks here
            )
            undone.pop_all()
        return self

    def _limit(self) -> None:
        """In the new process: have it end when its parent ends, in whatever way, and cap its address space."""
        end_with_parent()
        if self._watch.cap_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (self._watch.cap_bytes, self._watch.cap_bytes))

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._kill()
        self._output.close()
        self._scratch.remove()

    def _kill(self) -> None:
        """Kill the process and whatever is left of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def rows(self) -> tuple[NDArray[np.int64], MarkSource | None, int]:
        """The samples so far, what marked them, and the id of the process that they come from.

        Of several processes that wrote samples, it is the one with the best source of marks, and then with the most samples.
        """
        best: tuple[NDArray[np.int64], MarkSource | None, int] = (np.empty((0, len(COLUMNS)), dtype=np.int64), None, 0)
        for path in sorted(self._folder.glob("rows-*")):
            raw = path.read_bytes()
            rows = np.frombuffer(raw[: len(raw) - len(raw) % (8 * len(COLUMNS))], dtype="<i8").reshape(-1, len(COLUMNS))
            if not len(rows):
                continue
            kind = MarkSource(int(rows[:, INDEX["kind"]].min()))
            rows = rows[rows[:, INDEX["kind"]] == kind]
            if best[1] is None or (-kind, len(rows)) > (-best[1], len(best[0])):
                best = rows, kind, int(path.name.rpartition("-")[2])
        return best

    def _seen(self) -> int:
        """Number of rows on disk, whatever marked them; their contents are not read."""
        sizes = [path.stat().st_size for path in self._folder.glob("rows-*")]
        return max(sizes, default=0) // (8 * len(COLUMNS))

    def wait(self, progress: Progress, look: Look | None = None) -> Run:
        """Watch the process until it ends, or has been watched for long enough.

        Args:
            progress: receives the number of steps seen.
            look: a look that is taken once, after its number of steps; it may end the process.
        """
        asked = 0.0
        ended = ""
        while self._process.poll() is None:
            time.sleep(LOOK_SECONDS)
            seconds, seen = time.perf_counter() - self._began, self._seen()
            progress.stepped(seen)
            if self._watch.timeout_seconds and seconds > self._watch.timeout_seconds:
                ended = "timeout"
                self._kill()
            elif asked:
                if seconds - asked > (LOOKING_SECONDS if self._watch.census else PATIENCE_SECONDS):
                    self._kill()
            elif look is not None and seen >= look.steps:
                rows, _, _ = self.rows()
                if len(rows) >= look.steps:
                    if look.enough(rows[: look.steps]):
                        asked, ended = seconds, "enough"
                        (self._folder / ENOUGH).touch()
                    look = None
            elif self._watch.steps and seen >= self._watch.steps:
                rows, kind, _ = self.rows()
                if kind is not MarkSource.CLOCK and len(rows) >= self._watch.steps:  # it should end on its own now
                    asked = seconds
        seconds = time.perf_counter() - self._began
        rows, kind, pid = self.rows()
        if not ended:
            ended = "enough" if self._watch.steps and len(rows) >= self._watch.steps else "itself"
        lines = (self._folder / "output").read_bytes().decode(errors="replace").splitlines()
        return Run(
            rows=rows,
            kind=kind,
            audits=self._entries(f"audits-{pid}", kind),
            census=self._entries(f"census-{pid}", kind),
            modules=tuple(Module(m["path"], m["type"], m["holds"]) for m in self._entries(f"modules-{pid}", kind)),
            native=native_stacks(self._folder / f"native-{pid}"),
            code=0 if ended == "enough" else self._process.returncode,
            ended=ended,
            seconds=seconds,
            tail="\n".join(lines[-TAIL:]),
        )

    def _entries(self, name: str, kind: MarkSource | None) -> tuple[dict[str, Any], ...]:
        path = self._folder / name
        if not path.exists():
            return ()
        found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return tuple(entry for entry in found if entry.get("kind", kind) == kind)


def native_stacks(path: Path) -> tuple[dict[str, Any], ...]:
    """Repeated allocations that memray found not freed, by stack, largest first; empty if it left no file.

    memray sees calls that go through the dynamic linker, not calls of a function that was looked up by hand (``ctypes``).
    """
    if not path.exists():
        return ()
    import memray

    found: list[dict[str, Any]] = []
    with memray.FileReader(path) as reader:
        for record in sorted(reader.get_leaked_allocation_records(merge_threads=True), key=lambda r: -r.size):
            frames = record.hybrid_stack_trace(max_stacks=FRAMES)
            ours = any(Path(file).is_relative_to(PACKAGE) for _, file, _ in frames)
            if ours or record.n_allocations < REPEATED:
                continue
            source = next((f"{file}:{line}" for _, file, line in frames if file.endswith(".py") and users(file)), "")
            names = [f"{name} ({Path(file).name}:{line})" for name, file, line in frames]
            found.append({"bytes": record.size, "count": record.n_allocations, "frames": names, "source": source})
    return tuple(found[:STACKS])
