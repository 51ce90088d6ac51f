"""Law: a step's journal is read as far as it was written, however large the file that it lies in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lowtide.store import CARRIED, ENTRY, Journal, Kind

PHASE = (0.0, int(Kind.PHASE), *[0] * (len(ENTRY.names or ()) - 2))


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
