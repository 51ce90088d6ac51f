"""Marks checkpoints that a framework wrote once they are complete, so that a partial one is never loaded."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from lowtide.base.errors import CheckpointError
from lowtide.base.files import is_full, why
from lowtide.checkpoint.part_files import digest, sync

_SUFFIX = ".whole.json"


def mark(path: Path) -> None:
    """Flush a file, or all files of a folder, to the disk, and write their sizes and SHA-256 digests to a file beside it.

    Raises:
        CheckpointError: if that fails; checkpoints marked earlier are intact.
    """
    note = path.parent / f"{path.name}{_SUFFIX}"
    undone = note.with_suffix(".undone")
    with written(path):
        files = _files(path)
        for file in files:
            sync(file)
        if path.is_dir():
            sync(path)
        body = {str(f.relative_to(path.parent)): [f.stat().st_size, digest(f)] for f in files}
        try:
            undone.write_text(json.dumps(body))
            sync(undone)
            undone.rename(note)
        except OSError:
            undone.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Turn a failure to write a checkpoint, in the framework or here, into :class:`CheckpointError`.

    Raises:
        CheckpointError: if the block fails with an ``OSError``, or with the ``RuntimeError`` of torch's file writer.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and "PytorchStreamWriter" not in str(error) and "enforce fail" not in str(error):
            raise
        former = newest(path.parent)
        kept = "" if former is None else f"; {former} is unchanged"
        remedy = "check that its folder exists and is writable" if _other(error) else "make room, or keep fewer checkpoints"
        raise CheckpointError(f"cannot write the checkpoint {path}: {why(error)}{kept}: {remedy}") from error


def _other(error: Exception) -> bool:
    """Whether the cause is not a full or failing disk; torch's file writer does not give one, and counts as a full disk."""
    return isinstance(error, OSError) and not is_full(error)


def whole(path: Path) -> bool:
    """Whether a checkpoint was marked as complete and has not changed since."""
    with contextlib.suppress(OSError, ValueError):
        body = json.loads((path.parent / f"{path.name}{_SUFFIX}").read_text())
        return bool(body) and all(
            (path.parent / name).stat().st_size == size and digest(path.parent / name) == sha
            for name, (size, sha) in body.items()
        )
    return False


def newest(folder: str | os.PathLike[str]) -> str | None:
    """Path of the newest complete checkpoint that one of Lowtide's callbacks marked in a folder; None if there is none.

    For ``trainer.train(resume_from_checkpoint=newest(...))`` and ``trainer.fit(..., ckpt_path=newest(...))``.
    """
    base = Path(folder)
    notes = sorted(base.glob(f"*{_SUFFIX}"), key=lambda n: n.stat().st_mtime_ns, reverse=True) if base.is_dir() else []
    for note in notes:
        path = base / note.name.removesuffix(_SUFFIX)
        if whole(path):
            return str(path)
    return None


def forget(path: Path) -> None:
    """Remove a marked file's mark, then the file."""
    for gone in (path.parent / f"{path.name}{_SUFFIX}", path):
        with contextlib.suppress(FileNotFoundError):
            gone.unlink()


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
