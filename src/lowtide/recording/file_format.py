"""What a recording consists of: kinds of entries, roles, rows of figures, and where its files lie.

A recording is one SQLite file for a whole run, readable after SIGKILL. While a step runs, what happens is written as entries
of fixed size into a *journal*, a mapped file beside the recording; names (of operators, modules, source lines) go into a
second one. Both survive the process. When the step is over, its figures, and its entries where they are kept, go into the
SQLite file and the journal begins anew. A clean end removes both files; a reader that finds them reads the last, unfinished
step out of them.
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
"""Version of the file; since 3 it says when backward asks for a saved tensor, and what else holds it."""
APPLICATION: Final = 0x4C6F7774
"""``application_id`` of the SQLite header: "Lowt"."""
APPLICATION_AT: Final = 68
"""Where SQLite has the application's number in a file (sqlite.org/fileformat.html, section 1.3)."""
HEADER_BYTES: Final = 72
"""So much of a file is read to find it."""


class EntryKind(IntEnum):
    """What an entry says. Fields that are not named are 0."""

    OP = 1
    """An operator ran: a, b, c = its name, module and source line; size, peak, live = bytes before, highest inside, after;
    flags: see :func:`encode_run`."""
    BORN = 2
    """A block appeared: a = block, b = its type and shape, size = bytes; flags: see :class:`Flag`."""
    DIED = 3
    """A block's memory was given back: a = block."""
    READ = 4
    """The operator before read a block: a = block, size = bytes of the tensor on it (0 where it was not said); flags."""
    SAVED = 5
    """Autograd saved a tensor of a block: a = block."""
    RELEASED = 6
    """Autograd let go of it: a = block."""
    ROLE = 7
    """A block was recognised: a = block, b = its name, flags = :class:`Role`."""
    HELD = 8
    """A variable of the script refers to a block: a = block, b = variable, function and line."""
    PHASE = 9
    """Another phase begins: live; of the phase before: peak = highest point, size = most heap bytes that are not torch's."""
    DENIED = 10
    """An operator failed for want of memory: a, b, c as for OP; size = bytes asked for, live, peak."""
    CALL = 11
    """A model was called from outside any module: flags = 1 where it evaluates (``eval()``) while autograd records."""
    NEED = 12
    """Backward asks for a saved tensor: a = block. The node that asked holds it until UNPINNED, or until it is RELEASED."""
    UNPINNED = 13
    """The node that asked for a saved tensor has ended, and autograd keeps the tensor: a = block."""
    UNHELD = 14
    """Nothing but autograd's saved tensors holds a block any more: a = block."""


class Flag(IntEnum):
    """Bits of ``flags`` of BORN and READ entries."""

    COUNTED = 1
    MET = 2
    WRITTEN = 4


COMPILED: Final = "compiled region"
"""What ``torch.compile`` made, as the name of an operator, and before the names of operators that its backward calls."""
BY_ZERO: Final = " by zero"
"""Behind the name of an operator that zeroes without being named for it: a product, or a filling, in place."""
HELD_BYTES: Final = 64 << 10
"""Blocks from this size on are looked up among the script's variables, and when they were used last is noted."""
_SECONDS_STEPS: Final = 256
_SECONDS_LEAST: Final = 24
_SECONDS_MOST: Final = (1 << 14) - 1
_REPLAYABLE: Final = 1 << 14
_SEEDED: Final = 1 << 15


def encode_run(seconds: float, *, replayable: bool, seeded: bool) -> int:
    """An operator's run in 16 bits: seconds in steps of 2^(1/256) from 2^-24 on, whether it may be run again, and draws."""
    steps = round(_SECONDS_STEPS * (math.log2(seconds) + _SECONDS_LEAST)) if seconds > 0 else 1
    return max(1, min(_SECONDS_MOST, steps)) | _REPLAYABLE * replayable | _SEEDED * seeded


def decode_run(flags: int) -> tuple[float, bool, bool]:
    """Seconds, whether it may be run again, whether it draws; 0 seconds in a recording that does not say."""
    steps = flags & _SECONDS_MOST
    seconds = 2.0 ** (steps / _SECONDS_STEPS - _SECONDS_LEAST) if steps else 0.0
    return seconds, bool(flags & _REPLAYABLE), bool(flags & _SEEDED)


class Role(IntEnum):
    """What a block is for; the later ones are told from its life, not written into ROLE entries."""

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
"""One entry: seconds since the recording began, then as :class:`EntryKind` says; bytes where sizes are meant."""
PACK: Final = struct.Struct("<dBBHIIIqqq")
CARRIED: Final = np.dtype(
    [("block", "<u4"), ("role", "<i2"), ("counted", "u1"), ("phase", "u1"), ("name", "<u4"), ("op", "<u4"), ("module", "<u4"),
     ("source", "<u4"), ("label", "<u4"), ("saves", "<u4"), ("size", "<i8")]
)
"""A block that was live when a step began; role -1 where none was recognised; the others are names and counts."""
PHASES: Final = tuple(Phase)
LARGEST_BYTES: Final = 1 << 48
"""No memory is larger: a number above it was not written by a recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One phase of one step; bytes are of torch's allocator.

    Attributes:
        start: seconds since the recording began.
        high_water_bytes: highest point of the run so far, at its end.
        outside_bytes: most heap bytes in it that are not torch's: Python's objects, workspaces of LAPACK and MKL.
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
    """One step: its figures, and its entries where they were kept.

    Attributes:
        step: -1 for what came before the first one.
        complete: whether its end was seen.
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
    """What the whole process took in one step of the script, or in one second where it marks none.

    Attributes:
        resident_bytes: resident set size at its end; ``highest_bytes`` the highest seen in it (looked at 50 times a second).
        change_bytes: of the resident set size since the step before.
        unique_bytes: unique set size at its end; 0 where the system does not tell.
        children_bytes: proportional set size of all child processes.
        heap_bytes, heap_peak_bytes: live in the heap at its end, and the highest in it; 0 without the counter.
        marked: whether the script, or its framework, ended it by a mark; steps and what was not marked are counted apart.
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
    """The journal beside a recording."""
    return path.with_name(path.name + "-tail")


def names_path(path: Path) -> Path:
    """The names that the journal refers to."""
    return path.with_name(path.name + "-names")
