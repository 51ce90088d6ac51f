"""The format of a recording: entry kinds, roles, rows of figures, and the paths of its files.

A recording is one SQLite file for a whole run, readable after SIGKILL. While a step runs, the recorder appends fixed-size
entries to a *journal*, a memory-mapped file beside the recording, and writes names (of operators, modules, source lines) to a
second file. Both files survive the process. When the step ends, its figures (and its entries, if they are kept) move into
the SQLite file, and the journal starts over. A clean shutdown removes both files; a reader that finds them recovers the last,
unfinished step from them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lowtide.base.trace import Phase

FORMAT: Final = 3
"""Version of the file format. Since 3, entries say when backward asks for a saved tensor, and until when anything besides
autograd holds it."""
APPLICATION: Final = 0x4C6F7774
"""``application_id`` of the SQLite header: "Lowt"."""
APPLICATION_AT: Final = 68
"""Offset of the application ID in a SQLite file (sqlite.org/fileformat.html, section 1.3)."""
HEADER_BYTES: Final = 72
"""Bytes to read from the start of a file to get the application ID."""


class EntryKind(IntEnum):
    """The kinds of entries, and what each field of an entry means. Fields that are not listed are 0."""

    OP = 1
    """An operator ran: a, b, c = its name, module and source line; size, peak, live = live bytes before it, its peak inside,
    and live bytes after it; flags: see :func:`encode_run`."""
    BORN = 2
    """A block appeared: a = block, b = its type and shape, size = bytes; flags: see :class:`Flag`."""
    DIED = 3
    """A block's memory was freed: a = block."""
    READ = 4
    """The preceding operator read a block: a = block, size = bytes of the tensor on it (0 if the recording does not say);
    flags: see :class:`Flag`."""
    SAVED = 5
    """Autograd saved a tensor that lies on a block: a = block."""
    RELEASED = 6
    """Autograd released a saved tensor of a block: a = block."""
    ROLE = 7
    """The role of a block was recognised: a = block, b = its name, flags = :class:`Role`."""
    HELD = 8
    """A variable of the script refers to a block: a = block, b = the variable, its function and line, as one name."""
    PHASE = 9
    """A phase begins: live = live bytes. Of the phase that ends: peak = its peak, size = the most heap bytes that were not
    torch's."""
    DENIED = 10
    """An operator ran out of memory: a, b, c as for OP; size = bytes requested; live = live bytes at the failure; peak = its
    peak inside."""
    CALL = 11
    """A model was called from outside any module: flags = 1 if it is in ``eval()`` mode while autograd records."""
    NEED = 12
    """Backward asks for a saved tensor: a = block. The autograd node that asked holds it until UNPINNED or RELEASED."""
    UNPINNED = 13
    """The autograd node that asked for a saved tensor has ended, and autograd keeps the tensor: a = block."""
    UNHELD = 14
    """From here on only autograd's saved tensors hold a block: a = block."""


class Flag(IntEnum):
    """Bits of ``flags`` in BORN and READ entries.

    BORN: COUNTED (the block's bytes are part of the measured memory), MET (the block existed before the recorder saw it).
    READ: WRITTEN (the operator also wrote the block in place).
    """

    COUNTED = 1
    MET = 2
    WRITTEN = 4


COMPILED: Final = "compiled region"
"""Operator name of a region compiled by ``torch.compile``, and prefix of the names of operators that its backward calls."""
BY_ZERO: Final = " by zero"
"""Suffix of the name of an operator that zeroes although its name does not say so: an in-place multiplication or fill."""
HELD_BYTES: Final = 64 << 10
"""Minimum size of a block for the recorder to look it up among the script's variables and to note its last use."""
_SECONDS_STEPS: Final = 256
_SECONDS_LEAST: Final = 24
_SECONDS_MOST: Final = (1 << 14) - 1
_REPLAYABLE: Final = 1 << 14
_SEEDED: Final = 1 << 15


def encode_run(seconds: float, *, replayable: bool, seeded: bool) -> int:
    """Encodes an operator's run in 16 bits.

    The low 14 bits hold the seconds on a logarithmic scale (steps of a factor 2^(1/256), starting at 2^-24 s); one bit says
    whether the operator may be replayed, one whether it draws random numbers.
    """
    steps = round(_SECONDS_STEPS * (math.log2(seconds) + _SECONDS_LEAST)) if seconds > 0 else 1
    return max(1, min(_SECONDS_MOST, steps)) | _REPLAYABLE * replayable | _SEEDED * seeded


def decode_run(flags: int) -> tuple[float, bool, bool]:
    """Decodes an operator's run: seconds (0 if the recording does not say), replayable, draws random numbers."""
    steps = flags & _SECONDS_MOST
    seconds = 2.0 ** (steps / _SECONDS_STEPS - _SECONDS_LEAST) if steps else 0.0
    return seconds, bool(flags & _REPLAYABLE), bool(flags & _SEEDED)


class Role(IntEnum):
    """What a block is used for.

    ROLE entries carry PARAMETER to INPUT, and CACHE (memory that a library such as oneDNN keeps). The reader derives the rest:
    ACTIVATION, OUTPUT and TEMPORARY from a block's lifetime, WORKSPACE and UNKNOWN from measured bytes that no block explains.
    """

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    INPUT = 4
    ACTIVATION = 5
    OUTPUT = 6
    TEMPORARY = 7
    WORKSPACE = 8
    CACHE = 9
    UNKNOWN = 10


ENTRY: Final = np.dtype(
    [("time", "<f8"), ("kind", "u1"), ("phase", "u1"), ("flags", "<u2"), ("a", "<u4"), ("b", "<u4"), ("c", "<u4"),
     ("size", "<i8"), ("live", "<i8"), ("peak", "<i8")]
)
"""One entry: ``time`` in seconds since the recording began; the other fields as :class:`EntryKind` says; ``size``, ``live``
and ``peak`` in bytes."""
PACK: Final = struct.Struct("<dBBHIIIqqq")
CARRIED: Final = np.dtype(
    [("block", "<u4"), ("role", "<i2"), ("counted", "u1"), ("phase", "u1"), ("name", "<u4"), ("op", "<u4"), ("module", "<u4"),
     ("source", "<u4"), ("label", "<u4"), ("saves", "<u4"), ("size", "<i8")]
)
"""A block that was live when a step began: role -1 if none was recognised; ``saves`` counts autograd's saved tensors of it;
``size`` is in bytes; ``name`` to ``label`` are ids of names."""
PHASES: Final = tuple(Phase)
LARGEST_BYTES: Final = 1 << 48
"""No memory is larger than this; a larger number in a file was not written by a recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One phase of one step. Bytes are those of torch's allocator.

    Attributes:
        start: seconds since the recording began.
        high_water_bytes: peak of the run up to the end of the phase.
        outside_bytes: the most heap bytes in the phase that are not torch's: Python objects, workspaces of LAPACK and MKL.
    """

    name: str
    start: float
    seconds: float
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    high_water_bytes: int
    outside_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step: its figures, and its entries if they were kept.

    Attributes:
        step: -1 for everything before the first step.
        start: seconds since the recording began.
        high_water_bytes: peak of the run up to the end of the step.
        complete: whether the recorder saw the step end.
        entries: array of :data:`ENTRY`; None if they were not kept.
        carried: array of :data:`CARRIED`, the blocks that were live when the step began; None if they were not kept.
    """

    step: int
    start: float
    seconds: float
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    high_water_bytes: int
    complete: bool
    phases: tuple[PhaseFigures, ...]
    entries: NDArray[np.void] | None = field(default=None, repr=False)
    carried: NDArray[np.void] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """Memory of the whole process in one step of the script, or in one second if the script marks no steps.

    Attributes:
        start: seconds since sampling began.
        resident_bytes: resident set size at the end of the row; ``highest_bytes`` is the maximum within it (sampled 50 times a
            second).
        change_bytes: change of the resident set size since the previous row.
        unique_bytes: unique set size at the end of the row; 0 if the system does not report it.
        children_bytes: proportional set size of all child processes.
        heap_bytes, heap_peak_bytes: live heap bytes at the end of the row, and their peak in it; 0 without the heap counter.
        marked: whether the script or its framework marked the end of this step. Rows with and without a mark are numbered
            separately.
    """

    step: int
    start: float
    seconds: float
    resident_bytes: int
    highest_bytes: int
    change_bytes: int
    unique_bytes: int
    children_bytes: int
    heap_bytes: int
    heap_peak_bytes: int
    loss: float | None
    marked: bool


def tail_path(path: Path) -> Path:
    """Path of the journal beside a recording."""
    return path.with_name(path.name + "-tail")


def names_path(path: Path) -> Path:
    """Path of the file with the names that the journal refers to."""
    return path.with_name(path.name + "-names")
