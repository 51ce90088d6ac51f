"""Bundles recordings at several sizes in one file (a zip archive), for ``lowtide predict``."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from lowtide.base.errors import RecordingError
from lowtide.base.temporary_folders import Scratch
from lowtide.recording.reader import Recording, read


def save(files: Sequence[Path], bundle: Path) -> None:
    """Write recordings into one bundle.

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
    """Read the recordings in a file, which is a bundle or a single recording.

    Raises:
        RecordingError: if it is neither, or is damaged.
    """
    if not zipfile.is_zipfile(file):
        return [read(file)]
    with zipfile.ZipFile(file) as archive, Scratch() as folder:
        names = sorted(n for n in archive.namelist() if n.endswith(".lowtide") and "/" not in n)
        if not names:
            raise RecordingError(f"{file} is an archive without recordings: give one that `lowtide batch --predict -o` wrote")
        try:
            return [read(Path(archive.extract(name, folder))) for name in names]
        except zipfile.BadZipFile:
            raise RecordingError(f"{file} is damaged: record again") from None
