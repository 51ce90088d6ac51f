"""``lowtide guard``: keeps a long run alive."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any, cast

import click

from lowtide.base.errors import UsageError
from lowtide.base.messages import tell
from lowtide.base.outputs import write_json
from lowtide.base.units import parse_bytes
from lowtide.cli.launch import check_alone, check_folder
from lowtide.cli.script import Finite, ScriptOrCommand, command_of, takes_script


@click.command(cls=ScriptOrCommand, context_settings={"allow_interspersed_args": False})
@click.option("--memory", metavar="SIZE", help="Memory cap of the command and all its child processes.")
@click.option(
    "--recycle",
    default="watermark",
    show_default=True,
    metavar="RULE",
    help="When to restart in a fresh process: epoch, every=N safe points, watermark[=90%], exit (the command exits by "
    "itself again and again), never.",
)
@click.option(
    "--enforce",
    type=click.Choice(["auto", "cgroup", "rlimit", "watch"]),
    default="auto",
    show_default=True,
    help="What enforces --memory; auto: a cgroup if one can be created, else this process watches and kills.",
)
@click.option(
    "--patience",
    type=Finite(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the command may take to stop after Ctrl-C or SIGTERM.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Out-of-memory failures in a row, without a new checkpoint, before giving up.",
)
@click.option("--done", "done_file", metavar="FILE", help="With --recycle exit: the run is done once FILE exists.")
@click.option("--done-code", type=click.IntRange(1, 255), help="With --recycle exit: the exit code that means done.")
@click.option("-o", "--record", "recording", metavar="FILE", help="Record memory once a second, for `lowtide report`.")
@click.option("--prometheus", metavar="PORT", type=click.IntRange(1, 65535), help="Serve metrics on 127.0.0.1.")
@click.option("--tensorboard", metavar="FOLDER", help="Write scalars for TensorBoard.")
@click.option("--json", "json_file", metavar="FILE", help="Write all results as JSON.")
@click.option("--quiet", is_flag=True, help="Show no panel and no summary.")
@takes_script
def guard(
    *,
    memory: str | None,
    recycle: str,
    enforce: str,
    patience: float,
    restarts: int,
    done_file: str | None,
    done_code: int | None,
    recording: str | None,
    prometheus: int | None,
    tensorboard: str | None,
    json_file: str | None,
    quiet: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT (or, after `--`, any COMMAND), and restart it before memory runs out.

    It is asked to save and stop at its next safe point (`lowtide.checkpoint(...)`, or a callback of Lightning, the Hugging
    Face Trainer or Keras) when its memory nears the cap, or when --recycle says so, and continues from its checkpoint in a
    fresh process. The exit code is its own; 75 if a signal stopped it and it has saved its state, else 128 + N for signal N;
    1 if the guard gave up restarting it.
    """
    check_alone()
    from lowtide.guard.keep import Enforce, GuardSettings, RunKeeper
    from lowtide.guard.rule import RecycleWhen, parse

    rule = parse(recycle)
    exits = rule.kind is RecycleWhen.EXIT
    if exits and done_file is None and done_code is None:
        raise UsageError("--recycle exit needs --done FILE or --done-code N, to know when the run is done")
    if not exits and (done_file is not None or done_code is not None):
        raise UsageError("--done and --done-code need --recycle exit")
    command = command_of(script, arguments, module=module)
    for file in (json_file, recording, done_file):
        check_folder(file)
    settings = GuardSettings(
        command=command,
        cap_bytes=None if memory is None else parse_bytes(memory),
        rule=rule,
        enforce=cast("Enforce", enforce),
        patience_seconds=patience,
        restarts=restarts,
        done_file=None if done_file is None else Path(done_file),
        done_code=done_code,
    )
    from lowtide.report.guard import GuardDisplay, show, to_json

    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(GuardDisplay(quiet=quiet))
        written = _recorded(recording, command)
        listeners = [shown, *written, *_exported(stack, prometheus, tensorboard)]
        outcome = None
        try:
            outcome = RunKeeper(settings, listeners).run()
        finally:
            for one in written:
                one.close(outcome)
    if json_file is not None:
        try:
            write_json(json_file, {"command": command, **to_json(outcome)})
        except OSError as error:  # after hours of work, this must not lose the rest
            tell(f"lowtide: error: cannot write {json_file}: {error.strerror}")
    with contextlib.suppress(OSError):  # the terminal or pipe may be closed by now
        if not quiet:
            show(outcome)
        elif outcome.exit_code:
            tell(f"lowtide: guard: {outcome.text}")
    return outcome.exit_code


def _recorded(recording: str | None, command: list[str]) -> list[Any]:
    from lowtide.report.guard_trackers import RecordingTracker

    return [] if recording is None else [RecordingTracker(Path(recording), shlex.join(command))]


def _exported(stack: contextlib.ExitStack, prometheus: int | None, tensorboard: str | None) -> list[Any]:
    """Listeners that export the figures to Prometheus and TensorBoard."""
    from lowtide.report.guard_trackers import PrometheusTracker, TensorBoardTracker

    found: list[Any] = []
    if prometheus is not None:
        try:
            served = PrometheusTracker(prometheus)
        except ImportError:
            raise UsageError("--prometheus needs prometheus-client: pip install prometheus-client") from None
        except OSError as error:
            raise UsageError(f"cannot serve on 127.0.0.1:{prometheus}: {error.strerror}; give another port") from None
        stack.callback(served.close)
        found.append(served)
    if tensorboard is not None:
        try:
            scalars = TensorBoardTracker(Path(tensorboard))
        except ImportError:
            raise UsageError("--tensorboard needs tensorboard: pip install tensorboard") from None
        stack.callback(scalars.close)
        found.append(scalars)
    return found
