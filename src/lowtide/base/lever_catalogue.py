"""The memory optimizations ("levers") that ``lowtide run`` has besides recomputing and offloading activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lowtide.base.errors import UsageError

GRADIENTS: Final = "move-gradients"
STATES: Final = "move-states"
UPDATE: Final = "update-in-backward"
SLICES: Final = "sliced-update"
LOSS: Final = "chunked-loss"
SPLIT_OPS: Final = "split-ops"
CHECKPOINTS: Final = "plan-checkpoints"

WIDE: Final = 512
"""Fewest output features of a linear layer whose loss runs in pieces ..."""
LEAST_LOGITS_BYTES: Final = 1 << 20
"""... and fewest bytes of its logits."""
LEAST_PIECES_BYTES: Final = 1 << 20
"""Fewest bytes of the input of a convolution or batch norm whose backward runs in pieces."""
CHANNEL_PIECES: Final = 16
"""Pieces into which a batch norm's channels are cut; each piece is copied three times."""
_SAMPLE_PIECES: Final = 8
_ALONE: Final = 20480
"""Elements of a sample (over three dimensions) above which oneDNN convolves a batch of one; torch unfolds a smaller one, which
takes more memory (``use_mkldnn`` in ``aten/src/ATen/native/Convolution.cpp``)."""
_PICTURES: Final = 4
"""Dimensions of a batch of images."""


def sample_pieces(samples: int, elements: int, dimensions: int) -> int:
    """Number of pieces into which a convolution's batch is cut; 1 if it stays whole.

    Args:
        samples: number of samples in the batch.
        elements: number of elements in one sample.
        dimensions: number of dimensions of the batch.
    """
    least = 1 if elements > _ALONE and dimensions <= _PICTURES else 2
    return max(1, min(_SAMPLE_PIECES, samples // least))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One memory optimization.

    Attributes:
        name: as in ``--allow``.
        exact: whether results are bit-equal to a plain run.
        automatic: whether it is used without being requested when a budget needs it: it is exact, and no script can break it.
        text: what it does.
        bits: how it changes the bits of the results.
    """

    name: str
    exact: bool
    automatic: bool = False
    text: str
    bits: str


LEVERS: Final[dict[str, Lever]] = {
    known.name: known
    for known in (
        Lever(
            name=GRADIENTS,
            exact=True,
            automatic=True,
            text="offloads each gradient as soon as it is complete, and fetches it for its parameter's update",
            bits="the same",
        ),
        Lever(
            name=STATES,
            exact=True,
            automatic=True,
            text="offloads gradients, and optimizer states between updates; fetches each for its own parameter's update",
            bits="the same",
        ),
        Lever(
            name=UPDATE,
            exact=True,
            text="updates each parameter in the backward, as soon as its gradient is complete, and frees the gradient",
            bits="the same",
        ),
        Lever(
            name=SLICES,
            exact=True,
            automatic=True,
            text="runs a foreach optimizer's update in slices whose temporaries fit the budget",
            bits="the same",
        ),
        Lever(
            name=CHECKPOINTS,
            exact=True,
            automatic=True,
            text="runs the script's own torch.utils.checkpoint calls as plain calls: the plan decides what is recomputed",
            bits="the same",
        ),
        Lever(
            name=LOSS,
            exact=False,
            text="runs a wide linear layer and the cross entropy after it in chunks; the full logits never exist",
            bits="sums in the loss are rounded in another order",
        ),
        Lever(
            name=SPLIT_OPS,
            exact=False,
            text="splits recurrent layers along the sequence, and attention and convolutions' backwards along the batch",
            bits="sums in the gradients of weights are rounded in another order",
        ),
    )
}


def parse_levers(texts: str | Iterable[str]) -> frozenset[str]:
    """Parse one or several texts such as ``chunked-loss,split-ops`` into lever names.

    ``exact`` stands for all exact levers, ``all`` for every lever.

    Raises:
        UsageError: if there is no such lever.
    """
    found: set[str] = set()
    for name in (part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(",")):
        if name in ("all", "exact"):
            found |= {known.name for known in LEVERS.values() if known.exact or name == "all"}
        elif name in LEVERS:
            found.add(name)
        else:
            raise UsageError(f"unknown memory optimization {name!r}: choose from {', '.join(LEVERS)}, `exact` and `all`")
    return frozenset(found)


def check_levers(allow: str | Iterable[str], without: str | Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The levers that may be used, and those that must not be.

    Raises:
        UsageError: if there is no such lever, or one is both allowed and excluded.
    """
    allowed, excluded = parse_levers(allow), parse_levers(without)
    if allowed & excluded:
        raise UsageError(f"{', '.join(sorted(allowed & excluded))}: both allowed and excluded; choose one")
    return allowed, excluded
