"""A sweep that is killed at up to fifty random moments."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("sweeps", Path(__file__).parents[1] / "process" / "test_sweep.py")
sweeps = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sweeps)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [11, 12])
def test_no_cell_is_lost_or_run_twice_in_many_kills(tmp_path, seed):
    """Up to 25 kills of each of two sweeps, at least 12; there are more cells than can run between the kills."""
    assert sweeps.killed_again_and_again(tmp_path, kills=25, seed=seed, cells=40) >= 12
    sweeps.check_once(tmp_path, 40)
