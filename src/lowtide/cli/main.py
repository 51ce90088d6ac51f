"""The command line: ``lowtide VERB [options] SCRIPT [its own arguments]``."""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from typing import Any, Final, NoReturn

import click

from lowtide import __version__
from lowtide.base import interrupts
from lowtide.base.errors import INTERRUPTED, LowtideError, UsageError
from lowtide.base.files import is_full, why
from lowtide.base.messages import tell

_VERBS: Final = {
    "batch": "batch.batch", "diff": "report.diff", "guard": "guard.guard", "leak": "leak.leak", "min": "minimum.minimum",
    "plan": "plan.plan", "predict": "batch.predict", "record": "record.record", "report": "report.report", "run": "run.run",
    "sweep": "sweep.sweep",
}
"""Module and function of each verb. Only the called one is imported: some take longer to import than others to run."""


class _Lowtide(click.Group):
    """A group that reports an error in one line, ``lowtide: error: ...``, without a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a verb and exit."""
        kwargs["standalone_mode"] = False
        interrupts.allow()
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.Exit as done:
            sys.exit(done.exit_code)
        except click.ClickException as error:
            fail(error.format_message())
        except click.Abort:
            fail("interrupted", code=INTERRUPTED)
        except UsageError as error:
            fail(str(error))
        except LowtideError as error:
            fail(str(error), code=1)
        except OSError as error:
            fail(_trouble(error))
        sys.exit(code or 0)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The verbs, in alphabetical order."""
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """A verb, whose module is imported now; Ctrl-C ends the process at once meanwhile."""
        if cmd_name not in _VERBS:
            return None
        module, _, function = _VERBS[cmd_name].partition(".")
        interrupts.hold()
        try:
            found: click.Command = getattr(importlib.import_module(f"lowtide.cli.{module}"), function)
        finally:
            interrupts.allow()
        return found


def _trouble(error: OSError) -> str:
    """Text for an OSError; if it names no file, most often the disk is full."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return f"cannot start a process ({why(error)}): end others, or raise the limit (`ulimit -u`, or a container's pids)"
    if error.errno != errno.EIO and (is_full(error) or error.errno == errno.ENOENT):  # ENOENT: tempfile found no folder
        return f"{why(error)}: make room, or set TMPDIR to a folder with free space"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{why(error)} (in {frame.name}, {frame.filename}:{frame.lineno})"


def fail(message: str, *, code: int = 2) -> NoReturn:
    """Print the message in one line and exit with ``code``."""
    tell(f"lowtide: error: {' '.join(message.split())}")
    sys.exit(code)


@click.group(cls=_Lowtide, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lowtide")
def main() -> None:
    """Train neural networks in the memory you have."""
