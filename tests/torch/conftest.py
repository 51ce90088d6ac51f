"""Fixtures of the tests that run training steps."""

from __future__ import annotations

import pytest
from lowtide.runtime.updates import streamed_values

SMALL_SLICE = 1 << 12
"""Bytes of a slice with which small models are updated in several."""


@pytest.fixture(params=[False, True], ids=["whole", "sliced"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update each parameter, and change each gradient, in one slice, or in several."""
    if request.param:
        monkeypatch.setattr(streamed_values, "SLICE_BYTES", SMALL_SLICE)
