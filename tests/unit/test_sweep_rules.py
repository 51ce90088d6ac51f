"""Law: a sweep recommends what its figures say and no more, and what an axis is for is said where it is mistaken."""

from __future__ import annotations

import math

import pytest
from lowtide.errors import UsageError
from lowtide.sweep.definition import Config, Definition, File, OwnAxis, define
from lowtide.sweep.trends import Row, recommended


def _definition() -> Definition:
    return define(File(command="python t.py", axes={"a": OwnAxis(values=[1, 2], env="A"), "b": OwnAxis(values=[0, 1], env="B")}))


def _row(config: Config, growth: float, rate: float) -> Row:
    """One run: nothing tells noise."""
    return Row(
        config=config, change_bytes=(growth,) * 5, growth_bytes=growth, growth_error=math.nan, samples_per_second=rate,
        rate_error=math.nan, verdicts=("clean",), ended=(),
    )


def test_without_repeats_a_few_bytes_do_not_outweigh_the_rate() -> None:
    found = _definition()
    rows = [_row(config, growth, rate) for config, growth, rate in zip(
        found.configs, (900.0, 800.0, 700.0, 597.0), (347_126.0, 9_000.0, 8_500.0, 8_016.0), strict=True)]
    best = recommended(found, rows)
    assert best is not None
    assert best.config == found.baseline


def test_growth_above_what_a_leak_is_let_pass_outweighs_the_rate() -> None:
    found = _definition()
    rows = [_row(config, growth, rate) for config, growth, rate in zip(
        found.configs, (90_000.0, 800.0, 700.0, 597.0), (347_126.0, 9_000.0, 8_500.0, 8_016.0), strict=True)]
    best = recommended(found, rows)
    assert best is not None
    assert best.config == found.configs[1]


def test_an_option_of_the_scripts_is_not_taken_for_one_of_pythons() -> None:
    with pytest.raises(UsageError, match=r"by argument = '--hold'"):
        define(File(command="python t.py", axes={"hold": OwnAxis(values=[0, 1], option="--hold")}))
