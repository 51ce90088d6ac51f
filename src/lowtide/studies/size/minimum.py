"""The smallest budget that works, shown by runs that are capped for real.

The search starts from the lowest peak that a plan reaches on a recording of the script, not from bisection in the dark: most
often that budget passes, and one per cent less fails, so that two runs are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lowtide.base.lever_catalogue import LEVERS
from lowtide.studies.size.trial import TrialRequest, TrialResult

CLOSE: Final = 0.01
"""A budget that fails is within this share of the one that passes."""
MOST_RUNS: Final = 10
"""Of one search, the recording included."""
PROBE: Final = 0.92
"""Of the plain peak: the budget under which the recording is made. Below the plain peak, so that a plan is looked for."""
STEPS: Final = 6
"""Of one run: two that are recorded, the others by the plan."""
SURVIVES: Final = 50
"""Steps of the last run, at the minimum."""
AS_HIGH: Final = 0.995
"""A step that reaches this share of the highest peak of all is one of those that decide."""
WIDENINGS: Final = (0.01, 0.03, 0.08, 0.2, 0.5)
"""How far a try lies beyond the last, until one passes and one fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumSearch:
    """What a search found.

    Attributes:
        name: of the set of levers.
        allow, without: that set.
        minimum_bytes: the smallest budget that passed; None where none did.
        fails_at_bytes: the largest that failed; None where none did.
        floor_bytes: what no plan of recompute and offload goes below, as proven on the recording.
        runs: all of them, in order.
        survived: the long run at the minimum.
        reason: why there is no minimum, where there is none.
    """

    name: str
    allow: frozenset[str]
    without: frozenset[str]
    minimum_bytes: int | None
    fails_at_bytes: int | None
    floor_bytes: int | None
    runs: tuple[TrialResult, ...]
    survived: TrialResult | None
    reason: str = ""

    @property
    def at_minimum(self) -> TrialResult | None:
        """The run at the smallest budget that passed."""
        return next((r for r in self.runs if r.passes and r.asked.budget_bytes == self.minimum_bytes), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumStudy:
    """What ``lowtide min`` found of one script.

    Attributes:
        script: its path.
        plain: the run without a budget.
        sets: what the search found with each set of levers, in the order in which they were tried.
        declined: levers that cannot be used on this script, and why.
    """

    script: str
    plain: TrialResult
    sets: tuple[MinimumSearch, ...]
    declined: Mapping[str, str]

    @property
    def least(self) -> MinimumSearch | None:
        """The set of levers that needs least, of two that need the same the one with fewer levers; None where none works."""
        found = (f for f in self.sets if f.minimum_bytes is not None)
        return min(found, key=lambda f: f.minimum_bytes or 0, default=None)

    @property
    def curve(self) -> list[tuple[str, list[tuple[int, float]]]]:
        """Points of the curve for each set of levers: (budget, seconds of a step).

        A run without a cap at its budget may have crossed it, so only runs that stayed within are points.
        """
        lines = []
        if self.plain.step_seconds:
            lines.append(("plain", [(self.plain.peak_bytes, self.plain.step_seconds)]))
        for f in self.sets:
            within = {
                r.asked.budget_bytes: r.step_seconds for r in f.runs if r.passes and not r.over_bytes and r.asked.budget_bytes
            }
            lines.append((f.name, sorted((budget, seconds) for budget, seconds in within.items() if seconds)))
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverTrials:
    """Levers tried on a script, each alone.

    Attributes:
        plain: the run without a budget.
        without: the run under a budget without levers, which savings are told against.
        runs: the run with each lever, by its name.
    """

    plain: TrialResult
    without: TrialResult
    runs: Mapping[str, TrialResult]

    @property
    def lowest_plan_bytes(self) -> int | None:
        """The lowest plan without levers; None where there is none."""
        return _planned(self.without, "lowest_peak_bytes")

    def is_used(self, name: str) -> bool:
        """Whether the lever did something."""
        ran = self.runs[name]
        return ran.passes and any(x["name"] == name and x["used"] for x in ran.levers)

    def saving_bytes(self, name: str) -> int | None:
        """By how much the plain peak is lower with a lever."""
        return self._saving(name, "baseline_peak_bytes")

    def floor_saving_bytes(self, name: str) -> int | None:
        """By how much the lowest plan is lower with a lever."""
        return self._saving(name, "lowest_peak_bytes")

    def _saving(self, name: str, key: str) -> int | None:
        before, after = _planned(self.without, key), _planned(self.runs[name], key)
        return before - after if before is not None and after is not None and self.is_used(name) else None

    def text(self, name: str) -> str:
        """What the lever did, or why it did nothing."""
        ran = self.runs[name]
        told = next((str(x["text"]) for x in ran.levers if x["name"] == name), "there was nothing for it to do")
        if ran.passes or ran.ended == "refused":  # that the budget of the trial cannot be held says nothing of the lever
            return told
        return ran.message.removeprefix(f"LeverError: {name}: ")


def _planned(ran: TrialResult, key: str) -> int | None:
    return None if ran.plan is None else int(ran.plan[key])


def covering(plain: TrialResult, steps: int) -> int:
    """Steps that a run must have so that it meets the highest of all: an evaluation comes once in many steps.

    Args:
        plain: the plain run, as long as the run that shows the minimum.
        steps: that a run has at least.
    """
    highest = AS_HIGH * plain.peak_bytes
    first = next((i for i, step in enumerate(plain.steps) if step["peak_bytes"] >= highest), 0)
    return max(steps, first + 2)  # what follows a step's update (an evaluation) is over when the next one begins


def lever_sets(allowed: frozenset[str], excluded: frozenset[str]) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """(allow, without) by name: no lever, the exact ones, all that the user allows."""
    exact = frozenset(x.name for x in LEVERS.values() if x.automatic) - excluded
    sets = {"no levers": (frozenset[str](), frozenset(LEVERS))}
    if exact:
        sets["exact levers"] = exact, excluded
    if allowed - exact - excluded:
        sets["all levers"] = (exact | allowed - excluded, excluded)
    return sets


def probed(peak: int, at: Callable[[int], TrialResult]) -> TrialResult:
    """A run whose plan says how low plans get: under a budget below its own plain peak, which levers may have lowered.

    Args:
        peak: of the plain run.
        at: runs the script under a budget, not capped.
    """
    found = at(int(PROBE * peak))
    if found.plan is not None and found.plan["lowest_peak_bytes"] >= found.plan["baseline_peak_bytes"]:
        found = at(int(PROBE * found.plan["baseline_peak_bytes"]))
    return found


def search(
    name: str, allow: frozenset[str], without: frozenset[str], plain: TrialResult,
    run: Callable[[TrialRequest], TrialResult], *, offload: bool, steps: int = STEPS, survives: int = SURVIVES,
) -> MinimumSearch:
    """The smallest budget, with one set of levers.

    Args:
        name: of the set.
        allow: levers that are used.
        without: levers that are not.
        plain: the script's plain run.
        run: runs the script once.
        offload: whether values may be moved.
        steps: of one run.
        survives: steps of the last one.
    """
    runs: list[TrialResult] = []

    def at(budget: int, *, capped: bool = True) -> TrialResult:
        found = run(TrialRequest(
            steps=steps, budget_bytes=budget, cap_bytes=budget if capped else 0, allow=allow, without=without, offload=offload,
        ))
        runs.append(found)
        return found

    probe = probed(plain.peak_bytes, lambda budget: at(budget, capped=False))
    plan = probe.plan
    if plan is None:
        return MinimumSearch(
            name=name, allow=allow, without=without, minimum_bytes=None, fails_at_bytes=None, floor_bytes=None,
            runs=tuple(runs), survived=None, reason=f"no plan was made: {probe.message or probe.ended}",
        )
    low, high = _bracket(int(plan["lowest_peak_bytes"]), plain.peak_bytes, at, runs)
    while high is not None and low is not None and low < (1 - CLOSE) * high and len(runs) < MOST_RUNS:
        middle = max(int((low * high) ** 0.5), int((1 - CLOSE) * high) if low > (1 - 2 * CLOSE) * high else 0)
        low, high = (low, middle) if at(middle).passes else (middle, high)
    survived = None
    while high is not None and survives:
        survived = run(TrialRequest(
            steps=survives, budget_bytes=high, cap_bytes=high, allow=allow, without=without, offload=offload,
        ))
        if not survived.lacks_memory or len(runs) >= MOST_RUNS:
            break
        low, high = high, int(high * (1 + CLOSE))
        runs.append(survived)
    return MinimumSearch(
        name=name,
        allow=allow,
        without=without,
        minimum_bytes=high,
        fails_at_bytes=low,
        floor_bytes=int(plan["bound"]["peak_bytes"]),
        runs=tuple(runs),
        survived=survived,
        reason="" if high is not None else "no budget that was tried passed",
    )


def _bracket(
    start: int, most: int, at: Callable[[int], TrialResult], runs: list[TrialResult]
) -> tuple[int | None, int | None]:
    """The nearest budgets (fails, passes) around a first guess."""
    low: int | None = None
    high: int | None = None
    budget = start
    for further in (0.0, *WIDENINGS):
        if len(runs) >= MOST_RUNS:
            break
        if further:
            budget = int(high * (1 - further)) if high is not None else int(budget * (1 + further))
        if further == WIDENINGS[-1] and high is None:
            budget = max(budget, most)  # the plain peak is enough, however far off the first guess was
        if at(budget).passes:
            if low is not None:
                return low, budget
            high = budget
        else:
            if high is not None:
                return budget, high
            low = budget
        if low is not None and low > 2 * most:
            break
    return low, high
