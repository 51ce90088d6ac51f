"""Temporary folders that do not leak: creating one removes those that killed processes left behind.

Each folder contains a file that its creator keeps locked (``flock``). The kernel releases the lock when the process ends, for
whatever reason, so a folder whose lock is free is abandoned. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

try:
    import fcntl
except ImportError:  # Windows: only its creator removes a folder there
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "lowtide-"
_OWNER: Final = ".owner"


@final
class Scratch:
    """A temporary folder that is removed at the end of its ``with`` block."""

    def __init__(self, places: Sequence[str | None] = (None,)) -> None:
        """Create it in the first place that has room, and remove folders that killed processes left there.

        Args:
            places: parent folders to try; None means the default for temporary files (``TMPDIR``).

        Raises:
            OSError: the error of the first place, if none has room.
        """
        self._lock = -1
        failed: OSError | None = None
        for place in places:
            try:
                self.path = self._made(tempfile.gettempdir() if place is None else place)
            except OSError as error:
                failed = failed or error
            else:
                return
        assert failed is not None
        raise failed

    def _made(self, place: str) -> Path:
        _remove_abandoned(Path(place))
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)).resolve()
        unlocked = path / f"{_OWNER}-unlocked"
        with contextlib.suppress(OSError):  # no locks, or a full disk: without the owner file it never counts as abandoned
            self._lock = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlocked.rename(path / _OWNER)  # only once it is locked
        return path

    def __enter__(self) -> Path:
        """Return its path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.remove()

    def remove(self) -> None:
        """Remove it with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, locked by its owner, or just being removed
                lock = os.open(folder / _OWNER, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
