"""Law: a sweep recommends what its figures show and no more, and a mistaken axis or command is refused with the reason."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lowtide.base.errors import UsageError
from lowtide.studies.leak.watch import Run
from lowtide.probe.counters import ABSENT, COLUMNS
from lowtide.report.sweep import markdown
from lowtide.studies.sweep.summary import summary_of
from lowtide.studies.sweep.cell import figures
from lowtide.studies.sweep.definition import Config, Definition, File, OwnAxis, define
from lowtide.studies.sweep.results import MAIN, Cell
from lowtide.studies.sweep.trends import Row, effects_of, front_of, recommended


def _definition() -> Definition:
    return define(File(command="python -c 0", axes={"a": OwnAxis(values=[1, 2], env="A"), "b": OwnAxis(values=[0, 1], env="B")}))


def _row(config: Config, growth: float, rate: float) -> Row:
    """Figures of a single run, which cannot show noise."""
    return Row(
        config=config, change_bytes=(growth,) * 5, change_errors=(math.nan,) * 5, growth_bytes=growth, growth_error=math.nan, samples_per_second=rate,
        rate_error=math.nan, verdicts=("clean",), ended=(),
    )


@pytest.mark.parametrize(("growth_of_the_first", "best"), [(900.0, 0), (90_000.0, 1)])
def test_growth_below_the_leak_tolerance_does_not_outweigh_the_rate(growth_of_the_first: float, best: int) -> None:
    """Without repeats nothing shows noise: 900 against 597 bytes a step does not outweigh 40 times the throughput, 90,000
    bytes do.
    """
    found = _definition()
    told = [(growth_of_the_first, 347_126.0), (800.0, 9_000.0), (700.0, 8_500.0), (597.0, 8_016.0)]
    rows = [_row(config, growth, rate) for config, (growth, rate) in zip(found.configs, told, strict=True)]
    chosen = recommended(found, rows)
    assert chosen is not None
    assert chosen.config == found.configs[best]


def test_an_option_of_the_script_is_refused_as_an_option_of_python() -> None:
    """The error says to give it by `argument`."""
    with pytest.raises(UsageError, match=r"write argument = '--hold'"):
        define(File(command="python -c 0", axes={"hold": OwnAxis(values=[0, 1], option="--hold")}))


def test_a_leaking_configuration_is_recommended_only_if_all_leak() -> None:
    """A leak verdict in any repeat counts, whatever the growth of resident memory: memory that was freed before may have
    absorbed the leak.
    """
    found = _definition()
    rows = [_row(config, 700.0, rate) for config, rate in zip(found.configs, (400.0, 300.0, 200.0, 100.0), strict=True)]
    rows[0] = replace(rows[0], verdicts=("clean", "leak"))
    chosen = recommended(found, rows)
    assert chosen is rows[1]
    leaking = [replace(row, verdicts=("leak",)) for row in rows]
    assert recommended(found, leaking) is leaking[0]


@pytest.mark.parametrize("verdict", ["clean", "inconclusive"])
def test_a_recommendation_says_if_a_leak_cannot_be_excluded(verdict: str) -> None:
    found = _definition()
    result = {
        "ended": "ok", "growth_bytes": 0.0, "samples_per_second": 100.0, "verdict": verdict,
        "change_bytes": dict.fromkeys(("min", "q1", "median", "q3", "max"), 0.0),
    }
    cells = [Cell(id=k, part=MAIN, config=config, repeat=0, result=result) for k, config in enumerate(found.configs)]
    report = summary_of(found, cells, [])
    assert report.recommended is not None
    assert ("whether it leaks is open" in report.reason) == (verdict == "inconclusive")


def test_growth_of_child_processes_counts_as_growth_of_the_cell() -> None:
    """Otherwise a loader with workers would seem to grow less than one without."""
    rows = np.full((100, len(COLUMNS)), ABSENT, dtype=np.int64)
    for name, start, rate in (("time_ns", 0, 10_000_000), ("resident_bytes", 500_000_000, 3_000), ("heap_bytes", 100_000_000, 0)):
        rows[:, COLUMNS.index(name)] = start + rate * np.arange(100)
    rows[::5, COLUMNS.index("children")] = 2
    rows[::5, COLUMNS.index("children_bytes")] = 40_000_000 + 70_000 * np.arange(0, 100, 5)
    rows[0, COLUMNS.index("children_bytes")] = 0  # they have not started yet
    run = Run(rows=rows, kind=None, audits=(), census=(), code=0, ended="enough", seconds=1.0)
    assert figures(run, samples_per_step=1.0)["growth_bytes"] == pytest.approx(73_000)


def test_the_recommendation_lies_on_the_front_of_growth_and_speed() -> None:
    """No other configuration both grows less and is faster."""
    found = _definition()
    growths = [(900.0, 100.0), (800.0, 101.0), (2_000_000.0, 500.0), (2_000_000.0, 400.0)]
    rows = [_row(config, growth, rate) for config, (growth, rate) in zip(found.configs, growths, strict=True)]
    chosen = recommended(found, rows)
    assert chosen is rows[1]
    assert any(chosen is row for row in front_of(rows))


def test_a_value_that_always_fails_does_not_hide_other_effects() -> None:
    """The effect of axis `a` is found although every cell with mode "bad" fails."""
    found = define(File(command="python -c 0", repeats=2, axes={
        "a": OwnAxis(values=[1, 2], env="A"), "mode": OwnAxis(values=["bad", "good"], env="MODE"),
    }))
    cells = []
    for config in found.configs:
        for repeat in range(2):
            good = dict(config)["mode"] == "good"
            rate = 100.0 * int(dict(config)["a"]) + repeat
            result = {"ended": "ok" if good else "exit code 1", "growth_bytes": 0.0, "samples_per_second": rate}
            cells.append(Cell(id=len(cells), part="sweep", config=config, repeat=repeat, result=result))
    told = [e for e in effects_of(found, cells) if e.response == "samples_per_second"]
    assert [(e.axes, e.values) for e in told] == [(("a",), (2,))]
    assert told[0].certain
    assert told[0].change == pytest.approx(100.0)


@pytest.mark.parametrize(("values", "said"), [
    ([1, True], "the same"), ([1, "1"], "the same"), ([math.nan, 1.0], "finite"), ([math.inf], "finite"), (["a\0b"], "null"),
])
@pytest.mark.parametrize("how", ["env", "argument"])
def test_values_that_do_not_distinguish_cells_are_refused(how: str, values: list[Any], said: str) -> None:
    """Two values that a cell would receive as the same text, and values that are not finite or contain a null byte."""
    with pytest.raises(UsageError, match=said):
        define(File(command="python -c 0", axes={"a": OwnAxis(values=values, **{how: "A"})}))


@pytest.mark.parametrize(("command", "said"), [("python nosuch.py", "no such file: nosuch.py"), ("", "empty"), (["python", "a\0"], "null")])
def test_a_command_that_would_fail_in_every_cell_is_refused(command: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        define(File(command=command, axes={"a": OwnAxis(values=[1], env="A")}))


def test_every_figure_of_the_table_has_its_interval_over_repeats() -> None:
    """For two repeats, 1 and 3, the mean is 2 and the 95 % interval of t with one degree of freedom is 12.706 standard errors
    of 1. With one repeat there is no interval.
    """
    found = define(File(command="python -c 0", repeats=2, axes={"a": OwnAxis(values=[1], env="A")}))
    cells = [
        Cell(id=k, part=MAIN, config=found.configs[0], repeat=k, result={
            "ended": "ok", "verdict": "clean", "growth_bytes": 1000.0 * rate, "samples_per_second": rate,
            "change_bytes": dict.fromkeys(("min", "q1", "median", "q3", "max"), 1000.0 * rate),
        })
        for k, rate in enumerate((1.0, 3.0))
    ]
    line = markdown(summary_of(found, cells, [])).splitlines()[-1]
    assert line == "| 1 |" + " 2.0 ± 12.7 |" * 6 + " 2.00 ± 12.71 | clean |"
    alone = markdown(summary_of(found, cells[:1], [])).splitlines()[-1]
    assert alone == "| 1 |" + " 1.0 |" * 6 + " 1.00 | clean |"
