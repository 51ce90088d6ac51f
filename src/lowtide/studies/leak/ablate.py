"""Finds by experiment which part of a program grows: "arms" with parts switched off run in fresh processes.

Arms are cumulative: the loop alone, then with the forward, the backward, the optimizer, checkpointing and logging. What an
arm grows more than the previous one is attributed to the part that it adds: this is a contrast. If the forward or the
backward grows, layers are examined by type, with none, one and two times the work of each (dose and response), and then one
by one, by bisection. If no layer grows, the modules that contain layers are examined, from the innermost outwards.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from scipy import stats

from lowtide.probe.arms import PARTS
from lowtide.studies.leak.series import series_of
from lowtide.studies.leak.study import audits_of, collecting
from lowtide.studies.leak.trend import Series, finite, trend
from lowtide.studies.leak.watch import Module, Progress, Run, Watch, Watched

RISK: Final = 0.01
"""Probability of a wrong accusation, over all contrasts together."""
REPEATS: Final = 2
"""Processes per arm."""
KINDS: Final = 10
"""Number of layer types that are examined: the most frequent ones."""
HOLDERS: Final = 16
"""Number of types of containing modules that are examined; a type counts once for each depth."""
MOST: Final = 0.6
"""A group of layers causes the growth if more than this share disappears without it, and does not if less than the remaining
share does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmGrowth:
    """One arm's growth.

    Attributes:
        name: the last part that it has (``loop``, ``forward``, ...), or what is done to layers.
        rate: growth in bytes per step.
        error: standard error of the rate, over processes and within each.
        curve: bytes after each step of the first process, less its first value.
    """

    name: str
    rate: float
    error: float
    curve: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What one component adds to the growth.

    Attributes:
        component: a part, or a type of module.
        kind: ``part``, ``layers``, or ``modules`` for modules that contain others.
        change: bytes per step.
        low, high: bounds on the change, which hold for all contrasts together.
    """

    component: str
    kind: str
    change: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The result of an ablation.

    Attributes:
        arms: the arms in the order in which they ran.
        contrasts: contrasts of parts, then of layers and modules.
        culprit: the component that grows: a part, a type of module, a layer or module by its path, or ``interaction`` for
            several types that grow only together. Empty if no part certainly grows.
        text: the result in a sentence.
        counter: the counter that was measured (``verdict.Counter``): all that is held, or the counter that leaks.
    """

    arms: tuple[ArmGrowth, ...]
    contrasts: tuple[Contrast, ...]
    culprit: str
    text: str
    counter: str = "held"

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes per step."""
        return {
            "culprit": self.culprit,
            "text": self.text,
            "counter": self.counter,
            "arms": [{"name": a.name, "bytes_per_step": a.rate, "error_bytes": finite(a.error)} for a in self.arms],
            "contrasts": [
                {
                    "component": c.component,
                    "kind": c.kind,
                    "bytes_per_step": c.change,
                    "interval_bytes": [finite(c.low), finite(c.high)],
                }
                for c in self.contrasts
            ],
        }


class Failed(Exception):
    """An arm did not run, or not for long enough."""


def ablate(
    command: Sequence[str],
    watch: Watch,
    *,
    tolerance: float,
    counter: str = "held",
    repeats: int = REPEATS,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Run the arms of a script that uses torch, or Keras on TensorFlow.

    Growth outside of what is held (on a CUDA device, in child processes) is measured by its own counter: measured by what is
    held, the arms would acquit every part.

    Args:
        command: the script's command.
        watch: how each process is watched.
        tolerance: bytes per step that do not count as growth.
        counter: the counter that grows, as a verdict names it.
        repeats: processes per arm.
        environment: the environment of the processes; None for this process's own.
        progress: receives arms and steps.

    Raises:
        Failed: if the script does not run with parts switched off, ends too early, or calls no module.
    """
    counter = "held" if counter in ("heap", "python") else counter
    bench = _Bench(command, watch, tolerance, counter, repeats, environment, progress or Progress())
    arms = [bench.arm(PARTS[k], parts=PARTS[: k + 1]) for k in range(len(PARTS))]
    if not bench.modules:
        raise Failed("the script calls no torch module and no Keras model on TensorFlow: there are no parts to switch off")
    whole, kinds = arms[-1], _kinds([m for m in bench.modules if not m.holds])
    count = len(PARTS) + 2 * len(kinds)
    contrasts = [_contrast(arms[0].name, "part", None, arms[0], count)]
    contrasts += [_contrast(b.name, "part", a, b, count) for a, b in itertools.pairwise(arms)]
    guilty = [c for c in contrasts if c.low > tolerance]
    if not guilty:
        doubt = whole.rate + 3 * whole.error > tolerance
        text = "no culprit: no part certainly grows above the tolerance" if doubt else "no culprit: nothing grows"
        return Ablation(arms=tuple(arms), contrasts=tuple(contrasts), culprit="", text=text, counter=counter)
    worst = max(guilty, key=lambda c: c.change)
    named = {"loop": "the loop itself (data, loss, the script's own code)"}.get(worst.component, worst.component)
    text = f"{named} grows by {worst.change / 1024:.1f} KiB a step"
    culprit = worst.component
    if worst.component in ("forward", "backward"):
        found, (culprit, text) = _layers(bench, whole, kinds, worst, count, arms)
        contrasts += found
    others = [c.component for c in guilty if c is not worst]
    if others:
        text += f"; {', '.join(others)} also grow{'s' if len(others) == 1 else ''}"
    return Ablation(arms=tuple(arms), contrasts=tuple(contrasts), culprit=culprit, text=text, counter=counter)


def _kinds(modules: Sequence[Module]) -> list[str]:
    """Types of modules, the most frequent first."""
    return [kind for kind, _ in Counter(m.type for m in modules).most_common(KINDS)]


def _layers(
    bench: _Bench, whole: ArmGrowth, kinds: Sequence[str], worst: Contrast, count: int, arms: list[ArmGrowth]
) -> tuple[list[Contrast], tuple[str, str]]:
    """Find the layers that make a forward or backward grow, by type, then one by one.

    Returns contrasts, and the culprit with its sentence.
    """
    found, guilty = [], []
    for kind in kinds:
        paths = [m.path for m in bench.modules if m.type == kind and not m.holds]
        none = bench.arm(f"no {kind}", stub=paths)
        double = bench.arm(f"{kind} twice", twice=[kind])
        arms += [none, double]
        found.append(_dose(kind, none, double, count))
        responds = double.rate - whole.rate > found[-1].change / 2  # otherwise other code keeps its output, once per step
        if responds and _has(found[-1], worst, bench.tolerance):
            guilty.append(found[-1])
    if not guilty:
        more, told = _holders(bench, whole, worst, count, arms, found)
        return found + more, told
    best = max(guilty, key=lambda c: c.change)
    if len(guilty) > 1 and sorted(c.change for c in guilty)[-2] > MOST * best.change:
        names = " and ".join(c.component for c in sorted(guilty, key=lambda c: -c.change)[:3])
        return found, ("interaction", f"the {worst.component} grows with {names} together: something else keeps their outputs")
    paths = [m.path for m in bench.modules if m.type == best.component and not m.holds]
    return found, _one_of(bench, whole, best, paths, arms, "layer")


def _open(contrast: Contrast, worst: Contrast, tolerance: float) -> bool:
    """Whether it is open if modules of a type cause the growth: the bounds allow both."""
    return contrast.low <= tolerance / 2 and contrast.high > worst.change * (1 - MOST)


def _has(contrast: Contrast, worst: Contrast, tolerance: float) -> bool:
    """Whether modules of a type cause the growth of the part under examination."""
    return contrast.low > tolerance / 2 and contrast.change > worst.change * (1 - MOST)


def _holders(
    bench: _Bench, whole: ArmGrowth, worst: Contrast, count: int, arms: list[ArmGrowth], layers: Sequence[Contrast]
) -> tuple[list[Contrast], tuple[str, str]]:
    """If no layer grows, find the containing module that grows in its own code.

    Types are examined depth by depth, from the innermost outwards. Switching a module off also switches off the modules inside
    it, but these were examined before. The answer that no module grows is only given if all were examined and noise leaves
    none of them open. Returns contrasts, and the culprit with its sentence.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    for m in sorted((m for m in bench.modules if m.holds and m.name), key=lambda m: -m.depth):
        groups.setdefault((m.depth, m.type), []).append(m.path)
    found = []
    for (_, kind), paths in itertools.islice(groups.items(), HOLDERS):
        none = bench.arm(f"no {kind}, {len(paths)} of them" if len(paths) > 1 else f"no {paths[0]}", stub=paths)
        arms.append(none)
        found.append(_contrast(kind, "modules", none, whole, count + min(HOLDERS, len(groups))))
        if _has(found[-1], worst, bench.tolerance):
            return found, _one_of(bench, whole, found[-1], paths, arms, "module")
    left = sorted({m.type for m in bench.modules if m.name or not m.holds} - {c.component for c in (*layers, *found)})
    unsure = [c.component for c in (*layers, *found) if _open(c, worst, bench.tolerance)]
    if left or unsure:
        why = f"{', '.join(unsure)} may be the cause or not" if unsure else f"not all were tested ({', '.join(left[:3])})"
        return found, (worst.component, f"the {worst.component} grows; whether a module of the model causes it is open: {why}")
    models = " or ".join(dict.fromkeys(m.type for m in bench.modules if m.holds and not m.name))
    where = f"the forward of {models} itself" if models and worst.component == "forward" else "code around the modules"
    return found, (worst.component, f"the {worst.component} grows, but no module of the model does: the cause is {where}")


def _one_of(
    bench: _Bench, whole: ArmGrowth, best: Contrast, paths: Sequence[str], arms: list[ArmGrowth], what: str
) -> tuple[str, str]:
    """Find the one module of a type that grows, by bisection; returns the culprit and its sentence."""
    while len(paths) > 1:
        half = paths[: len(paths) // 2]
        arm = bench.arm(f"without {half[0]} .. {half[-1]}" if len(half) > 1 else f"without {half[0]}", stub=half, repeats=1)
        arms.append(arm)
        gone = whole.rate - arm.rate
        if gone > MOST * best.change:
            paths = half
        elif gone < (1 - MOST) * best.change:
            paths = paths[len(half) :]
        else:
            return best.component, f"{best.component} {what}s grow by {best.change / 1024:.1f} KiB a step: several of them"
    return paths[0], f"{what} {paths[0]} ({best.component}) grows by {best.change / 1024:.1f} KiB a step"


def _contrast(component: str, kind: str, before: ArmGrowth | None, after: ArmGrowth, count: int) -> Contrast:
    change = after.rate - (before.rate if before is not None else 0.0)
    error = math.hypot(after.error, before.error if before is not None else 0.0)
    return _bounded(component, kind, change, error, count)


def _dose(kind: str, none: ArmGrowth, double: ArmGrowth, count: int) -> Contrast:
    """Growth per unit of a layer type's work: half the difference between twice its work and none of it."""
    change, error = (double.rate - none.rate) / 2, math.hypot(none.error, double.error) / 2
    return _bounded(kind, "layers", change, error, count)


def _bounded(component: str, kind: str, change: float, error: float, count: int) -> Contrast:
    """A contrast whose bounds hold for ``count`` contrasts together."""
    reach = float(stats.norm.ppf(1 - RISK / count)) * error
    return Contrast(component=component, kind=kind, change=change, low=change - reach, high=change + reach)


class _Bench:
    """Runs the arms."""

    def __init__(
        self,
        command: Sequence[str],
        watch: Watch,
        tolerance: float,
        counter: str,
        repeats: int,
        environment: Mapping[str, str] | None,
        progress: Progress,
    ) -> None:
        self._command, self._repeats, self._environment, self._progress = command, repeats, environment, progress
        self._watch = collecting(replace(watch, audits=watch.audits or audits_of(watch.steps)))
        self.tolerance, self._counter = tolerance, counter
        self.modules: tuple[Module, ...] = ()

    def arm(
        self, name: str, *, parts: Sequence[str] = PARTS, stub: Sequence[str] = (), twice: Sequence[str] = (), repeats: int = 0
    ) -> ArmGrowth:
        """Run one arm and measure its growth.

        Args:
            name: what it is called in messages.
            parts: the parts that stay on.
            stub: paths of modules that are switched off.
            twice: types of layers whose work is doubled.
            repeats: number of processes; 0 for the bench's default.

        Raises:
            Failed: if a process fails or ends too early.
        """
        task: dict[str, Any] = {"parts": list(parts), "stub": list(stub), "twice": list(twice)}
        runs = []
        self._progress.arm(name)
        for _ in range(repeats or self._repeats):
            with Watched(self._command, replace(self._watch, arm=task), environment=self._environment) as process:
                run = process.wait(self._progress)
            if run.code or not run.steps:
                raise Failed(f"the run {name!r} ended with exit code {run.code} after {run.steps} steps:\n{run.tail}")
            self.modules = self.modules or run.modules
            runs.append(run)
        return _measured(name, runs, self.tolerance, self._counter, self._watch.collect_every)


def _measured(name: str, runs: Sequence[Run], tolerance: float, counter: str, collected_every: int) -> ArmGrowth:
    """The growth of an arm over its processes, from the steps after which garbage was collected.

    Raises:
        Failed: if a process ended too early to tell. Otherwise a part whose growth is not seen would count as one that does
            not grow.
    """
    held = [_series(run, counter, collected_every) for run in runs]
    trends = [trend(values, tolerance) for values in held]
    if not all(math.isfinite(t.error) for t in trends):
        steps = min(run.steps for run in runs)
        raise Failed(f"the run {name!r} ended after {steps} steps: too few to say whether it grows")
    rates = np.array([t.rate for t in trends])
    within = max(t.error for t in trends)
    between = float(rates.std(ddof=1)) if len(rates) > 1 else 0.0
    error = max(within, between) / math.sqrt(len(rates))
    curve = held[0] - held[0][np.isfinite(held[0])][0]
    return ArmGrowth(name=name, rate=float(rates.mean()), error=max(error, FLOOR), curve=curve)


def _series(run: Run, counter: str, collected_every: int) -> Series:
    """A counter of a process; zeros if an arm lacks it because it starts no child process, or uses no device."""
    found = series_of(run, collected_every=collected_every)
    return found.get(counter, np.zeros(run.steps)) if counter in ABLE_TO_LACK else found[counter]


ABLE_TO_LACK: Final = ("workers", "cuda_allocated", "cuda_reserved")
"""Counters that a process may lack."""
FLOOR: Final = 16.0
"""Minimum standard error of an arm's rate, in bytes per step: runs of one program differ by as much."""
