"""Rules of short runs and of the files that are written about them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lowtide.studies.size import trial
from lowtide.studies.size.throughput import Point, Rate, _decode, to_json


@pytest.mark.parametrize("values", [("8",), ("8", "128")])
@pytest.mark.parametrize("rate", [None, Rate(low=1.0, median=2.0, high=3.0)])
def test_a_point_is_read_back_unchanged(values: tuple[str, ...], rate: Rate | None) -> None:
    """One value or several, with a rate or without."""
    point = Point(
        values=values, how="plain", ended="ok", message="", rate=rate, cold_peak_bytes=1, peak_bytes=None if rate is None else 2
    )
    written = to_json(point)
    assert written["value"] == (values[0] if len(values) == 1 else list(values))
    assert _decode(written) == point


@pytest.mark.parametrize(("age", "ended"), [(0.0, 7), (2 * trial.LINGER_SECONDS, None)])
def test_a_run_with_a_written_result_may_linger_for_a_limited_time(age: float, ended: int | None, tmp_path: Path) -> None:
    """Threads of a library may keep a process from ending: after `LINGER_SECONDS` it is no longer waited for."""
    result = tmp_path / "result.json"
    result.write_text("{}")
    written = time.time() - age
    os.utime(result, (written, written))
    looks = iter([False, False, True])

    def wait(_: float) -> int:
        if next(looks):
            return 7
        raise subprocess.TimeoutExpired("x", 0)

    assert trial._ended(SimpleNamespace(wait=wait), 3600, result) == ended  # type: ignore[arg-type]
