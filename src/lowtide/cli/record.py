"""``lowtide record``: writes what a script does with memory to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import click

from lowtide.base.errors import UsageError
from lowtide.base.units import parse_bytes
from lowtide.cli.launch import absolute, become, check_alone, check_folder, check_target
from lowtide.cli.script import takes_script
from lowtide.runtime.agent.task import PRELOAD, RecordOptions, Task

_LEAST_CAP = 4096
"""Smallest cap, bytes: below it a unit was forgotten, since importing torch alone takes more."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE", help="The recording.  [default: SCRIPT's name with .lowtide]")
@click.option("--level", type=click.Choice(("phases", "ops")), default="ops", show_default=True,
              help="Record every operator, or only where phases begin and end.")
@click.option("--cap", metavar="SIZE", help="Make torch's CPU allocator fail above this size, as a small GPU would.")
@click.option("--json", "json_file", metavar="FILE", help="Write what `lowtide report --json` writes.")
@click.option("--quiet", is_flag=True, help="Show no summary at the end.")
@takes_script
def record(
    *,
    output: str | None,
    level: str,
    cap: str | None,
    json_file: str | None,
    quiet: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> NoReturn:
    """Run SCRIPT unchanged, and record what uses its memory.

    The recording says what every byte in the script's steps is. Options before SCRIPT are Lowtide's; everything after it
    belongs to the script. The exit code is the script's. View the recording with `lowtide report FILE`.
    """
    check_alone()
    cap_bytes = 0 if cap is None else parse_bytes(cap)
    if 0 < cap_bytes < _LEAST_CAP:
        raise UsageError(f"--cap {cap} is too small to run anything: give a unit, as in --cap {cap}MiB")
    check_target(script, module=module)
    name = output or f"{script.rpartition('.')[2] if module else Path(script).stem}.lowtide"
    check_folder(name, "give another file with -o FILE")
    check_folder(json_file)
    become(
        Task(
            target=script,
            module=module,
            arguments=arguments,
            preload=os.environ.get(PRELOAD),
            options=RecordOptions(
                output=str(Path(name).resolve()), operators=level == "ops", cap_bytes=cap_bytes, json=absolute(json_file),
                quiet=quiet,
            ),
        )
    )
