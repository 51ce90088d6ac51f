"""The definition of a sweep, read from its TOML file and checked: command, axes, cells."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from lowtide.base.errors import UsageError
from lowtide.base.messages import named_here, readable
from lowtide.base.processes import check_command
from lowtide.base.units import parse_bytes
from lowtide.studies.sweep.axes import DEFAULT, Setting, Value, setting_of

MOST_CELLS: Final = 10_000
"""Maximum number of cells: more would never end."""


class OwnAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user-defined axis: exactly one of ``env``, ``argument`` and ``option`` says where its values go.

    Attributes:
        values: the values in order; the others are compared with the first. ``"default"`` leaves things as they are.
        env: an environment variable.
        argument: an argument of the command, such as ``--batch-size``; with ``""`` the value itself is the argument.
        option: an option of ``python -X``, such as ``importtime``; values are ``on`` and ``off``, or what follows ``=``.
    """

    values: list[Value]
    env: str = ""
    argument: str | None = None
    option: str = ""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's keys.

    Attributes:
        command: the command to run; ``python`` is the interpreter that runs Lowtide.
        axes: by name, the values of a built-in axis, or a user-defined axis.
        framework: the framework whose built-in axes are available.
        steps: number of steps of each cell.
        repeats: number of cells for each configuration.
        timeout_seconds, memory: limits of a cell; 0 and empty for no limit (``memory`` caps its address space).
        samples_per_step: number of samples in a step, for the throughput.
        include, exclude: cells in addition to the product of the axes, and cells to leave out (by the axes that they name).
        confirm: a second, larger command on which the recommended configuration must hold up.
        step_line: regular expression for output lines that end a step.
        environment: environment variables of all cells.
        seed: seed of the order in which cells run.
    """

    command: str | list[str]
    axes: dict[str, list[Value] | OwnAxis]
    framework: Literal["", "torch", "tensorflow", "keras", "jax"] = ""
    steps: int = 100
    repeats: int = 1
    timeout_seconds: float = 0.0
    memory: str = ""
    samples_per_step: float = 1.0
    include: list[dict[str, Value]] = []
    exclude: list[dict[str, Value]] = []
    confirm: str | list[str] = ""
    step_line: str = ""
    environment: dict[str, str] = {}
    seed: int = 0


Config = tuple[tuple[str, Value], ...]
"""One value per axis, in the axes' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The definition of a sweep after it was checked.

    Attributes:
        file: the file's keys as written.
        command, confirm: the commands, as words; ``confirm`` is empty if none is given.
        values: the values of each axis, in order.
        configs: the configurations, each of which is run ``repeats`` times.
        cap_bytes: cap on a cell's address space; 0 for none.
        digest: hash of everything that decides what a cell measures.
    """

    file: File
    command: tuple[str, ...]
    confirm: tuple[str, ...]
    values: Mapping[str, tuple[Value, ...]]
    configs: tuple[Config, ...]
    cap_bytes: int
    digest: str

    @property
    def baseline(self) -> Config:
        """The first value of each axis."""
        return tuple((axis, values[0]) for axis, values in self.values.items())

    def settings(self, config: Config) -> list[Setting]:
        """The settings of a configuration, one for each axis."""
        return [_setting(self.file, axis, value) for axis, value in config]

    def order(self) -> list[tuple[Config, int]]:
        """All cells (configuration, repeat), in the random order in which they run.

        Random order spreads drift of the machine evenly over all configurations.
        """
        cells = [(config, repeat) for config in self.configs for repeat in range(self.file.repeats)]
        random.Random(self.file.seed).shuffle(cells)  # noqa: S311
        return cells


def load(path: Path) -> Definition:
    """Read and check a file.

    Raises:
        UsageError: if something is wrong with it; the message says what.
    """
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=File)
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        return define(file)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def define(file: File) -> Definition:
    """Check the contents of a file.

    Raises:
        UsageError: if something is wrong; the message says what.
    """
    for name, least in (("steps", 2), ("repeats", 1)):
        if getattr(file, name) < least:
            raise UsageError(f"{name} = {getattr(file, name)}: it must be at least {least}")
    if not (0 < file.samples_per_step < math.inf and 0 <= file.timeout_seconds < math.inf):
        raise UsageError("samples_per_step must be a number above zero, and timeout_seconds not below zero")
    _check_environment(file.environment)
    try:
        re.compile(file.step_line)
    except re.error as error:
        raise UsageError(f"step_line {file.step_line!r} is not a regular expression: {error}") from None
    command, confirm = _words(file.command), _words(file.confirm) if file.confirm else ()
    values = _values(file)
    product = 1
    for found in values.values():
        product *= len(found)
    if product * file.repeats > MOST_CELLS:
        raise UsageError(f"{product * file.repeats:,} cells are too many: at most {MOST_CELLS:,} are allowed")
    for rule in (*file.include, *file.exclude):
        unknown = set(rule) - set(values)
        if unknown:
            raise UsageError(f"include or exclude names an unknown axis: {', '.join(sorted(unknown))}")
    configs = [
        config
        for config in (tuple(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))
        if not any(all(dict(config)[axis] == value for axis, value in rule.items()) for rule in file.exclude)
    ]
    for rule in file.include:
        config = tuple((axis, rule.get(axis, found[0])) for axis, found in values.items())
        if config not in configs:
            configs.append(config)
    if not configs:
        raise UsageError("no cell is left: exclude rules out all combinations")
    for config in configs:
        for axis, value in config:
            setting = _setting(file, axis, value)
            _check_environment(setting.environment)
            _check_words((*setting.arguments, *setting.options))
    decides = msgspec.json.encode([file, list(map(readable, command))], order="sorted")
    return Definition(
        file=file,
        command=command,
        confirm=tuple(confirm),
        values=values,
        configs=tuple(configs),
        cap_bytes=parse_bytes(file.memory) if file.memory else 0,
        digest=hashlib.sha256(decides).hexdigest(),
    )


def _check_environment(variables: Mapping[str, str | None]) -> None:
    """Refuse environment variables that no process can be given."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise UsageError(
                f"environment variable {name!r} = {value!r}: names must have no =, and names and values no null bytes"
            )


def _check_words(words: Sequence[str]) -> None:
    if any("\0" in word for word in words):
        raise UsageError(f"{' '.join(words)!r}: arguments must have no null bytes")


def _check_script(words: Sequence[str]) -> None:
    """Refuse a Python script that does not exist: every cell would fail."""
    script = words[1] if len(words) > 1 and Path(words[0]).name.startswith("python") else ""
    if script.endswith(".py") and not Path(script).is_file():
        raise UsageError(f"no such file: {script}")


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    try:
        words = [named_here(word) for word in (shlex.split(command) if isinstance(command, str) else command)]
    except ValueError as error:
        raise UsageError(f"cannot parse the command {command!r}: {error}") from None
    active = Path(os.environ.get("VIRTUAL_ENV", sys.prefix)).resolve()
    if words and words[0] in ("python", "python3") and active == Path(sys.prefix).resolve():
        words[0] = sys.executable  # if another virtual environment is active, its interpreter is meant
    if not words:
        raise UsageError('the command is empty: give one, as in command = "python train.py"')
    _check_words(words)
    check_command(words)
    _check_script(words)
    return tuple(words)


def _values(file: File) -> dict[str, tuple[Value, ...]]:
    if not file.axes:
        raise UsageError("no axes: give at least one under [axes]")
    found = {}
    for name, axis in file.axes.items():
        values = axis.values if isinstance(axis, OwnAxis) else axis
        if not values:
            raise UsageError(f"axis {name} has no values: give at least one")
        if any(isinstance(v, float) and not math.isfinite(v) for v in values):
            raise UsageError(f"axis {name} has a value that is not a finite number")
        if len(set(values)) < len(values) or len({_given(v) for v in values}) < len(values):
            raise UsageError(f"axis {name} has two values that are the same to the command")
        if isinstance(axis, OwnAxis) and (bool(axis.env) + (axis.argument is not None) + bool(axis.option)) != 1:
            raise UsageError(f"axis {name} needs exactly one of env, argument and option")
        if isinstance(axis, OwnAxis) and axis.option.startswith("-"):
            raise UsageError(
                f"axis {name}: option is for `python -X`, as in importtime; to pass "
                f"{axis.option} to the command, write argument = {axis.option!r}"
            )
        found[name] = tuple(values)
    return found


def _given(value: Value) -> str:
    """A value as it is passed to a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _setting(file: File, name: str, value: Value) -> Setting:
    axis = file.axes[name]
    if not isinstance(axis, OwnAxis):
        return setting_of(name, value, file.framework)
    if value == DEFAULT:
        return Setting()
    text = _given(value)
    if axis.env:
        return Setting(environment={axis.env: text})
    if axis.argument is not None:
        return Setting(arguments=(axis.argument, text) if axis.argument else (text,))
    if text in ("off", "false"):
        return Setting()
    return Setting(options=(axis.option if text in ("on", "true") else f"{axis.option}={text}",))


def named(config: Config) -> str:
    """A configuration as text for people."""
    return ", ".join(f"{axis}={_told(value)}" for axis, value in config)


def _told(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
