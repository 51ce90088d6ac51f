"""``lowtide batch``: throughput and peak at each size; ``lowtide predict``: the peak at sizes not run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.base.errors import UsageError
from lowtide.base.lever_catalogue import parse_levers
from lowtide.base.messages import tell
from lowtide.base.outputs import write, write_json
from lowtide.base.temporary_folders import Scratch
from lowtide.base.units import parse_bytes
from lowtide.cli.launch import check_alone, check_folder, check_target
from lowtide.cli.script import Finite, takes_script
from lowtide.runtime.agent.script_constants import with_constants
from lowtide.studies.size.trial import MOST_SECONDS
from lowtide.studies.size.vary import ENVIRONMENT, LARGEST

if TYPE_CHECKING:
    from lowtide.studies.size.predict import Model
    from lowtide.studies.size.throughput import Point
    from lowtide.studies.size.trial import Target
    from lowtide.studies.size.vary import Vary

RECORDED = 3
"""Number of values of an axis that are recorded for predictions: the smallest, if more are given."""
NEAR = 2.0
"""One more of the user's sizes may be recorded if it is at most this many times the largest recorded one."""
RECORDED_STEPS = 3
"""Steps of such a recording: one cold and two warm."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--vary", "axes", multiple=True, required=True, metavar="NAME=1,2,4,...",
              help="NAME: an option of SCRIPT; env:NAME: an environment variable; SCRIPT.py:NAME: a constant. `...`: larger "
                   "sizes until memory runs out.")
@click.option("--budget", metavar="SIZE", help="Budget for sizes that do not fit without one.")
@click.option("--memory", metavar="SIZE", help="Memory that a run may use.  [default: 90 % of what is available; CUDA: all]")
@click.option("--allow", multiple=True, metavar="NAME,...", help="Memory optimizations that the budget may use.")
@click.option(
    "--samples", type=Finite(min=0, min_open=True),
    help="Samples per step.  [default: the value of the axis whose name contains `batch`]",
)
@click.option("--steps", type=click.IntRange(min=3), help="Steps per run.  [default: 10, two to warm up; 3 with --predict]")
@click.option("--predict", is_flag=True, help="Record the three smallest values above 1, and predict the others.")
@click.option("-o", "--output", metavar="FILE", help="With --predict: keep the recordings in FILE, for `lowtide predict`.")
@click.option("--results", metavar="FILE", help="File of measured points, from which to continue.  [default: SCRIPT.batch]")
@click.option("--fresh", is_flag=True, help="Discard earlier points, and measure them again.")
@click.option("--timeout", type=Finite(min=1), default=MOST_SECONDS, show_default=True, help="Time limit per run, in seconds.")
@click.option("--json", "json_file", metavar="FILE", help="Write all results as JSON.")
@click.option("--html", "html_file", metavar="FILE", help="Write an HTML page with plots.")
@takes_script
def batch(
    *,
    axes: tuple[str, ...],
    budget: str | None,
    memory: str | None,
    allow: tuple[str, ...],
    samples: float | None,
    steps: int | None,
    predict: bool,
    output: str | None,
    results: str | None,
    fresh: bool,
    timeout: float,
    json_file: str | None,
    html_file: str | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Measure SCRIPT's throughput and peak at each size.

    Each size runs in a fresh process. The results are samples per second, the peak, the knee (the smallest size with at least
    95 % of the highest throughput), and the largest size that fits.
    """
    from lowtide.base.processes import end_on_sigterm
    from lowtide.studies.size.throughput import TIMED, WARM
    from lowtide.studies.size.trial import Target
    from lowtide.studies.size.vary import Vary, parse_axis

    check_alone()
    check_target(script, module=module)
    for file in (json_file, html_file, output, results):
        check_folder(file)
    vary = Vary([parse_axis(a, script) for a in axes], arguments)
    if module and any(a.kind == "constant" for a in vary.axes):
        raise UsageError("constants can be set in a script, but not in a module that is run with -m")
    if len(vary.axes) > 1 and any(a.open for a in vary.axes):
        raise UsageError("`...` works only with a single axis: give one --vary, or list the values")
    for axis in vary.axes:
        if axis.kind == "constant":
            for value in axis.values:
                with_constants(Path(script).read_bytes(), {axis.name: value}, Path(script).name)
    limit = 0 if memory is None else parse_bytes(memory)
    target = Target(script=script, module=module, seconds=timeout)
    end_on_sigterm()
    if predict:
        unused = {"--budget": budget, "--allow": allow, "--samples": samples, "--results": results, "--fresh": fresh,
                  "--html": html_file}
        if any(unused.values()):
            raise UsageError(f"{', '.join(n for n, v in unused.items() if v)} cannot be used with --predict")
        return _predict_by_recording(vary, target, limit, steps or RECORDED_STEPS, output, json_file)
    if output is not None:
        raise UsageError("-o needs --predict")
    levers = parse_levers(allow)
    held = 0 if budget is None else parse_bytes(budget)
    if levers and not held:
        raise UsageError("--allow needs --budget")
    return _measure(
        vary, target, arguments, held, limit, sorted(levers), samples, steps or WARM + TIMED, results, json_file, html_file,
        fresh=fresh,
    )


def _measure(
    vary: Vary, target: Target, arguments: tuple[str, ...], budget: int, limit: int, allow: list[str], samples: float | None,
    steps: int, results: str | None, json_file: str | None, html_file: str | None, *, fresh: bool,
) -> int:
    from lowtide.report.size_batch import batch_json, batch_page, show_batch
    from lowtide.report.terminal import console
    from lowtide.studies.size.throughput import SizeResults, SizeStudy, measure
    from lowtide.studies.size.trial import TrialRequest, run

    about = {
        "script": target.script,
        "content": None if target.module else hashlib.sha256(Path(target.script).read_bytes()).hexdigest(),
        "arguments": list(arguments),
        "axes": [[a.kind, a.name] for a in vary.axes],
        "budget": budget,
        "memory": limit,
        "allow": allow,
        "steps": steps,
        "samples": samples,
    }
    place = Path(results) if results else Path(f"{Path(target.script).stem}.batch")
    store = SizeResults(place, about, fresh=fresh)
    if store.known:
        tell(f"lowtide: using {store.known} points from {place} (--fresh measures them again)")
    which = next((i for i, a in enumerate(vary.axes) if "batch" in a.name.lower()), None)

    def count(values: Sequence[str]) -> float:
        return samples if samples is not None else 1.0 if which is None else float(values[which])

    plain = TrialRequest(steps=steps, cap_bytes=limit)
    held = TrialRequest(steps=max(steps, 6), budget_bytes=budget, cap_bytes=limit, allow=frozenset(allow)) if budget else None
    points: list[Point] = []
    whole = False
    try:
        with console().status("running") as status:
            for point in measure(vary, lambda s, a: run(target, s, a), store, samples=count, plain=plain, budget=held):
                points.append(point)
                status.update(f"after {', '.join(f'{n}={v}' for n, v in zip(vary.names, point.values, strict=True))}")
        whole = True
    finally:
        store.close()
        study = SizeStudy(
            script=target.script, vary=vary, points=tuple(points), per_sample=samples is not None or which is not None,
            whole=whole,
        )
        if points:
            show_batch(study)
        if points and not whole:
            tell(f"lowtide: not all sizes were measured: run the same command again to continue from {place}")
    if json_file is not None:
        write_json(json_file, batch_json(study))
    if html_file is not None:
        write(html_file, batch_page(study))
    return 0 if any(p.fits for p in points) else 1


def _predict_by_recording(
    vary: Vary, target: Target, limit: int, steps: int, output: str | None, json_file: str | None
) -> int:
    import itertools

    from lowtide.recording.reader import read
    from lowtide.report.size_predictions import prediction_json, show_predictions
    from lowtide.report.terminal import console
    from lowtide.studies.size import bundle
    from lowtide.studies.size.predict import Model
    from lowtide.studies.size.trial import record

    if any(a.open for a in vary.axes):
        raise UsageError("--predict needs explicit sizes: leave out the `...`")
    for axis in vary.axes:
        if len(axis.values) < 2:
            raise UsageError(f"--vary {axis.name}: --predict needs two or more sizes to record, and larger ones to predict")
    small = [_smallest(a.values) for a in vary.axes]
    recorded = list(itertools.product(*small))
    with Scratch() as folder, console().status("recording") as status:
        found, files = [], []
        for number, values in enumerate(recorded):
            setting = vary.set(values)
            status.update(f"recording {', '.join(f'{k}={v:g}' for k, v in setting.sizes.items())}")
            file = folder / f"{number}.lowtide"
            record(target, setting, steps, file)
            files.append(file)
            found.append((setting.sizes, read(file)))
        model = Model(found)
        if not model.checked and len(vary.axes) == 1:
            more = _next(vary.axes[0].values, small[0])
            setting = vary.set((more,))
            status.update(f"recording {vary.axes[0].name}={more} as well: three recordings do not show how memory grows")
            files.append(Path(folder, "more.lowtide"))
            record(target, setting, steps, files[-1])
            found.append((setting.sizes, read(files[-1])))
            recorded.append((more,))
            model = Model(found)
        if output is not None:
            bundle.save(files, Path(output))
    sizes = [vary.set(values).sizes for values in vary.points() if values not in recorded]
    predictions = model.predictions(sizes, limit, steps)
    show_predictions(predictions)
    if json_file is not None:
        write_json(json_file, prediction_json(predictions))
    return 0


def _smallest(values: Sequence[str]) -> list[str]:
    """The smallest values, to be recorded; without 1 if there are enough others: torch treats a dimension of 1 differently."""
    rising = sorted(values, key=float)
    above = [v for v in rising if float(v) > 1]
    return (above if len(above) >= RECORDED else rising)[:RECORDED]


def _next(values: Sequence[str], recorded: Sequence[str]) -> str:
    """One more size to record: the user's next one if it is near (`NEAR`), else the last plus the last two's difference."""
    before, last = (float(v) for v in recorded[-2:])
    for value in sorted(values, key=float):
        if last < float(value) <= NEAR * last:
            return value
    on = 2 * last - before
    return f"{on:.0f}" if on == int(on) else f"{on:g}"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="F.lowtide ...")
@click.option("--set", "wanted", multiple=True, required=True, metavar="NAME=VALUE", help="A size to predict (repeatable).")
@click.option("--memory", metavar="SIZE", help="Available memory: tell whether the step fits, and which plan makes it fit.")
@click.option("--plan", "plan_file", metavar="FILE", help="Write the plan that makes it fit, as `lowtide plan --json` does.")
@click.option("--json", "json_file", metavar="FILE", help="Write the prediction as JSON.")
def predict(
    *, files: tuple[Path, ...], wanted: tuple[str, ...], memory: str | None, plan_file: str | None, json_file: str | None
) -> int:
    """Predict a step's peak at sizes that were not run.

    The prediction is made from recordings at two or more other sizes. F.lowtide is the file that `lowtide batch --predict -o`
    wrote, or several recordings of one script whose options give the sizes. The exit code is 0 if the step fits (as it is, or
    with a plan) or if --memory is not given, and 1 if it does not fit.
    """
    from lowtide.report.size_predictions import fit_json, show_fit
    from lowtide.studies.size import bundle
    from lowtide.studies.size.fit import fit
    from lowtide.studies.size.predict import Model
    from lowtide.studies.size.prediction import sizes_of

    for file in (plan_file, json_file):
        check_folder(file)
    sizes: dict[str, float] = {}
    for name, value in _assignments(wanted):
        if name in sizes:
            raise UsageError(f"--set {name} is given twice: give one size per prediction")
        sizes[name] = value
    recordings = [r for file in files for r in bundle.load(file)]
    found = [(sizes_of(r, list(sizes)), r) for r in recordings]
    for name, value in sizes.items():
        if value != int(value) and all(s[name] == int(s[name]) for s, _ in found):
            raise UsageError(f"--set {name}={value:g}: only whole numbers were recorded; give a whole number")
    model: Model = Model(found)
    limit = None if memory is None else parse_bytes(memory)
    answer = fit(model, sizes, limit)
    show_fit(answer)
    if plan_file is not None and answer.plan is not None:
        from lowtide.planning.solver.figures import to_json

        write_json(plan_file, to_json(answer.plan, strategy="search", rounding_bytes=1))
    if json_file is not None:
        write_json(json_file, fit_json(answer))
    return 0 if limit is None or answer.fits else 1


def _assignments(texts: Iterable[str]) -> Iterable[tuple[str, Any]]:
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not equals or not name or not 0 < number < LARGEST:
            raise UsageError(f"--set {text}: write NAME=VALUE, where VALUE is a number above zero")
        yield name.removeprefix(ENVIRONMENT).lstrip("-"), number
