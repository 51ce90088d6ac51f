"""Fixtures that all tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def heap():  # noqa: ANN201 - imported late: floors 0-2 are tested without torch
    """The preloaded heap counter; ``make test`` preloads it."""
    from lowtide.live.heap import counters

    found = counters()
    assert found is not None, "the heap counter is not preloaded: run these tests by `make test`"
    return found
