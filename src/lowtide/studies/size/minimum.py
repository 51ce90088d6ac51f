"""Finds the smallest budget that works, shown by real runs with a capped allocator.

The search does not bisect blindly, but starts from the lowest peak that a plan reaches on a recording of the script. Mostly
that budget passes and one that is 1 % smaller fails, so that two runs are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lowtide.base.lever_catalogue import LEVERS
from lowtide.studies.size.trial import TrialRequest, TrialResult

CLOSE: Final = 0.01
"""The search ends when a budget fails that is within this share of one that passes."""
MOST_RUNS: Final = 10
"""Maximum number of runs of one search, including the run that is recorded."""
PROBE: Final = 0.92
"""Budget of the run that is recorded, as a share of the plain peak. It is below the plain peak so that a plan is made."""
STEPS: Final = 6
"""Steps of one run: two that are recorded, the others by the plan."""
SURVIVES: Final = 50
"""Steps of the last run, at the minimum."""
AS_HIGH: Final = 0.995
"""A step that reaches this share of the highest peak is one of those that decide whether a budget works."""
WIDENINGS: Final = (0.01, 0.03, 0.08, 0.2, 0.5)
"""How far each try goes beyond the last one, as a share of it, until one budget has passed and one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumSearch:
    """The result of a search with one set of levers.

    Attributes:
        name: name of the set of levers.
        allow, without: the levers that may and must not be used.
        minimum_bytes: the smallest budget that passed; None if none did.
        fails_at_bytes: the largest budget that failed; None if none did.
        floor_bytes: peak that no plan of recompute and offload goes below, as proven on the recording; None without a plan.
        runs: all runs of the search, in order.
        survived: the long run at the minimum; None if there was none.
        reason: why there is no minimum; empty if there is one.
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
    """The findings of ``lowtide min`` for one script.

    Attributes:
        script: path of the script.
        plain: the run without a budget.
        sets: the result of the search with each set of levers, in the order in which the sets were tried.
        declined: levers that cannot be used on this script, and why.
    """

    script: str
    plain: TrialResult
    sets: tuple[MinimumSearch, ...]
    declined: Mapping[str, str]

    @property
    def least(self) -> MinimumSearch | None:
        """The set with the smallest minimum, and of equal ones the one with the fewest levers; None if none works."""
        found = (f for f in self.sets if f.minimum_bytes is not None)
        return min(found, key=lambda f: f.minimum_bytes or 0, default=None)

    @property
    def curve(self) -> list[tuple[str, list[tuple[int, float]]]]:
        """Points (budget in bytes, seconds of a step) of a curve for the plain run and for each set of levers.

        A run whose allocator was not capped at its budget may have crossed it, so only runs that stayed within are points.
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
        without: the run under a budget without levers, against which savings are computed.
        runs: the run with each lever, by name.
    """

    plain: TrialResult
    without: TrialResult
    runs: Mapping[str, TrialResult]

    @property
    def lowest_plan_bytes(self) -> int | None:
        """Peak of the lowest plan without levers; None if there is none."""
        return _planned(self.without, "lowest_peak_bytes")

    def is_used(self, name: str) -> bool:
        """Whether the lever changed how anything ran."""
        ran = self.runs[name]
        return ran.passes and any(x["name"] == name and x["used"] for x in ran.levers)

    def saving_bytes(self, name: str) -> int | None:
        """Bytes by which a lever lowers the plain peak; None if it was not used or there is no plan."""
        return self._saving(name, "baseline_peak_bytes")

    def floor_saving_bytes(self, name: str) -> int | None:
        """Bytes by which a lever lowers the peak of the lowest plan; None if it was not used or there is no plan."""
        return self._saving(name, "lowest_peak_bytes")

    def _saving(self, name: str, key: str) -> int | None:
        before, after = _planned(self.without, key), _planned(self.runs[name], key)
        return before - after if before is not None and after is not None and self.is_used(name) else None

    def text(self, name: str) -> str:
        """What the lever did, or why it did nothing."""
        ran = self.runs[name]
        told = next((str(x["text"]) for x in ran.levers if x["name"] == name), "it had nothing to do")
        if ran.passes or ran.ended == "refused":  # a trial budget that cannot be held says nothing about the lever
            return told
        return ran.message.removeprefix(f"LeverError: {name}: ")


def _planned(ran: TrialResult, key: str) -> int | None:
    return None if ran.plan is None else int(ran.plan[key])


def covering(plain: TrialResult, steps: int) -> int:
    """Number of steps that a run needs to reach the highest one: an evaluation may come only once in many steps.

    Args:
        plain: the plain run, as long as the run that shows the minimum.
        steps: minimum number of steps of a run.
    """
    highest = AS_HIGH * plain.peak_bytes
    first = next((i for i, step in enumerate(plain.steps) if step["peak_bytes"] >= highest), 0)
    return max(steps, first + 2)  # what follows a step's update (an evaluation) is only over when the next step begins


def lever_sets(allowed: frozenset[str], excluded: frozenset[str]) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """The sets of levers to try, as (allow, without) by name: none, the automatic (exact) ones, all that the user allows."""
    exact = frozenset(x.name for x in LEVERS.values() if x.automatic) - excluded
    sets = {"no levers": (frozenset[str](), frozenset(LEVERS))}
    if exact:
        sets["exact levers"] = exact, excluded
    if allowed - exact - excluded:
        sets["all levers"] = (exact | allowed - excluded, excluded)
    return sets


def probed(peak: int, at: Callable[[int], TrialResult]) -> TrialResult:
    """Run the script with a plan, which shows how low plans get.

    The budget must lie below the run's own plain peak. If levers lowered that peak too far, a second run has a lower budget.

    Args:
        peak: peak of the plain run, in bytes.
        at: runs the script under a budget, without a cap.
    """
    found = at(int(PROBE * peak))
    if found.plan is not None and found.plan["lowest_peak_bytes"] >= found.plan["baseline_peak_bytes"]:
        found = at(int(PROBE * found.plan["baseline_peak_bytes"]))
    return found


def search(
    name: str, allow: frozenset[str], without: frozenset[str], plain: TrialResult,
    run: Callable[[TrialRequest], TrialResult], *, offload: bool, steps: int = STEPS, survives: int = SURVIVES,
) -> MinimumSearch:
    """Search for the smallest budget with one set of levers.

    Args:
        name: name of the set.
        allow: levers that may be used.
        without: levers that must not be used.
        plain: the script's plain run.
        run: runs the script once.
        offload: whether values may be offloaded.
        steps: number of steps of one run.
        survives: number of steps of the last run, at the minimum; 0 for no such run.
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
        reason="" if high is not None else "none of the budgets tried passed",
    )


def _bracket(
    start: int, most: int, at: Callable[[int], TrialResult], runs: list[TrialResult]
) -> tuple[int | None, int | None]:
    """Bracket the minimum, starting from a first guess.

    Args:
        start: the first budget to try.
        most: the plain peak.
        at: runs the script under a budget.
        runs: all runs so far; there are at most :data:`MOST_RUNS`.

    Returns:
        The largest budget that failed and the smallest that passed; None for one that was not found.
    """
    low: int | None = None
    high: int | None = None
    budget = start
    for further in (0.0, *WIDENINGS):
        if len(runs) >= MOST_RUNS:
            break
        if further:
            budget = int(high * (1 - further)) if high is not None else int(budget * (1 + further))
        if further == WIDENINGS[-1] and high is None:
            budget = max(budget, most)  # the plain peak suffices, however far off the first guess was
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
