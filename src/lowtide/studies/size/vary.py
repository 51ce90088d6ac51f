"""The axes along which a script is varied, and how a value is set: by an option, environment variable or constant."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from lowtide.base.errors import UsageError

ENVIRONMENT: Final = "env:"
LARGEST: Final = 1e12
"""Sizes must be below this."""
_MORE: Final = ("...", "…")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One thing that is varied.

    Attributes:
        name: name of the option (with dashes if the user wrote them), environment variable or constant.
        kind: ``option``, ``environment`` or ``constant``.
        values: the values as the user wrote them, in rising order.
        open: whether the values continue, each larger by the ratio of the last two.
    """

    name: str
    kind: str
    values: tuple[str, ...]
    open: bool = False

    def each(self) -> Iterator[str]:
        """The values; if the axis is open, they continue up to :data:`LARGEST`."""
        yield from self.values
        if self.open:
            before, last = (_number(self.name, v) for v in self.values[-2:])
            ratio = last / before
            while last * ratio < LARGEST:
                last = max(last * ratio, last + 1) if before == int(before) else last * ratio
                last = float(round(last)) if before == int(before) else last
                yield f"{last:g}" if last < 1e6 else f"{last:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSetting:
    """A script with some values set.

    Attributes:
        arguments: the script's arguments.
        environment: environment variables to add.
        constants: values of names assigned at the top level of the script.
        sizes: the varied values as numbers, by axis name.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)


@final
class Vary:
    """All axes of a script."""

    def __init__(self, axes: Sequence[Axis], arguments: Sequence[str]) -> None:
        """Vary a script.

        Args:
            axes: what is varied.
            arguments: the script's own arguments.
        """
        self.axes = tuple(axes)
        self._arguments = tuple(arguments)

    def points(self) -> Iterator[tuple[str, ...]]:
        """Combinations of values; the first axis changes slowest. An open axis must be the only one."""
        if len(self.axes) == 1:
            yield from ((v,) for v in self.axes[0].each())
            return
        yield from itertools.product(*(a.values for a in self.axes))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, without dashes in front."""
        return tuple(a.name.lstrip("-") for a in self.axes)

    def set(self, values: Sequence[str]) -> ScriptSetting:
        """The script with one value for each axis."""
        arguments = self._arguments
        environment, constants, sizes = {}, {}, {}
        for axis, value in zip(self.axes, values, strict=True):
            sizes[axis.name.lstrip("-")] = _number(axis.name, value)
            if axis.kind == "environment":
                environment[axis.name] = value
            elif axis.kind == "constant":
                constants[axis.name] = value
            else:
                arguments = with_option(arguments, axis.name, value)
        return ScriptSetting(arguments=arguments, environment=environment, constants=constants, sizes=sizes)


def parse_axis(text: str, script: str) -> Axis:
    """Parse an axis such as ``batch-size=1,2,4``, ``env:BATCH=1,2,4,...`` or ``train.py:BATCH=8,16``.

    Args:
        text: the axis; with ``...`` at the end, values continue, each larger by the ratio of the last two.
        script: the script that is run; only its own constants can be set.

    Raises:
        UsageError: if the text has none of these forms, or a value is not a size.
    """
    name, equals, list_ = text.partition("=")
    values = tuple(v.strip() for v in list_.split(",") if v.strip())
    goes_on = bool(values) and values[-1] in _MORE
    values = values[:-1] if goes_on else values
    if not equals or not name or not values:
        raise UsageError(f"--vary {text}: write NAME=1,2,4 (an option), env:NAME=1,2,4 or {script}:NAME=1,2,4 (a constant)")
    if goes_on and (len(values) < 2 or _number(name, values[-1]) <= _number(name, values[-2])):
        raise UsageError(f"--vary {text}: `...` needs two rising values before it")
    if len({_number(name, v) for v in values}) < len(values):
        raise UsageError(f"--vary {text}: a value is given twice")
    values = tuple(sorted(values, key=float))
    if name == ENVIRONMENT:
        raise UsageError(f"--vary {text}: name the variable, as in env:BATCH=1,2")
    if name.startswith(ENVIRONMENT):
        return Axis(name=name.removeprefix(ENVIRONMENT), kind="environment", values=values, open=goes_on)
    file, colon, constant = name.rpartition(":")
    if not colon:
        return Axis(name=name, kind="option", values=values, open=goes_on)
    if Path(file).name != Path(script).name or not constant.isidentifier():
        raise UsageError(f"--vary {text}: only constants of the script can be set: write {Path(script).name}:NAME")
    return Axis(name=constant, kind="constant", values=values, open=goes_on)


def with_option(arguments: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    """Arguments with ``--name value``, which replaces a value that is given already; a name with dashes is used as written."""
    bare = name.lstrip("-")
    given = {f"--{bare}", f"--{bare.replace('-', '_')}", f"--{bare.replace('_', '-')}", f"-{bare}", name}
    found = list(arguments)
    for i, word in enumerate(found):
        option, equals, _ = word.partition("=")
        if option in given and equals:
            found[i] = f"{option}={value}"
            return tuple(found)
        if word in given and i + 1 < len(found):
            found[i + 1] = value
            return tuple(found)
    return (*found, name if name.startswith("-") else f"--{name}", value)


def option_of(arguments: Sequence[str], name: str) -> float | None:
    """The number that the arguments give for an option; None if they give none."""
    wanted = name.replace("_", "-")
    for i, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option.lstrip("-").replace("_", "-") != wanted or not option.startswith("-"):
            continue
        text = value if equals else arguments[i + 1] if i + 1 < len(arguments) else ""
        try:
            return float(text)
        except ValueError:
            return None
    return None


def _number(name: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not a number") from None
    if not 0 < found < LARGEST:
        raise UsageError(f"{name}: {value} is not a size above zero")
    return found
