"""Recordings at several sizes in one file (a zip archive), for ``lowtide predict``."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from lowtide.base.errors import RecordingError
from lowtide.base.temporary_folders import Scratch
from lowtide.recording.reader import Recording, read


def save(files: Sequence[Path], bundle: Path) -> None:
    """Put recordings into one file.

    Raises:
        RecordingError: if it cannot be written.
    """
    try:
        with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
            for number, file in enumerate(files):
                archive.write(file, f"{number}.lowtide")
    except OSError as error:
        raise RecordingError(f"cannot write {bundle}: {error.strerror}") from None


def load(file: Path) -> list[Recording]:
    """The recordings of a file: of a bundle, or the one that it is itself.

    Raises:
        RecordingError: if it is neither.
    """
    if not zipfile.is_zipfile(file):
        return [read(file)]
    with zipfile.ZipFile(file) as archive, Scratch() as folder:
        names = sorted(n for n in archive.namelist() if n.endswith(".lowtide") and "/" not in n)
        if not names:
            raise RecordingError(f"{file} is an archive without recordings")
        try:
            return [read(Path(archive.extract(name, folder))) for name in names]
        except zipfile.BadZipFile:
            raise RecordingError(f"{file} is damaged: make the recordings again") from None
