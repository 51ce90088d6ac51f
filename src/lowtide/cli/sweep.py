"""``lowtide sweep``: runs a matrix of configurations, each in fresh processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lowtide.base.errors import UsageError
from lowtide.base.messages import tell
from lowtide.base.outputs import Written, write, write_json
from lowtide.base.processes import end_on_sigterm
from lowtide.cli.launch import check_folder


@click.command()
@click.argument("file", metavar="SWEEP.toml")
@click.option(
    "--results", metavar="FILE", help="Results (SQLite), from which a killed sweep continues.  [default: SWEEP.results]"
)
@click.option("--fresh", is_flag=True, help="Discard earlier results, and run all cells again.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Cells to run in parallel, which disturb each other's rates.",
)
@click.option("--executor", type=click.Choice(("local", "dask")), default="local", show_default=True)
@click.option("--address", metavar="HOST:PORT", help="Address of a dask scheduler.  [default: a cluster on this machine]")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Workers of that cluster.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write one line per cell.")
@click.option("--json", "json_file", metavar="FILE", help="Write all results as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page with plots.")
@click.option("--quiet", is_flag=True, help="Show no table and no progress.")
def sweep(
    *,
    file: str,
    results: str | None,
    fresh: bool,
    jobs: int,
    executor: str,
    address: str | None,
    workers: int,
    csv_file: str | None,
    json_file: str | None,
    html_file: str | None,
    quiet: bool,
) -> int:
    """Run every configuration of SWEEP.toml in fresh processes.

    The table shows each one's growth of memory per step and its rate, and goes to standard output as Markdown. A sweep that
    was interrupted or killed continues where it stopped.
    """
    from lowtide.report.sweep import as_csv, markdown, page, show, to_json
    from lowtide.studies.sweep.definition import load
    from lowtide.studies.sweep.results import CONFIRM, MAIN, SweepResults
    from lowtide.studies.sweep.run import Dask, Executor, Local, go
    from lowtide.studies.sweep.summary import summary_of
    from lowtide.studies.sweep.trends import recommended, rows_of

    end_on_sigterm()
    path = Path(file)
    definition = load(path)
    for wanted in (csv_file, json_file, html_file, results):
        check_folder(wanted)
    if address is not None and executor != "dask":
        raise UsageError("--address needs --executor dask")
    if jobs > 1 and executor == "dask":
        raise UsageError("--jobs needs --executor local: with dask, use --workers")
    place = Path(results) if results else path.with_suffix(".results")
    if fresh:
        place.unlink(missing_ok=True)
    store = SweepResults(place, definition)
    if jobs > 1:
        tell(f"lowtide: {jobs} cells run in parallel, which disturbs their rates")
    runner: Executor = Dask(address, workers) if executor == "dask" else Local(Path(f"{place}.cells"), jobs)
    try:
        with _progress(quiet=quiet) as told:
            go(definition, store, MAIN, runner, told)
            if definition.confirm:
                chosen = recommended(definition, rows_of(definition, store.cells(MAIN)))
                if chosen is not None:
                    configs = dict.fromkeys((chosen.config, definition.baseline))
                    store.add(CONFIRM, [(c, k) for k in range(definition.file.repeats) for c in configs])
                    go(definition, store, CONFIRM, runner, told)
    finally:
        found = summary_of(definition, store.cells(MAIN), store.cells(CONFIRM))
        store.close()
        written = Written()
        if csv_file is not None:
            written.attempt(write, csv_file, as_csv(found))
        if json_file is not None:
            written.attempt(write_json, json_file, to_json(found))
        if html_file is not None:
            written.attempt(write, html_file, page(found))
        if not quiet:
            written.attempt(click.echo, markdown(found), nl=False)
            show(found)
    written.check()
    return int(found.complete and not any(row.verdicts for row in found.rows))


class _SweepProgress:
    """Shows the progress of a sweep as a bar; shows nothing if ``bar`` is None."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None
        self._said: set[str] = set()

    def begins(self, part: str, cells: int, done: int) -> None:
        """A part of the sweep begins, or continues."""
        if self._bar is not None:
            self._task = self._bar.add_task(part, total=cells, completed=done)

    def finished(self, result: dict[str, Any]) -> None:
        """A cell has run."""
        from lowtide.studies.sweep.cell import last_words

        if self._bar is not None:
            why = last_words(result)
            if why and why not in self._said:  # print it once: cells often fail for the same reason
                self._said.add(why)
                self._bar.console.print(f"a cell failed: {why}", markup=False)
            self._bar.advance(self._task)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[_SweepProgress]:
    if quiet:
        yield _SweepProgress(None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from lowtide.report.terminal import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console()) as bar:
        yield _SweepProgress(bar)
