"""Sizes, budgets and durations: parsed and printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.base.errors import SizeError
from lowtide.base.units import GIB, KIB, MIB, Auto, BudgetShare, Minimum, Rescue, Slowdown, as_budget, format_bytes, format_seconds, parse_budget, parse_bytes

GOOD = {
    "1": 1,
    "123456": 123456,
    "640B": 640,
    "900MiB": 900 * MIB,
    "6 GiB": 6 * GIB,
    " 6  gib ": 6 * GIB,
    "2GB": 2 * 10**9,
    "3kb": 3000,
    "1.5GiB": GIB + GIB // 2,
    ".5KiB": 512,
    "2.KiB": 2 * KIB,
    "1TiB": 1024 * GIB,
    "1TB": 10**12,
}
BAD = ["", " ", "GiB", "-1", "-1GiB", "+1", "1GiBs", "1 Gi B", "1e9", "0x10", "1,5GiB", "nan", "inf", "1..5", ".", "6G"]
ZERO = ["0", "0GiB", "0.0MiB", "0.5B", ".4"]


@pytest.mark.parametrize(("text", "size"), GOOD.items())
def test_a_valid_size_is_parsed(text: str, size: int) -> None:
    """Case and blanks do not matter, fractions count."""
    assert parse_bytes(text) == size
    assert parse_budget(text) == size


@pytest.mark.parametrize("text", BAD)
def test_an_invalid_size_is_refused_with_its_text(text: str) -> None:
    """SizeError, with a message that shows the text."""
    with pytest.raises(SizeError, match="cannot read the size") as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)
    with pytest.raises(SizeError):
        parse_budget(text)


@pytest.mark.parametrize("text", ZERO)
def test_a_size_below_one_byte_is_refused(text: str) -> None:
    """A size that comes to no whole byte is not a size."""
    with pytest.raises(SizeError, match="not above zero"):
        parse_bytes(text)


@given(st.integers(1, 1 << 62))
def test_plain_bytes_are_parsed_exactly(size: int) -> None:
    """A whole number of bytes is read to the byte, however large."""
    assert parse_bytes(str(size)) == size


def test_a_size_beyond_floats_raises_size_error() -> None:
    with pytest.raises(SizeError):
        parse_bytes("9" * 400)


@pytest.mark.parametrize(("text", "fraction"), [("50%", 0.5), (" 12.5 % ", 0.125), ("100%", 1.0), ("1000%", 10.0)])
def test_a_percentage_is_parsed_as_a_share(text: str, fraction: float) -> None:
    """A percentage of what training adds, at most ten times it."""
    assert parse_budget(text) == BudgetShare(fraction)


@pytest.mark.parametrize("text", ["0%", "0.0%", "1000.1%", "5000%"])
def test_a_share_outside_its_range_is_refused(text: str) -> None:
    """Zero percent and more than 1000 % are refused."""
    with pytest.raises(SizeError, match="outside"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["%", "-5%", "50%%", "half", "50 percent"])
def test_a_malformed_share_is_refused(text: str) -> None:
    """A budget is a size, a share or auto."""
    with pytest.raises(SizeError):
        parse_budget(text)


@pytest.mark.parametrize("text", ["auto", " AUTO ", "Auto"])
def test_auto_is_parsed_in_any_case(text: str) -> None:
    """"auto" leaves the budget to the device."""
    assert parse_budget(text) == Auto()


@pytest.mark.parametrize(("asked", "size"), [
    ("6 GiB", 6 * GIB), ("50%", BudgetShare(0.5)), (BudgetShare(0.5), BudgetShare(0.5)), (Auto(), Auto()), (None, None), (1 << 20, 1 << 20),
    (6e9, 6_000_000_000), (1.5 * 2**30, 3 << 29), (np.int64(4096), 4096),
])  # fmt: skip
def test_a_budget_from_python_may_be_text_share_or_number(asked: object, size: object) -> None:
    """Text, a size, a share, or a number of bytes of any numeric type."""
    assert as_budget(asked) == size


@pytest.mark.parametrize("asked", [0, -1, 0.0, 0.5, 1.0, True, False, [], {}, float("nan"), float("inf"), 1 << 64, b"6GiB", object()])
def test_an_invalid_budget_from_python_is_refused(asked: object) -> None:
    """A value silently taken for "no budget" would only be noticed by the out-of-memory error that the budget was to prevent.
    """
    with pytest.raises(SizeError):
        as_budget(asked)


def test_auto_and_shares_are_not_sizes() -> None:
    """parse_bytes accepts plain sizes only."""
    for text in ("auto", "50%"):
        with pytest.raises(SizeError):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (640, "640 B"),
        (KIB, "1.0 KiB"),
        (12 * MIB, "12.0 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (-12 * MIB, "-12.0 MiB"),
    ],
)
def test_sizes_are_printed_for_people(size: int, text: str) -> None:
    """One decimal, two for GiB; the sign comes first."""
    assert format_bytes(size) == text


@given(st.integers(1, 1 << 50))
def test_a_printed_size_is_parsed_back_within_five_percent(size: int) -> None:
    """parse_bytes reads what format_bytes writes."""
    assert abs(parse_bytes(format_bytes(size)) - size) <= 0.05 * size


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.31, "2.31 s"), (0.0142, "14.2 ms"), (87e-6, "87 us"), (0, "0 us"), (-2, "-2.00 s")]
)
def test_durations_are_printed_for_people(seconds: float, text: str) -> None:
    """Seconds, milliseconds, microseconds."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("text", "budget"), [
    ("minimum", Minimum()), (" Minimum ", Minimum()), ("rescue", Rescue()), ("slowdown 10%", Slowdown(0.1)),
    ("Slowdown 2.5 %", Slowdown(0.025)), ("slowdown 0%", Slowdown(0.0)),
    ("slowdown 10% within 6GiB", Slowdown(0.1, 6 * GIB)), ("SLOWDOWN 1% WITHIN 100", Slowdown(0.01, 100)),
])  # fmt: skip
def test_budgets_in_words_are_understood(text: str, budget: object) -> None:
    assert parse_budget(text) == as_budget(text) == budget
    assert as_budget(budget) == budget


@pytest.mark.parametrize("text", ["slowdown", "slowdown 10", "slowdown x%", "slowdown -1%", "slowdown 10% 6GiB", "slowdown 10% within"])
def test_a_slowdown_that_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(SizeError, match="give the share of a step's time"):
        parse_budget(text)
