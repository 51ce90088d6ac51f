"""Parses and formats bytes, budgets and seconds; the only module that knows unit names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, SupportsIndex

from lowtide.base.errors import SizeError

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

MINIMUM: Final = "minimum"
"""The text of a budget of the lowest peak that plans reach: see :class:`Minimum`."""
RESCUE: Final = "rescue"
"""The text of a budget that is none: see :class:`Rescue`."""
LARGEST: Final = 1 << 63
"""Sizes must be smaller than this many bytes; no device has as much."""

_BINARY: Final = {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4}
_DECIMAL: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FACTORS: Final = {"": 1, **_DECIMAL, **_BINARY}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")
_SLOWDOWN: Final = re.compile(r"\s*slowdown\s+(\d+(?:\.\d*)?|\.\d+)\s*%\s*(?:within\s+(\S.*))?", re.IGNORECASE)
_PERCENT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """A budget of the resident bytes plus a share (0.5 for 50 %) of what a plain run's peak adds to them."""

    fraction: float


@dataclass(frozen=True, slots=True)
class Minimum:
    """A budget of the lowest peak that plans by recomputing and offloading reach, plus a margin."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A budget of the lowest peak whose plan is predicted to take at most a share (0.1 for 10 %) of a step's time more.

    It never is above ``most_bytes``, if that is not 0, however much time that costs.
    """

    fraction: float
    most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Auto:
    """A budget taken from the device: its free memory, minus a margin."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """No budget: steps that fit are left alone, and operators that run out of memory are retried after an eviction."""


FromStep = BudgetShare | Minimum | Slowdown
"""Budgets whose bytes are known once a step was recorded."""
Size = int | FromStep | Auto | Rescue


def parse_bytes(text: str) -> int:
    """Parse a size such as ``900MiB``, ``6 GiB``, ``2GB`` or ``123456`` into bytes.

    Raises:
        SizeError: if the text is no such size, is not above zero, or is 2**63 bytes or more.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise SizeError(f"cannot read the size {text!r}: give bytes, or a number with a unit, such as 900MiB, 6GiB or 2GB")
    size = int(Decimal(match[1]) * factor)
    if size <= 0:
        raise SizeError(f"the size {text!r} is not above zero")
    if size >= LARGEST:
        raise SizeError(f"the size {text!r} is more than any machine has")
    return size


def parse_budget(text: str) -> Size:
    """Parse a budget: a size as in :func:`parse_bytes`, or ``50%``, ``minimum``, ``auto`` or ``rescue``, or a slowdown.

    A slowdown is ``slowdown 10%`` or, with a size that the budget never exceeds, ``slowdown 10% within 6GiB``.

    Raises:
        SizeError: if the text is none of these, or is a share outside (0 %, 1000 %].
    """
    words: dict[str, Size] = {"auto": Auto(), RESCUE: Rescue(), MINIMUM: Minimum()}
    if (found := words.get(text.strip().lower())) is not None:
        return found
    if (slowdown := _SLOWDOWN.fullmatch(text)) is not None:
        return Slowdown(float(slowdown[1]) / 100, parse_bytes(slowdown[2]) if slowdown[2] else 0)
    if text.strip().lower().startswith("slowdown"):
        raise SizeError(f"cannot read {text!r}: give the share of a step's time that it may take more, such as 10%")
    match = _PERCENT.fullmatch(text)
    if match is None:
        return parse_bytes(text)
    fraction = float(match[1]) / 100
    if not 0 < fraction <= 10:
        raise SizeError(f"the share {text!r} is outside 0-1000 %: 50% means half of what training adds to the resident bytes")
    return BudgetShare(fraction)


def as_budget(size: object) -> Size | None:
    """Convert a budget passed from Python code: text as in :func:`parse_budget`, whole bytes, a parsed budget, or None.

    Raises:
        SizeError: if it is none of these, is not above zero, or is 2**63 bytes or more.
    """
    if size is None or isinstance(size, FromStep | Auto | Rescue):
        return size
    if isinstance(size, str):
        return parse_budget(size)
    if isinstance(size, float) and 0 < size <= 1:
        raise SizeError(f"a budget of {size!r} bytes is too small: to give a share, write '{100 * size:g}%'")
    if isinstance(size, (int, float, SupportsIndex)) and not isinstance(size, bool):
        try:
            whole = int(size)
        except (ValueError, OverflowError):
            whole = 0
        if 0 < whole < LARGEST:
            return whole
    forms = "'6 GiB', '50%', 'minimum', 'slowdown 10%', 'auto', 'rescue' or None"
    raise SizeError(f"{size!r} is not a budget: give bytes above zero, {forms}")


def format_bytes(size: float) -> str:
    """Format a size for people: ``1.50 GiB``, ``12.0 MiB``, ``640 B``."""
    sign = "-" if size <= -0.5 else ""
    size = abs(size)
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration for people: ``2.31 s``, ``14.2 ms``, ``87 us``."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
