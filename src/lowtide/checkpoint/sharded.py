"""Tensors of which every rank has a part (``DTensor``): what there is to say of them besides this rank's numbers."""

from __future__ import annotations

import importlib
from typing import Any

from lowtide.base.errors import StateError


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor lies on several ranks."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def layout_of(tensor: Any, where: str) -> dict[str, Any]:
    """How a tensor is laid out over the ranks, as JSON.

    Raises:
        StateError: if it is laid out in a way that is not known here.
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
                f"{where} is laid out over its ranks as {name}, which cannot be saved here: save it through "
                "torch.distributed.checkpoint"
            )


def assembled(layout: dict[str, Any], local: Any) -> Any:
    """The tensor whose part on this rank is given: all ranks call, in the same order.

    Raises:
        StateError: if no process group has been set up.
    """
    dist, tensor = _torch("distributed"), _torch("distributed.tensor")
    if not dist.is_available() or not dist.is_initialized():
        raise StateError("the checkpoint has tensors that lie on several ranks: set up the process group before it is loaded")
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
    """A module of torch, for what was saved with it."""
    return importlib.import_module(f"torch.{name}")


_meshes: dict[Any, Any] = {}


def _mesh(layout: dict[str, Any]) -> Any:
    """A mesh of these ranks; made once, as each has process groups of its own."""
    names = None if layout["names"] is None else tuple(layout["names"])
    key = id(_torch("distributed").group.WORLD), layout["device"], str(layout["ranks"]), names
    if key not in _meshes:
        _meshes[key] = _torch("distributed.device_mesh").DeviceMesh(layout["device"], layout["ranks"], mesh_dim_names=names)
    return _meshes[key]
