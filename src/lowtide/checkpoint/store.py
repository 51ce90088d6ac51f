"""A folder of checkpoints on disk, each of them either complete or absent.

A checkpoint is a folder named by its number. It is written under a temporary name, all its files and the folder itself are
flushed to the disk, and only then is it renamed. A manifest lists each file with its size and SHA-256, and contains a SHA-256
of itself. Tensors and arrays are stored in safetensors files, everything else as JSON beside them.

One module: saving, removing and loading rest on the same names of folders and on one lock.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import math
import operator
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import filelock

from lowtide.base.errors import CheckpointError
from lowtide.base.messages import tell
from lowtide.base.units import format_bytes
from lowtide.checkpoint import ranks
from lowtide.checkpoint.part_files import (
    MANIFEST,
    digest,
    is_written,
    on_host,
    read_manifest,
    read_part,
    sync,
    write_manifest,
    write_part,
)
from lowtide.checkpoint.tree import Arrays, pack

FORMAT: Final = 1
LOCK_SECONDS: Final = 60.0
"""Seconds that a save waits for another process's save in the same folder."""
_UNDONE: Final = ".undone-"
"""Prefix of folders that are not checkpoints yet, or no longer."""
_awaited: set[Store] = set()
"""Stores with an asynchronous save, running or finished, that has not been waited for."""


def _finish() -> None:
    """At the process's end, report asynchronous saves that failed, and make the exit code 1."""
    failed = []
    for store in list(_awaited):
        try:
            store.wait()
        except Exception as error:
            failed.append(str(error))
    if not failed:
        return
    for said in failed:
        tell(f"lowtide: error: the last checkpoint was not saved: {said}")
    logging.shutdown()  # do what Python would still do at exit: only os._exit can change the exit code now
    if "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"]._exit_function()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


atexit.register(_finish)


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint on disk.

    Attributes:
        number: its number; later checkpoints have higher ones.
        path: its folder.
        metric: the figure by which `keep_best` ranks it; None if none was given.
        seconds: when it was written, in seconds since the Unix epoch.
        bytes: total size of its files.
        world: number of ranks that wrote it.
    """

    number: int
    path: Path
    metric: float | None
    seconds: float
    bytes: int
    world: int


@final
class Store:
    """A folder of checkpoints.

    Ranks of ``torch.distributed`` that share the folder save and load together: all must call, and all succeed or all raise.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        best: Literal["min", "max"] = "min",
        asynchronous: bool = False,
    ) -> None:
        """Create the folder.

        Args:
            folder: the folder for checkpoints.
            keep_last: number of newest checkpoints to keep.
            keep_best: number of best checkpoints to keep in addition, by the metric given to `save`. Kept checkpoints take
                disk space but no memory.
            best: whether the lowest (``"min"``) or the highest (``"max"``) metric is best.
            asynchronous: whether `save` copies the state to host memory and writes it from a thread. The device needs no
                second copy; host memory holds one until it is written.

        Raises:
            CheckpointError: if the folder cannot be written.
            ValueError: if `keep_last` is below 1, `keep_best` is below 0, or `best` is neither of the two.
        """
        if operator.index(keep_last) < 1 or operator.index(keep_best) < 0:
            raise ValueError("keep_last must be at least 1, and keep_best at least 0")
        if best not in ("min", "max"):
            raise ValueError(f"best={best!r}: it must be 'min' or 'max'")
        self.folder = Path(folder)
        self._last, self._best, self._sign = keep_last, keep_best, 1 if best == "min" else -1
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        with _explained(f"cannot write checkpoints in {self.folder}", self):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._folders():  # with checkpoints to load, a read-only folder is of use too
                probe = self.folder / f"{_UNDONE}{os.getpid()}-probe"
                probe.touch()
                probe.unlink()
        self._lock = filelock.FileLock(self.folder / ".lock", timeout=LOCK_SECONDS)

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, state: Any, *, metric: float | None = None) -> int:
        """Write a checkpoint and return its number. A failure leaves earlier checkpoints intact.

        If the last asynchronous save fails and is not waited for, the process reports it at its end and exits with code 1.

        Args:
            state: a tree of dicts, lists, numbers, strings, tensors and arrays.
            metric: the figure by which `keep_best` ranks the checkpoint.

        Raises:
            StateError: if something in the state cannot be saved.
            CheckpointError: if the checkpoint cannot be written (disk full, folder read-only, another rank failed), or if the
                previous asynchronous save failed.
        """
        self.wait()
        problem: CheckpointError | None = None
        tree: Any = None
        arrays: Arrays = {}
        following = 0
        try:
            tree, arrays = pack(state)
            with _explained(f"cannot write a checkpoint in {self.folder}", self):
                self._check_space(arrays)
                following = self._following()
        except CheckpointError as error:
            problem = error
        said, number = zip(*ranks.gather((None if problem is None else str(problem), following)), strict=True)
        if any(said):
            raise problem or CheckpointError(f"another rank could not save: {next(filter(None, said))}")
        if self._asynchronous:
            arrays = {name: on_host(array) for name, array in arrays.items()}
        if not self._asynchronous or ranks.world() > 1:  # ranks coordinate by collectives, which must not run in a thread
            return self._write(number[0], tree, arrays, metric)
        _awaited.add(self)
        self._thread = threading.Thread(target=self._aside, args=(number[0], tree, arrays, metric), name="lowtide-save")
        self._thread.start()
        return int(number[0])

    def wait(self) -> None:
        """Wait until the last saved checkpoint is on the disk.

        Raises:
            CheckpointError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _awaited.discard(self)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _aside(self, number: int, tree: Any, arrays: Arrays, metric: float | None) -> None:
        try:
            self._write(number, tree, arrays, metric)
        except BaseException as error:  # raised by the script's next call of `wait`, `save` or `newest`
            self._failed = error

    def _following(self) -> int:
        return max((int(path.name) for path in self._folders()), default=0) + 1

    def _check_space(self, arrays: Arrays) -> None:
        needed = sum(int(array.nbytes) for array in arrays.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"the disk is full: a checkpoint takes {format_bytes(needed)}, but {self.folder} has {format_bytes(free)} free"
                f"{self._what_is_left()}: make room, or keep fewer checkpoints (keep_last, keep_best)"
            )

    def _write(self, number: int, tree: Any, arrays: Arrays, metric: float | None) -> int:
        """Write this rank's part; the first rank then publishes the checkpoint. Returns its number."""
        undone = self.folder / f"{_UNDONE}{number:010d}-{ranks.first(os.getpid())}"
        problem: CheckpointError | None = None
        part: dict[str, Any] = {}
        try:
            with _explained(f"cannot write checkpoint {number} in {self.folder}", self):
                part = write_part(undone / f"rank-{ranks.rank()}", tree, arrays)
        except CheckpointError as error:
            problem = error
        parts: list[tuple[str | None, Any]] = ranks.gather((None if problem is None else str(problem), part))
        if problem is None and all(said is None for said, _ in parts) and ranks.rank() == 0:
            try:
                with _explained(f"cannot write checkpoint {number} in {self.folder}", self), self._lock:
                    number = self._publish(undone, number, [part for _, part in parts], metric)
            except CheckpointError as error:
                problem = error
            except filelock.Timeout:
                problem = CheckpointError(f"another process has been saving in {self.folder} for {LOCK_SECONDS:.0f} s")
        said = [said for said, _ in parts if said is not None]
        published, number = ranks.first((None if problem is None else str(problem), number))
        if said or published is not None:
            if ranks.rank() == 0:
                shutil.rmtree(undone, ignore_errors=True)
            raise problem or CheckpointError(f"another rank could not save: {(said or [published])[0]}")
        return int(number)

    def _publish(self, undone: Path, number: int, parts: list[Any], metric: float | None) -> int:
        number = max(number, self._following())  # another process may have saved here meanwhile
        size = sum(entry["bytes"] for part in parts for entry in part["files"].values())
        body = {
            "format": FORMAT, "number": number, "seconds": time.time(), "metric": metric, "bytes": size, "parts": parts,
        }  # fmt: skip
        write_manifest(undone / MANIFEST, body)
        sync(undone)
        undone.rename(self.folder / f"{number:010d}")
        sync(self.folder)
        self._prune()
        return number

    def _prune(self) -> None:
        """Remove checkpoints that need not be kept, and unfinished folders of processes that have ended."""
        saved = self.saved()
        keep = {s.number for s in saved[-self._last :]}
        scored = [s for s in saved if s.metric is not None and not math.isnan(s.metric)]
        keep |= {s.number for s in sorted(scored, key=lambda s: self._sign * (s.metric or 0.0))[: self._best]}
        for s in saved:
            if s.number not in keep:
                gone = self.folder / f"{_UNDONE}{s.path.name}-old"
                with contextlib.suppress(OSError):
                    s.path.rename(gone)
        for left in self.folder.glob(f"{_UNDONE}*"):
            if not is_written(left):
                shutil.rmtree(left, ignore_errors=True)

    def _what_is_left(self) -> str:
        with contextlib.suppress(OSError):
            saved = self.saved()
            if saved:
                return f"; checkpoint {saved[-1].number} is unchanged"
        return ""

    # --- loading ------------------------------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit() and path.is_dir())

    def saved(self) -> list[Saved]:
        """Checkpoints in order of their numbers, from their manifests; those with a damaged manifest are left out."""
        found = []
        for path in self._folders():
            body = read_manifest(path / MANIFEST)
            if body is not None:
                found.append(_described(path, body))
        return found

    def newest(self) -> Saved | None:
        """The newest checkpoint that is intact on every rank; None if there is none. Reads every file to verify its digest.

        Damaged checkpoints are skipped with a warning.
        """
        self.wait()
        for path in ranks.first([str(path) for path in reversed(self._folders())]):
            folder = Path(path)
            found, trouble = self._examine(folder)
            if not any(ranks.gather(trouble)):
                return found
            if trouble:
                warnings.warn(f"checkpoint {folder} is damaged ({trouble}); using an older one", stacklevel=2)
        return None

    def _examine(self, folder: Path) -> tuple[Saved | None, str]:
        """A checkpoint as its manifest describes it, and the damage to this rank's part of it; empty if it is intact.

        The manifest is read once: another process may remove the checkpoint meanwhile, or a second reading fail.

        Raises:
            CheckpointError: if another version of Lowtide or another number of ranks wrote it.
        """
        body = read_manifest(folder / MANIFEST)
        if body is None:
            return None, "its manifest is missing or invalid"
        return _described(folder, body), self._damage(folder, body)

    @staticmethod
    def _damage(folder: Path, body: dict[str, Any]) -> str:
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} was written by another version of Lowtide (format {body['format']}): load it with that version"
            )
        if len(body["parts"]) != ranks.world():
            raise CheckpointError(
                f"{folder} was saved by {len(body['parts'])} ranks, but {ranks.world()} are loading it: "
                "start as many ranks as saved it"
            )
        for name, entry in body["parts"][ranks.rank()]["files"].items():
            file = folder / f"rank-{ranks.rank()}" / name
            try:
                if file.stat().st_size != entry["bytes"] or digest(file) != entry["sha256"]:
                    return f"{name} differs from what was written"
            except OSError as error:
                return f"{name}: {error.strerror}"
        return ""

    def load(self, saved: Saved | None = None) -> Any:
        """Load the state of a checkpoint, by default of the newest intact one; None if there is no checkpoint.

        Raises:
            CheckpointError: if the given checkpoint, or every checkpoint, is damaged; if another number of ranks or another
                version of Lowtide saved it; or if it cannot be read, on this rank or another.
        """
        chosen = self.newest() if saved is None else saved
        if chosen is None and any(ranks.gather(bool(self._folders()))):
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: restore an intact one, or move the folder away to start over"
            )
        if chosen is None:
            return None
        if saved is not None:
            trouble = [t for t in ranks.gather(self._examine(saved.path)[1]) if t]
            if trouble:
                raise CheckpointError(f"checkpoint {saved.path} is damaged: {trouble[0]}")
        found, problem = None, None
        try:
            found = read_part(chosen.path)
        except Exception as error:
            if not _is_of_the_system(error):
                raise
            problem = f"cannot read checkpoint {chosen.path}: {_reason(error)}"
        troubles = [t for t in ranks.gather(problem) if t]
        if troubles:
            raise CheckpointError(troubles[0])
        return found


def _described(path: Path, body: dict[str, Any]) -> Saved:
    """The checkpoint in a folder, from its manifest."""
    return Saved(int(path.name), path, body["metric"], body["seconds"], body["bytes"], len(body["parts"]))


@contextlib.contextmanager
def _explained(what: str, store: Store) -> Iterator[None]:
    """Turn errors of the system into :class:`CheckpointError`, with what failed, why, and what to do."""
    try:
        yield
    except Exception as error:
        if not _is_of_the_system(error):
            raise
        if _full(error):
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({format_bytes(shutil.disk_usage(store.folder).free)} free)"
            left = store._what_is_left()
            raise CheckpointError(f"{what}: the disk is full{free}{left}: make room, or keep fewer checkpoints") from error
        raise CheckpointError(f"{what}: {_reason(error)}{store._what_is_left()}") from error


def _is_of_the_system(error: Exception) -> bool:
    """Whether an error means that a file could not be read or written; safetensors has its own class for that."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _full(error: Exception) -> bool:
    code = getattr(error, "errno", None)
    return code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or any(
        word in str(error) for word in ("No space left", "StorageFull", "File too large", "quota exceeded")
    )
