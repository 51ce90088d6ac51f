"""Minimum cuts of networks with real capacities, by scipy's maximum flow of 32-bit whole numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from lowtide.planning.bounds.precedence import Flags

_TOTAL, _MOST = 2**29, 2**30 - 1
"""Whole capacity of a flow in all, and of one edge, at most: flows, and the sums of a flow and a capacity, are counted in 32
bits. An edge with the second is never full."""
_UNITS = (1.0, 2.0**-10)
"""Units of the whole capacities of two flows: the second finds what rounding took from the first."""


def minimum_cut(
    tails: NDArray[np.int64], heads: NDArray[np.int64], capacity: NDArray[np.float64], *, source: int, sink: int, total: float
) -> tuple[Flags, float]:
    """A cheapest set of nodes with the source and without the sink.

    Args:
        tails: per edge, the node that it leaves.
        heads: per edge, the node that it enters. There is at most one edge from one node to another.
        capacity: per edge, what it costs if its tail is in the set and its head is not; may be infinite.
        source: the first of the last two nodes.
        sink: the last node.
        total: an upper bound on the cost of the cheapest set.

    Returns:
        Per node, whether it is in the set, and a lower bound on the cost of every set: the value of a flow whose capacities
        are rounded down. (The set is the cheapest to within that rounding.)
    """
    scale = _TOTAL / total if total > 0 else 1.0
    left = coo_array((capacity * scale, (tails, heads)), shape=(sink + 1, sink + 1)).tocsr()
    value = 0.0
    for unit in _UNITS:
        flow = maximum_flow(_floored(left, unit), source, sink)
        value += flow.flow_value * unit
        left = left - flow.flow * unit
    chosen = np.zeros(sink + 1, dtype=bool)
    chosen[breadth_first_order(_floored(left, _UNITS[-1]), source, return_predecessors=False)] = True
    return chosen, float(value / scale)


def _floored(capacity: csr_array, unit: float) -> csr_array:
    """Capacities as whole numbers of units, rounded down, without those that are zero."""
    found = csr_array(capacity, copy=True)
    found.data = np.clip(np.floor(capacity.data / unit), 0, _MOST).astype(np.int32)
    found.eliminate_zeros()
    return found
