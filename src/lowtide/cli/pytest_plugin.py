"""``@pytest.mark.peak_memory("512 MiB", phase="backward")``: fails a test whose tensors take more memory.

The peak is the highest point of torch's allocator above what was live when the test began; with ``phase``, the highest point
in that phase. On the CPU, the same test takes the same bytes every time. The failure message lists what was live at the peak.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowtide.base.errors import LowtideError, RecordingError, UsageError
from lowtide.base.files import ROOM_FOR_TEMPORARY_FILES

if TYPE_CHECKING:
    from lowtide.recording.reader import Recording

MARK = "peak_memory"
TOP = 5


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(size, phase=None): fail if torch's allocator grows by more than size since the test began, in any phase "
        "or in the given one: forward, loss, backward, optimizer, zero_grad, evaluation or data",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reject invalid marks before any test runs: a test that is expected to fail would hide them."""
    for item in items:
        for mark in item.iter_markers(MARK):
            try:
                _asked(*mark.args, **mark.kwargs)
            except (TypeError, LowtideError) as error:
                raise pytest.UsageError(f"{item.nodeid}: {MARK}: {error}") from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record a marked test, and compare its peak with the limit once it has passed."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return (yield)
    limit, phase = _asked(*mark.args, **mark.kwargs)
    from lowtide import api
    from lowtide.recording.reader import read

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test.lowtide"
        gc.collect()
        with api.record(file):
            result = yield
        try:
            recording = read(file)
        except RecordingError as error:
            pytest.fail(f"{MARK}: nothing was recorded: {error}: {ROOM_FOR_TEMPORARY_FILES}", pytrace=False)
        _judge(recording, limit, phase)
    return result


def _asked(size: str | int, phase: str | None = None) -> tuple[int, str | None]:
    from lowtide.base.trace import Phase
    from lowtide.base.units import parse_bytes

    if phase is not None and phase not in set(Phase):
        raise UsageError(f"unknown phase {phase!r}: choose from {', '.join(Phase)}")
    limit = parse_bytes(size) if isinstance(size, str) else size
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise UsageError(f"{size!r} is not a size: give bytes, or a string such as '512 MiB'")
    return limit, phase


def _judge(recording: Recording, limit: int, phase: str | None) -> None:
    if recording.meta.get("stopped") or recording.meta.get("died"):  # the peak may have come later
        pytest.fail(f"{MARK}: the recording stopped before the test did: {ROOM_FOR_TEMPORARY_FILES}", pytrace=False)
    base = recording.steps[0].start_bytes if recording.steps else 0
    peaks = [p.peak_bytes - base for row in recording.steps for p in row.phases if phase is None or p.name == phase]
    if not peaks:
        pytest.fail(f"{MARK}: the test has no phase {phase!r}", pytrace=False)
    if max(peaks) > limit:
        pytest.fail(_told(recording, max(peaks), base, limit, phase), pytrace=False)


def _told(recording: Recording, peak: int, base: int, limit: int, phase: str | None) -> str:
    """The failure message: the peak, what was live there, and what would lower it."""
    from lowtide.base.units import format_bytes
    from lowtide.recording.explanation.explanation import explain
    from lowtide.recording.file_format import PHASES
    from lowtide.recording.recorded_step import ROLES

    lines = [f"{MARK}: {format_bytes(peak)} ({peak:,} bytes) in {phase or 'the test'}; the limit is {format_bytes(limit)}"]
    found = explain(recording)
    for step in found.steps:
        for k in range(len(step.ops)):
            inside = phase is None or PHASES[step.entries[step.ops[k]]["phase"]] == phase
            if inside and int(step.peaks[k]) - base == peak:
                entry = step.entries[step.ops[k]]
                roles = {r.name.lower(): int(step.at_peak[k][r]) for r in ROLES}
                parts = [f"{name} {format_bytes(size)}" for name, size in sorted(roles.items(), key=lambda x: -x[1]) if size]
                lines += [f"  highest in {step.names[entry['a']]} ({step.names[entry['c']]}): {', '.join(parts)}"]
                lines += [f"  {format_bytes(b.bytes):>10}  {b.title}  {b.module}  {b.source}" for b in step.top(k, TOP)]
                lines += [f"  saves {format_bytes(f.saving_bytes)}: {f.text}" for f in found.findings if f.saving_bytes]
                return "\n".join(lines)
    return "\n".join(lines)
