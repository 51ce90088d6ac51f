"""The files of one part of a checkpoint: arrays, a tree of everything else, and the manifest that says what is whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from lowtide.base.units import MIB
from lowtide.checkpoint import ranks
from lowtide.checkpoint.tree import Arrays, loaded_torch, torch, unpack

SHARD: Final = 256 * MIB
"""Tensors are written in files of about so many bytes: what a device's tensors take in host memory while they are written."""
MANIFEST: Final = "manifest.json"


def read_part(checkpoint: Path) -> Any:
    """This rank's state.

    Raises:
        OSError, SafetensorError: if a file cannot be read.
    """
    body = read_manifest(checkpoint / MANIFEST)
    if body is None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(checkpoint / MANIFEST))
    folder = checkpoint / f"rank-{ranks.rank()}"
    places: Mapping[str, str] = body["parts"][ranks.rank()]["arrays"]
    return unpack(json.loads((folder / "state.json").read_text()), _Arrays(folder, places).get)


class _Arrays:
    """Arrays of a checkpoint, read one by one as they are asked for."""

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._folder, self._places = folder, places

    def get(self, name: str) -> Any:
        from safetensors import safe_open

        kind = "pt" if name.startswith("t") else "np"
        if kind == "pt":
            loaded_torch()
        path = self._folder / self._places[name]
        try:
            with safe_open(path, framework=kind) as file:
                found = file.get_tensor(name)
        except RuntimeError as error:  # torch maps the file itself, and names it
            if str(path) not in str(error):
                raise
            raise OSError(errno.EIO, str(error)) from error
        # aligned memory of its own: kernels give other bits at other alignments, and the file may go
        return found.clone() if kind == "pt" else found.copy()


def is_written(undone: Path) -> bool:
    """Whether another process of this machine is at work on a folder that is no checkpoint yet."""
    owner = undone.name.rpartition("-")[2]
    return owner.isdigit() and int(owner) != os.getpid() and psutil.pid_exists(int(owner))


def write_part(folder: Path, tree: Any, arrays: Arrays) -> dict[str, Any]:
    """Write one rank's files; their manifest."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(tree))
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(arrays)):
        name = f"{next(iter(shard))[0]}-{number:05d}.safetensors"
        _write_arrays(folder / name, shard)
        places.update(dict.fromkeys(shard, name))
    files = {}
    for file in sorted(folder.iterdir()):
        sync(file)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    sync(folder)
    return {"files": files, "arrays": places}


def _shards(arrays: Arrays) -> Iterator[Arrays]:
    """Arrays in groups of about `SHARD` bytes; tensors and NumPy's arrays apart."""
    for kind in ("t", "n"):
        shard: Arrays = {}
        size = 0
        for name, array in arrays.items():
            if name[0] != kind:
                continue
            if shard and size + array.nbytes > SHARD:
                yield shard
                shard, size = {}, 0
            shard[name] = array
            size += array.nbytes
        if shard:
            yield shard


def _write_arrays(file: Path, arrays: Arrays) -> None:
    if next(iter(arrays)).startswith("t"):
        from safetensors.torch import save_file

        seen: set[int] = set()
        apart = {}
        for name, tensor in arrays.items():
            host = tensor.cpu().contiguous()
            start = host.untyped_storage().data_ptr()
            apart[name] = host.clone() if start in seen else host  # the format wants no two in one storage
            seen.add(start)
        save_file(apart, file)
    else:
        from safetensors.numpy import save_file as save_arrays

        save_arrays({name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}, file)


def on_host(array: Any) -> Any:
    """A copy in host memory; none is made on the device."""
    t = torch()
    if t is not None and isinstance(array, t.Tensor):
        return array.to("cpu", copy=True)
    return np.array(array)


def write_manifest(file: Path, body: dict[str, Any]) -> None:
    """Write what a checkpoint consists of, with its own digest."""
    text = json.dumps(body)
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}))
    sync(file)


def read_manifest(file: Path) -> dict[str, Any] | None:
    """What a checkpoint consists of; None where that cannot be read, or is not what was written."""
    try:
        whole = json.loads(file.read_text())
        text = whole["body"]
        if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
            return None
        found: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
