"""``lowtide run``: runs a script under a memory budget."""

from __future__ import annotations

import os
from pathlib import Path

import click

from lowtide.base.errors import UsageError
from lowtide.base.lever_catalogue import check_levers
from lowtide.base.outputs import write_json
from lowtide.base.units import RESCUE, parse_budget
from lowtide.cli.launch import absolute, become, check_alone, check_folder, check_target
from lowtide.cli.script import takes_script
from lowtide.runtime.agent.task import PRELOAD, RunOptions, Task


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--budget", metavar="SIZE", help="The budget: 900MiB, 6GiB, 2GB, bytes, 50%, minimum, or auto (CUDA).")
@click.option("--slowdown", metavar="SHARE",
              help="The least memory that is predicted to cost at most this share of time, such as 10%; with --budget SIZE, "
                   "never more than that.")
@click.option("--rescue", is_flag=True,
              help="No budget: leave steps that fit alone, and keep a step that does not fit from running out of memory.")
@click.option("--optimizations", "levers", type=click.Choice(["list"]),
              help="Try each memory optimization on SCRIPT and show what it saves.")
@click.option("--levers", "levers_as_before", type=click.Choice(["list"]), hidden=True,
              help="The former name of --optimizations.")
@click.option("--keep", multiple=True, metavar="MODULE", help="Never drop what this module saves (repeatable).")
@click.option(
    "--offload/--no-offload", default=True, help="Allow activations to be offloaded to a file (CUDA: to host memory)."
)
@click.option("--allow", multiple=True, metavar="NAME,...",
              help="Additional memory optimizations; `--optimizations list` tries them.")
@click.option("--without", multiple=True, metavar="NAME,...",
              help="Exact memory optimizations that must not be used.")
@click.option("--plan", metavar="FILE", help="Start with a plan written by --save-plan.")
@click.option("--cache/--no-cache", default=True,
              help="Follow plans of earlier runs of SCRIPT from the first step on, and keep plans for later runs.")
@click.option("--save-plan", metavar="FILE", help="Write the plan that is in force at the end.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures of the run as JSON.")
@click.option("--quiet", is_flag=True, help="Show no summary at the end.")
@click.option("--keep-going", is_flag=True, help="Continue if the budget is not held, and exit with SCRIPT's own code.")
@takes_script
def run(
    *,
    budget: str | None,
    slowdown: str | None,
    rescue: bool,
    levers: str | None,
    levers_as_before: str | None,
    keep: tuple[str, ...],
    offload: bool,
    allow: tuple[str, ...],
    without: tuple[str, ...],
    plan: str | None,
    cache: bool,
    save_plan: str | None,
    json_file: str | None,
    quiet: bool,
    keep_going: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT under a memory budget, with bit-equal results.

    Options before SCRIPT are Lowtide's; everything after it belongs to the script. The exit code is the script's; 1 if the
    first three steps show that the budget cannot be held, 2 for wrong usage, 3 if SCRIPT succeeded but a step exceeded the
    budget.
    """
    check_alone()
    if levers is not None or levers_as_before is not None:
        return _list_levers(script, arguments, module=module, json_file=json_file)
    if slowdown is not None:
        if rescue or not isinstance(None if budget is None else parse_budget(budget), int | None):
            raise UsageError("--slowdown sets the budget itself: give --budget only as a size, such as 6GiB, and no --rescue")
        share = slowdown if slowdown.rstrip().endswith("%") else f"{slowdown}%"
        budget = f"slowdown {share}" if budget is None else f"slowdown {share} within {budget}"
    if rescue and (budget is not None or plan is not None or save_plan is not None):
        raise UsageError("--rescue has no budget and makes no plan: leave out --budget, --plan and --save-plan")
    if rescue:
        budget = RESCUE
    if budget is None:
        raise UsageError("give a budget, as in --budget 6GiB or --budget 50%, or --rescue (--optimizations list needs none)")
    parse_budget(budget)
    allowed, excluded = check_levers(allow, without)
    check_target(script, module=module)
    if plan is not None and not Path(plan).is_file():
        raise UsageError(f"no such plan: {plan}")
    check_folder(save_plan)
    check_folder(json_file)
    become(
        Task(
            target=script,
            module=module,
            arguments=arguments,
            preload=os.environ.get(PRELOAD),
            options=RunOptions(
                budget=budget,
                keep=keep,
                offload=offload,
                allow=tuple(sorted(allowed)),
                without=tuple(sorted(excluded)),
                plan=plan,
                save_plan=absolute(save_plan),
                json=absolute(json_file),
                quiet=quiet,
                keep_going=keep_going,
                cache=cache,
            ),
        )
    )
    return 0  # never reached: `become` has replaced this process


def _list_levers(script: str, arguments: tuple[str, ...], *, module: bool, json_file: str | None) -> int:
    """Try each lever for a few steps, and compare it with the plain run."""
    from lowtide.base.errors import LowtideError
    from lowtide.base.lever_catalogue import LEVERS
    from lowtide.base.processes import end_on_sigterm
    from lowtide.report.size import levers_json, show_levers
    from lowtide.report.terminal import console
    from lowtide.studies.size.minimum import STEPS, LeverTrials, probed
    from lowtide.studies.size.trial import MOST_SECONDS, Target, TrialRequest, TrialResult, run
    from lowtide.studies.size.vary import ScriptSetting

    check_target(script, module=module)
    check_folder(json_file)
    end_on_sigterm()
    target, setting = Target(script=script, module=module, seconds=MOST_SECONDS), ScriptSetting(arguments=arguments)
    with console().status("the baseline run") as status:
        plain = run(target, setting, TrialRequest(steps=STEPS))
        if not plain.passes:
            raise LowtideError(f"the script fails without Lowtide: {plain.message}")
        found = {}
        for name in ("", *LEVERS):
            status.update(f"with {name}" if name else "without memory optimizations")
            allow, without = frozenset(filter(None, (name,))), frozenset(LEVERS) - {name}

            def at(budget: int, allow: frozenset[str] = allow, without: frozenset[str] = without) -> TrialResult:
                return run(target, setting, TrialRequest(steps=STEPS, budget_bytes=budget, allow=allow, without=without))

            found[name] = probed(plain.peak_bytes, at)
    trials = LeverTrials(plain=plain, without=found.pop(""), runs=found)
    show_levers(trials)
    if json_file is not None:
        write_json(json_file, levers_json(trials))
    return 0
