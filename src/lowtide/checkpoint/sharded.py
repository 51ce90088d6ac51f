"""Describes and restores the layout of tensors distributed over several ranks (``DTensor``)."""

from __future__ import annotations

import importlib
from typing import Any

from lowtide.base.errors import StateError


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is distributed over ranks."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def layout_of(tensor: Any, where: str) -> dict[str, Any]:
    """A tensor's layout over the ranks, as JSON.

    Args:
        tensor: a ``DTensor``.
        where: its place in the state, for the error message.

    Raises:
        StateError: if one of its placements is not known here.
    """
    mesh = tensor.device_mesh
    return {
        "device": mesh.device_type,
        "ranks": mesh.mesh.tolist(),
        "names": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names),
        "placements": [_words(placement, where) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
    }


def _words(placement: Any, where: str) -> list[Any]:
    match type(placement).__name__:
        case "Shard":
            return ["shard", placement.dim]
        case "Replicate":
            return ["replicate"]
        case "Partial":
            return ["partial", placement.reduce_op]
        case name:
            raise StateError(
                f"{where} has the placement {name}, which cannot be saved here: save it with "
                "torch.distributed.checkpoint"
            )


def assembled(layout: dict[str, Any], local: Any) -> Any:
    """Assemble a tensor from this rank's local part; all ranks must call it, in the same order.

    Raises:
        StateError: if no process group has been set up.
    """
    dist, tensor = _torch("distributed"), _torch("distributed.tensor")
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("the checkpoint has sharded tensors: initialize the process group before loading it")
    kinds: dict[str, Any] = {"shard": tensor.Shard, "replicate": tensor.Replicate, "partial": tensor.Partial}
    return tensor.DTensor.from_local(
        local,
        _mesh(layout),
        [kinds[kind](*arguments) for kind, *arguments in layout["placements"]],
        run_check=False,
        shape=tuple(layout["shape"]),
        stride=tuple(layout["stride"]),
    )


def _torch(name: str) -> Any:
    """Import a module of torch: the script may not have imported it yet."""
    return importlib.import_module(f"torch.{name}")


_meshes: dict[Any, Any] = {}


def _mesh(layout: dict[str, Any]) -> Any:
    """The device mesh of a layout, created only once, as each mesh creates process groups."""
    names = None if layout["names"] is None else tuple(layout["names"])
    key = id(_torch("distributed").group.WORLD), layout["device"], str(layout["ranks"]), names
    if key not in _meshes:
        _meshes[key] = _torch("distributed.device_mesh").DeviceMesh(layout["device"], layout["ranks"], mesh_dim_names=names)
    return _meshes[key]
