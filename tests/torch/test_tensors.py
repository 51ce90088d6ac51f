"""Law: the bytes of a tensor are those of the storages that it owns, and reading them leaves no trace."""

from __future__ import annotations

import warnings
from typing import Any, Self

import torch
from lowtide.runtime.tensors import grad_of, storages_of, with_gradients


class Halves(torch.Tensor):
    """A tensor made of two others; its own storage is a dummy, as with a ``DTensor``."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, (len(first) + len(second),), dtype=first.dtype)
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_wrapper_subclass_holds_its_parts_storages() -> None:
    first, second = torch.zeros(100), torch.zeros(28)
    found = storages_of([Halves(first, second), first, first[3:]])
    assert sorted(s.nbytes() for s in found.values()) == [112, 400]
    assert set(found) == {first.untyped_storage()._cdata, second.untyped_storage()._cdata}


def test_tensors_without_storages_hold_no_bytes() -> None:
    assert not storages_of([torch.eye(3).to_sparse()])


def test_gradients_are_read_without_warnings() -> None:
    leaf = torch.ones(3, requires_grad=True)
    made, kept = leaf * 2, leaf * 3
    kept.retain_grad()
    (made + kept).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grad_of(made) is None
        assert torch.equal(grad_of(kept), torch.ones(3))
        assert [len(t) for t in with_gradients([leaf, made, kept])] == [3] * 5
