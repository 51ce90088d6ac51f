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


@pytest.mark.parametrize(("growth_of_the_first", "best"), [(900.0, 0), (90_000.0, 1)])
def test_without_repeats_growth_that_is_no_leak_does_not_outweigh_the_rate(growth_of_the_first: float, best: int) -> None:
    found = _definition()
    figures = [(growth_of_the_first, 347_126.0), (800.0, 9_000.0), (700.0, 8_500.0), (597.0, 8_016.0)]
    rows = [_row(config, growth, rate) for config, (growth, rate) in zip(found.configs, figures, strict=True)]
    chosen = recommended(found, rows)
    assert chosen is not None
    assert chosen.config == found.configs[best]


def test_an_option_of_the_scripts_is_not_taken_for_one_of_pythons() -> None:
    with pytest.raises(UsageError, match=r"by argument = '--hold'"):
        define(File(command="python t.py", axes={"hold": OwnAxis(values=[0, 1], option="--hold")}))
