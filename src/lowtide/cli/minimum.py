"""``lowtide min``: the smallest budget that works, shown by real runs."""

from __future__ import annotations

from collections.abc import Callable

import click

from lowtide.base.errors import LowtideError
from lowtide.base.lever_catalogue import check_levers
from lowtide.base.outputs import write, write_json
from lowtide.cli.launch import check_alone, check_folder, check_target
from lowtide.cli.script import Finite, takes_script
from lowtide.studies.size.minimum import PROBE, STEPS, SURVIVES, MinimumStudy, covering, lever_sets, search
from lowtide.studies.size.trial import MOST_SECONDS, Target, TrialRequest, TrialResult, run


@click.command("min", context_settings={"allow_interspersed_args": False})
@click.option(
    "--allow", multiple=True, metavar="NAME,...",
    help="Additional memory optimizations, which may change bits; `all` for all of them.",
)
@click.option("--without", multiple=True, metavar="NAME,...", help="Memory optimizations that must not be used.")
@click.option("--steps", type=click.IntRange(min=4), default=STEPS, show_default=True, help="Minimum steps per run.")
@click.option("--survive", type=click.IntRange(min=0), default=SURVIVES, show_default=True, help="Steps at the minimum.")
@click.option(
    "--offload/--no-offload", default=True, help="Allow activations to be offloaded to a file (CUDA: to host memory)."
)
@click.option("--timeout", type=Finite(min=1), default=MOST_SECONDS, show_default=True, help="Time limit per run, in seconds.")
@click.option("--json", "json_file", metavar="FILE", help="Write all results as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page that plots step time against memory.")
@takes_script
def minimum(
    *,
    allow: tuple[str, ...],
    without: tuple[str, ...],
    steps: int,
    survive: int,
    offload: bool,
    timeout: float,
    json_file: str | None,
    html_file: str | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Find the smallest budget under which SCRIPT trains.

    The minimum is proven by real runs with capped memory. First comes a baseline run, with at least as many steps as the
    minimum must survive (--survive). Short runs follow, each capped at its budget and long enough to include the step with
    the highest peak. The minimum is the smallest budget that passes; a budget within 1 % below it fails. The search is made
    without memory optimizations, with the exact ones, and with those of --allow.
    """
    from lowtide.base.processes import end_on_sigterm
    from lowtide.report.size import minimum_json, minimum_page, show_minimum
    from lowtide.report.terminal import console
    from lowtide.studies.size.vary import ScriptSetting

    check_alone()
    allowed, excluded = check_levers(allow, without)
    check_target(script, module=module)
    for file in (json_file, html_file):
        check_folder(file)
    end_on_sigterm()
    target, setting = Target(script=script, module=module, seconds=timeout), ScriptSetting(arguments=arguments)
    with console().status("the baseline run") as status:

        def told(what: str) -> Callable[[TrialRequest], TrialResult]:
            count = 0

            def go(asked: TrialRequest) -> TrialResult:
                nonlocal count
                count += 1
                status.update(_doing(what, count, asked))
                return run(target, setting, asked)

            return go

        plain = run(target, setting, TrialRequest(steps=max(steps, survive)))
        if not plain.passes or len(plain.steps) < 2:
            why = plain.message or f"only {len(plain.steps)} steps were seen"
            raise LowtideError(f"the script fails without Lowtide: {why}")
        steps = covering(plain, steps)
        look = TrialRequest(
            steps=4, budget_bytes=int(PROBE * plain.peak_bytes), allow=allowed, without=excluded, offload=offload
        )
        status.update("checking which memory optimizations the script allows")
        declined = {x["name"]: x["text"] for x in run(target, setting, look).levers if not x["used"]}
        found = [
            search(name, can - declined.keys(), cannot, plain, told(name), offload=offload, steps=steps, survives=survive)
            for name, (can, cannot) in lever_sets(allowed, excluded).items()
        ]
    study = MinimumStudy(script=script, plain=plain, sets=tuple(found), declined=declined)
    show_minimum(study)
    if json_file is not None:
        write_json(json_file, minimum_json(study))
    if html_file is not None:
        write(html_file, minimum_page(study))
    return 0 if any(f.minimum_bytes is not None for f in found) else 1


def _doing(what: str, count: int, asked: TrialRequest) -> str:
    from lowtide.base.units import format_bytes

    return f"{what}: run {count}, {asked.steps} steps at {format_bytes(asked.budget_bytes)}"
