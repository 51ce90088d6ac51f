"""Law: a step's journal is read exactly as far as it was written, however large its file is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowtide.recording.file_format import CARRIED, ENTRY, EntryKind, decode_run, encode_run
from lowtide.recording.journal import Journal
from lowtide.recording.reader import _tail
from lowtide.recording.summary import _Entry, _first_bytes

PHASE = (0.0, int(EntryKind.PHASE), *[0] * (len(ENTRY.names or ()) - 2))


def test_entries_beyond_the_last_one_written_are_ignored(tmp_path: Path) -> None:
    """Bytes of an older journal that lie behind the last entry are not read, and reading does not move the place of the next
    entry.
    """
    journal = Journal(tmp_path / "journal")
    journal.begin(0, 0.0, 0, 0, np.zeros(0, dtype=CARRIED))
    for _ in range(3):
        journal.add(*PHASE)
    beyond = journal._start + 3 * ENTRY.itemsize
    journal._map[beyond : beyond + ENTRY.itemsize] = journal._map[journal._start : journal._start + ENTRY.itemsize]
    assert len(journal.entries()) == 3
    journal.add(*PHASE)
    assert len(journal.entries()) == 4, "reading it takes no place"
    journal.close()


def test_phases_of_a_cut_off_step_start_at_the_earlier_high_water_mark(tmp_path: Path) -> None:
    """The high-water mark of a step that a kill cut off includes that of the steps before it; its own peak does not."""
    journal = Journal(tmp_path / "journal")
    journal.begin(4, 0.0, 10, 5000, np.zeros(0, dtype=CARRIED))
    journal.add(*PHASE)
    row = _tail(tmp_path / "journal", names=1)  # as found after a kill
    journal.close()
    assert row is not None
    assert not row.complete
    assert (row.high_water_bytes, [p.high_water_bytes for p in row.phases]) == (5000, [5000])
    assert row.peak_bytes < 5000


@given(st.floats(0, 1e4), st.booleans(), st.booleans())
def test_operator_seconds_survive_encoding_within_two_percent(seconds: float, replayable: bool, seeded: bool) -> None:
    """Two bytes hold an operator's seconds and its two flags. A decoded time is within 2 %, and encodes to the same two bytes
    again.
    """
    written = encode_run(seconds, replayable=replayable, seeded=seeded)
    read, *flags = decode_run(written)
    assert flags == [replayable, seeded]
    assert encode_run(read, replayable=replayable, seeded=seeded) == written
    assert read == pytest.approx(seconds, rel=0.02, abs=1e-7)


@pytest.mark.parametrize(("head", "following", "bytes_"), [
    (EntryKind.PHASE, EntryKind.OP, 30), (EntryKind.PHASE, EntryKind.DENIED, 10), (EntryKind.PHASE, None, 10), (EntryKind.OP, EntryKind.OP, 20), (EntryKind.BORN, None, 40),
])
def test_a_phase_begins_with_the_bytes_before_its_first_operator(head: EntryKind, following: EntryKind | None, bytes_: int) -> None:
    """These are the bytes before an operator that comes first or directly after the phase's mark; otherwise those at the mark,
    or, without a mark, those given.
    """
    first = _Entry(0.0, head, 0, 0, 0, 0, 0, size=20, live=10, peak=0)
    next_ = None if following is None else first._replace(kind=following, size=30, live=31)
    assert _first_bytes(first, next_, 40) == bytes_
