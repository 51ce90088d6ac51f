"""Command-line parts shared by all verbs that run a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from lowtide.base.errors import UsageError
from lowtide.base.processes import check_command, python
from lowtide.cli.launch import check_target


def takes_script(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the end of a verb's command line: ``-m``, the script, and the script's own arguments."""
    for parameter in (
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.argument("script"),
        click.option("-m", "module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
    ):
        verb = parameter(verb)
    return verb


class Finite(click.FloatRange):
    """A finite number in a range: rejects infinity, and NaN, which no range rejects."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert the value to a number, and reject it if it is not finite."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


class ScriptOrCommand(click.Command):
    """A verb that takes a script and its arguments, or any command after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note in ``ctx.meta`` whether a command follows the options, after ``--``."""
        valued = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        at = 0
        while at < len(args) and args[at] != "--" and args[at].startswith("-"):
            at += 2 if args[at] in valued else 1
        ctx.meta["command"] = at < len(args) and args[at] == "--"
        return super().parse_args(ctx, args)


def command_of(script: str, arguments: tuple[str, ...], *, module: bool) -> list[str]:
    """The command to run, checked: the given one, or Python with the script or module.

    Raises:
        UsageError: if it does not exist, or if ``-m`` is given with a command.
    """
    if click.get_current_context().meta["command"]:
        if module:
            raise UsageError("-m needs a module name, not a command after `--`")
        command = [script, *arguments]
        check_command(command)
        return command
    check_target(script, module=module)
    return python(script, module=module, arguments=arguments)
