"""``lowtide report`` and ``lowtide diff``: explain one recording, or compare two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.base.outputs import write, write_json
from lowtide.cli.launch import check_folder

if TYPE_CHECKING:
    from lowtide.recording.explanation.explanation import Explanation


@click.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE", help="Write phases, peak and findings as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page, which needs no network.")
@click.option("--snapshot", metavar="FILE", help="Write a snapshot.pickle for PyTorch's memory_viz.")
@click.option("--perfetto", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--speedscope", metavar="FILE", help="Write the high-water marks for speedscope.")
def report(
    *, recording: Path, json_file: str | None, html_file: str | None, snapshot: str | None, perfetto: str | None,
    speedscope: str | None,
) -> None:
    """Show RECORDING's phases and peak, and what would lower the peak."""
    from lowtide.recording.explanation.explanation import explain
    from lowtide.recording.reader import read
    from lowtide.report.recording import show_recording, to_json

    for file in (json_file, html_file, snapshot, perfetto, speedscope):
        check_folder(file)
    found = explain(read(recording))
    _export(found, snapshot=snapshot, perfetto=perfetto, speedscope=speedscope)
    if html_file is not None:
        from lowtide.report.html import page

        write(html_file, page(found))
    if json_file is not None:
        write_json(json_file, to_json(found))
    show_recording(found)


def _export(found: Explanation, *, snapshot: str | None, perfetto: str | None, speedscope: str | None) -> None:
    from lowtide.report import export

    if snapshot is not None:
        export.write_snapshot(found, Path(snapshot))
    if perfetto is not None:
        export.write_json(export.trace_events(found), Path(perfetto))
    if speedscope is not None:
        export.write_json(export.speedscope(found), Path(speedscope))


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE", help="Write the differences as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page that shows AFTER beside BEFORE.")
def diff(*, before: Path, after: Path, json_file: str | None, html_file: str | None) -> None:
    """Show what changed from recording BEFORE to recording AFTER."""
    from lowtide.recording.explanation.difference import difference
    from lowtide.recording.explanation.explanation import explain
    from lowtide.recording.reader import read
    from lowtide.report.recording import show_difference

    check_folder(json_file)
    check_folder(html_file)
    sides = explain(read(before)), explain(read(after))
    found = difference(*sides)
    if html_file is not None:
        from lowtide.report.html import page

        write(html_file, page(sides[1], sides[0]))
    if json_file is not None:
        write_json(json_file, found.to_json())
    show_difference(found)
