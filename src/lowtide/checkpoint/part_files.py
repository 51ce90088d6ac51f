"""Reads and writes a checkpoint's files: each rank's arrays and state tree, and the manifest that verifies them."""

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
"""Approximate size in bytes of a file of tensors; also the host memory that writing a device's tensors takes."""
MANIFEST: Final = "manifest.json"


def read_part(checkpoint: Path) -> Any:
    """Read this rank's state.

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
    """A checkpoint's arrays, each read from its file when it is requested."""

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
        except RuntimeError as error:  # torch maps the file itself; its error then contains the path
            if str(path) not in str(error):
                raise
            raise OSError(errno.EIO, str(error)) from error
        # copy to aligned memory: kernels compute other bits at other alignments, and the file may be removed
        return found.clone() if kind == "pt" else found.copy()


def is_written(undone: Path) -> bool:
    """Whether another process of this machine is still writing an unfinished checkpoint's folder."""
    owner = undone.name.rpartition("-")[2]
    return owner.isdigit() and int(owner) != os.getpid() and psutil.pid_exists(int(owner))


def write_part(folder: Path, tree: Any, arrays: Arrays) -> dict[str, Any]:
    """Write one rank's files, and return its entry for the manifest: sizes, digests, and the file of each array."""
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
    """Group arrays into shards of about `SHARD` bytes, tensors and NumPy arrays separately."""
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
            apart[name] = host.clone() if start in seen else host  # safetensors refuses tensors that share a storage
            seen.add(start)
        save_file(apart, file)
    else:
        from safetensors.numpy import save_file as save_arrays

        save_arrays({name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}, file)


def on_host(array: Any) -> Any:
    """Copy an array to host memory, without a copy on the device."""
    t = torch()
    if t is not None and isinstance(array, t.Tensor):
        return array.to("cpu", copy=True)
    return np.array(array)


def write_manifest(file: Path, body: dict[str, Any]) -> None:
    """Write a checkpoint's manifest with a digest of the manifest itself."""
    text = json.dumps(body)
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}))
    sync(file)


def read_manifest(file: Path) -> dict[str, Any] | None:
    """Read a checkpoint's manifest; None if it cannot be read, or its digest does not match."""
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
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk (``fsync``)."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
