"""What all verbs that run a script have in common on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def takes_script(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The end of a verb's options: ``-m``, the script, and its own arguments."""
    for parameter in (
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
        click.argument("script"),
        click.option("-m", "module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
    ):
        verb = parameter(verb)
    return verb
