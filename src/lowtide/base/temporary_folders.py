"""Temporary folders that outlive no one: those of processes that were killed are removed by the next that makes one.

A folder holds a file which its maker keeps locked (``flock``): the kernel drops the lock when the process ends, however it
ends, so that a folder whose lock is free belongs to nobody. Standard library only.
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
except ImportError:  # Windows: nothing is removed there but by its maker
    fcntl = None  # type: ignore[assignment]

PREFIX: Final = "lowtide-"
_OWNER: Final = ".owner"


@final
class Scratch:
    """A temporary folder, until its ``with`` block is left."""

    def __init__(self, places: Sequence[str | None] = (None,)) -> None:
        """Make it, in the first place that has room, and remove what killed processes have left there.

        Args:
            places: folders; None is where temporary files lie (``TMPDIR``).

        Raises:
            OSError: if there is no room in any of them: the error of the first.
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
        with contextlib.suppress(OSError):  # file systems without locks, full disks: nobody takes it for abandoned then
            self._lock = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlocked.rename(path / _OWNER)  # locked before it bears this name
        return path

    def __enter__(self) -> Path:
        """Its path."""
        return self.path

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(place: Path) -> None:
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, or another process removes it at this moment
                lock = os.open(folder / _OWNER, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
