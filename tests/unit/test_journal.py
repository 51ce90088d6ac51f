"""Law: a step's journal is read as far as it was written, however large the file that it lies in."""

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


def test_entries_are_those_that_were_added_and_what_lies_beyond_is_not_looked_at(tmp_path: Path) -> None:
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


def test_phases_of_a_step_that_was_cut_off_go_on_from_the_high_water_of_the_steps_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.begin(4, 0.0, 10, 5000, np.zeros(0, dtype=CARRIED))
    journal.add(*PHASE)
    row = _tail(tmp_path / "journal", names=1)  # as it is found after a kill
    journal.close()
    assert row is not None
    assert not row.complete
    assert (row.high_water_bytes, [p.high_water_bytes for p in row.phases]) == (5000, [5000])
    assert row.peak_bytes < 5000


@given(st.floats(0, 1e4), st.booleans(), st.booleans())
def test_an_operators_seconds_are_read_back_within_two_per_cent(seconds: float, replayable: bool, seeded: bool) -> None:
    """Two bytes hold them, and whether it can run again; what was read is written as the same two bytes."""
    written = encode_run(seconds, replayable=replayable, seeded=seeded)
    read, *flags = decode_run(written)
    assert flags == [replayable, seeded]
    assert encode_run(read, replayable=replayable, seeded=seeded) == written
    assert read == pytest.approx(seconds, rel=0.02, abs=1e-7)


@pytest.mark.parametrize(("head", "following", "bytes_"), [
    (EntryKind.PHASE, EntryKind.OP, 30), (EntryKind.PHASE, EntryKind.DENIED, 10), (EntryKind.PHASE, None, 10), (EntryKind.OP, EntryKind.OP, 20), (EntryKind.BORN, None, 40),
])
def test_a_phase_begins_with_what_is_there_before_its_first_operator(head: EntryKind, following: EntryKind | None, bytes_: int) -> None:
    """Where it begins with none, with what was there at its mark."""
    first = _Entry(0.0, head, 0, 0, 0, 0, 0, size=20, live=10, peak=0)
    next_ = None if following is None else first._replace(kind=following, size=30, live=31)
    assert _first_bytes(first, next_, 40) == bytes_
