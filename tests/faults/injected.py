"""Makes one system call fail at a time, under whole commands (as SQLite is tested: sqlite.org/testing.html).

A command is run once with nothing failing, which counts the calls of each class; then once for each of them.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from command import environment
from patience import PATIENCE

CLASSES: Final = ("open", "write", "map", "sync", "rename", "reserve", "folder", "process", "pipe", "denied", "memory")
"""In the order of inject.c."""
FAILURES: Final = {
    "open": errno.EACCES,
    "write": errno.ENOSPC,
    "map": errno.ENOMEM,
    "sync": errno.EIO,
    "rename": errno.EIO,
    "reserve": errno.ENOSPC,
    "folder": errno.ENOSPC,
    "process": errno.EAGAIN,
    "pipe": 0,  # the writer has ended
    "denied": errno.ENOMEM,
    "memory": errno.ENOMEM,
}
BEGINS: Final = "training begins"
NOT_HELD: Final = 3
"""Exit code of a budget that was not held to the end."""
LIBRARY: Final = "inject.so"
TRAINED: Final = Path(__file__).parent / "scripts" / "trained.py"


def built(folder: Path) -> Path:
    """Compile the library that makes calls fail into a folder; returns its path."""
    made = folder / LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, Path(__file__).parent / "inject.c", "-ldl"], check=True)
    return made


@dataclass(frozen=True, slots=True)
class Fault:
    """One call to fail.

    Attributes:
        kind: of CLASSES.
        at: which call of that class, from 1.
        lasting: whether every later call of the class fails, too.
    """

    kind: str
    at: int
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.at}{'+' if self.lasting else ''}"


@dataclass(frozen=True, slots=True)
class Case:
    """A command.

    Attributes:
        name: its name.
        words: its arguments after ``python``. ``{made}`` is the folder for its files, ``{ready}`` one with files to read.
        files: the files that it makes there.
        rest: further files that are kept, for their content, if one could not be finished.
        code: its exit code.
        trains: whether the command's output and exit code are the script's own.
        slow: whether it is many processes: at most so many calls of each class are made to fail.
    """

    name: str
    words: tuple[str, ...]
    files: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    code: int = 0
    trains: bool = False
    slow: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code, out, err: of the process.
        counts: calls of each class.
        failed: calls that were let fail.
        files: names in the folder for its files.
        temporary: names left in its temporary folder.
        processes: command lines of processes left.
    """

    code: int
    out: str
    err: str
    counts: dict[str, int]
    failed: tuple[str, ...]
    files: tuple[str, ...]
    temporary: tuple[str, ...]
    processes: tuple[str, ...]


def ran(case: Case, library: Path, folder: Path, ready: Path, fault: Fault | None = None) -> Ended:
    """Run a command, in a fresh folder, with one call failing."""
    made, temporary = folder / "made", folder / "made" / "temporary"
    temporary.mkdir(parents=True)
    counts, log = folder / "counts", folder / "log"
    counts.write_bytes(bytes(8 * len(CLASSES)))
    variables = {
        **environment(),
        "LD_PRELOAD": str(library),
        "FAULTS_UNDER": str(made),
        "FAULTS_COUNTS": str(counts),
        "FAULTS_LOG": str(log),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch itself makes it in TMPDIR
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if fault is not None:
        variables["FAULTS_FAIL"] = f"{fault.kind}:{fault.at}:{FAILURES[fault.kind]}{'+' if fault.lasting else ''}"
    words = [w.format(made=made, ready=ready) for w in case.words]
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=PATIENCE)
    finally:
        left = tuple(_left_of(log))
    numbers = struct.unpack(f"={len(CLASSES)}q", counts.read_bytes())
    return Ended(
        code=child.returncode,
        out=out,
        err=err,
        counts=dict(zip(CLASSES, numbers, strict=True)),
        failed=tuple(log.read_text().splitlines()) if log.exists() else (),
        files=tuple(sorted(p.name for p in made.iterdir() if p != temporary)),
        temporary=tuple(sorted(p.name for p in temporary.iterdir())),
        processes=left,
    )


def _left_of(log: Path) -> Iterator[str]:
    """Processes of a command that has ended, by the environment that they inherited; they are ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FAULTS_LOG") == str(log) and process.status() != psutil.STATUS_ZOMBIE:
                yield " ".join(process.cmdline()) or process.name()
                process.kill()


def wrong_with(case: Case, ended: Ended, plain: Ended) -> list[str]:
    """What is wrong with a command one of whose calls failed, compared with the same command with none failing."""
    found = []
    if "Traceback" in ended.err or "Traceback" in ended.out:
        found.append("a traceback is shown")
    if ended.code < 0:
        found.append(f"it is ended by signal {-ended.code}")
    lines = ended.err.splitlines()
    said = [line for line in lines if line.startswith("lowtide") or (case.slow and "rror:" in line)]  # studies have tables
    if case.trains and BEGINS in ended.out:
        if ended.code not in (case.code, NOT_HELD):
            found.append(f"the training ends with {ended.code}, for {case.code}")
        if _trained(ended) != _trained(plain):
            found.append("the training ends elsewhere")
    elif ended.code != case.code and not said:
        found.append(f"it ends with {ended.code}, and no line says why")
    missing = set(case.files) - set(ended.files)
    if missing and not said:
        found.append(f"not made, and no line says so: {', '.join(sorted(missing))}")
    for kind, left in (
        ("files", set(ended.files) - set(case.files) - set(case.rest if said else ())), ("temporary files", ended.temporary), ("processes", ended.processes),
    ):
        if left:
            found.append(f"{kind} left: {', '.join(sorted(left))}")
    return found


def _trained(ended: Ended) -> list[str]:
    return [line for line in ended.out.splitlines() if line.startswith("trained to")]
