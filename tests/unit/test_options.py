"""Laws: every number that an option, sweep, store or decorator takes is finite and in range; otherwise one line says so at
once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import pytest
import torch
from lowtide.cli.main import main
from lowtide.cli.script import Finite
from lowtide.base.errors import ReaderError, StateError, UsageError
from lowtide.studies.sweep.definition import File, define

import lowtide

NUMBERS = [
    (name, option)
    for name in main.list_commands(click.Context(main))
    for command in [main.get_command(click.Context(main), name)]
    if command is not None
    for option in command.params
    if isinstance(option.type, (click.types.FloatParamType, click.FloatRange))
]


@pytest.mark.parametrize(("verb", "option"), NUMBERS, ids=[f"{v} {o.name}" for v, o in NUMBERS])
@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_no_option_takes_a_number_that_is_not_finite(verb: str, option: click.Parameter, text: str) -> None:
    """Every option of type float, of every verb, refuses nan, inf and -inf."""
    assert isinstance(option.type, Finite), verb
    with pytest.raises(click.BadParameter):
        option.type.convert(text, option, None)


def test_the_verbs_with_float_options_are_found() -> None:
    """Guards the test above against finding no options."""
    assert {verb for verb, _ in NUMBERS} >= {"leak", "min", "batch", "guard", "plan"}


@pytest.mark.parametrize(
    "said",
    [
        {"timeout_seconds": math.nan}, {"samples_per_step": math.nan}, {"samples_per_step": math.inf},
        {"environment": {"A=B": "1"}}, {"environment": {"A": "1\0"}}, {"environment": {"": "1"}},
        {"axes": {"own": {"env": "A=B", "values": [1]}}}, {"axes": {"own": {"env": "A", "values": ["a\0b"]}}},
    ],
)
def test_a_sweep_refuses_settings_that_no_cell_could_be_given(said: dict[str, Any]) -> None:
    """Limits that are not finite, and environment variables whose names or values cannot exist."""
    file = {"command": "python -c pass", "axes": {"own": {"env": "A", "values": ["1", "2"]}}}
    define(msgspec.convert(file, File))
    with pytest.raises(UsageError):
        define(msgspec.convert({**file, **said}, File))


@pytest.mark.parametrize("said", [{"best": "minimum"}, {"best": "MIN"}, {"keep_last": 0}, {"keep_best": -1}])
def test_a_store_refuses_an_unknown_choice(said: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best|keep"):
        lowtide.checkpoint.Store(tmp_path, **said)


def test_a_cyclic_state_is_refused_and_earlier_saves_stay(tmp_path: Path) -> None:
    """A list that contains itself raises StateError, and the checkpoint before it is still listed."""
    store = lowtide.checkpoint.Store(tmp_path)
    number = store.save({"a": 1})
    ring: list[Any] = [1]
    ring.append(ring)
    with pytest.raises(StateError, match="contains itself"):
        store.save({"ring": ring})
    assert [saved.number for saved in store.saved()] == [number]


@pytest.mark.parametrize("said", [{"reduction": "avg"}, {"reduction": "none"}, {"batch_norm": "ignore"}])
def test_micro_batches_refuse_an_unknown_choice(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="reduction|batch_norm"):
        lowtide.micro_batched(lambda x: x.sum(), model=torch.nn.Linear(1, 1), **said)


def test_data_that_is_not_an_array_of_samples_is_refused(tmp_path: Path) -> None:
    """A scalar, an empty file and an unknown dtype each raise ReaderError."""
    np.save(tmp_path / "scalar.npy", np.float32(1))
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "good.npy", np.zeros(3))
    for name, how in (("scalar.npy", {}), ("empty.npy", {}), ("good.npy", {"dtype": "foo"})):
        with pytest.raises(ReaderError):
            lowtide.data.open(tmp_path / name, **how)
