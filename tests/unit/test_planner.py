"""Plans by site: from a solution to a file and back, and onto a problem again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.base.errors import PlanFileError, UsageError
from lowtide.planning.unit.problem import Action, Away, Bandwidth, Key, Problem
from lowtide.planning.unit.solve import Solution, Status, solve
from lowtide.planning.unit.plan_file import FORMAT, Plan, decisions_of, dropped_sites, fingerprint, load_plan, plan_of, save_plan
from lowtide.base.trace import Buffer, Need, Op, Phase, Save, Site, Trace

LAYERS = 6
SIZE = 1000


def _op(e: int, phase: Phase, reads: tuple[int, ...], write: int) -> Op:
    kind = "relu" if phase is Phase.FORWARD else "back"
    site = Site(f"net.{e // 2}", kind, e % 2)
    return Op(site=site, phase=phase, seconds=1.0, inside_bytes=SIZE, reads=reads, writes=(write,))


def _trace() -> Trace:
    """A chain of saved values, asked for in reverse order, each by an autograd node of one operator."""
    events: list[Op | Need] = [_op(v, Phase.FORWARD, (v,), v + 1) for v in range(LAYERS)]
    buffers = [Buffer(bytes=50, born=-1, slot=0, held_until=99, released=-1, counted=False, movable=False)]
    released = {}
    for v in range(LAYERS, 0, -1):
        e = len(events)
        events.append(Need(value=v, pinned_until=e + 1))
        events.append(_op(e + 1, Phase.BACKWARD, (v,), 2 * LAYERS + 1 - v))
        released[v] = e + 1
    for v in range(1, LAYERS + 1):
        held = min(v, LAYERS - 1)
        buffers.append(Buffer(bytes=SIZE, born=v - 1, slot=0, held_until=held, released=released[v], counted=True,
                              movable=True))  # fmt: skip
    for e, event in enumerate(events):
        if isinstance(event, Op) and event.phase is Phase.BACKWARD:
            buffers.append(Buffer(bytes=SIZE, born=e, slot=0, held_until=min(e + 2, len(events)), released=-1,
                                  counted=True, movable=True))  # fmt: skip
    return Trace(
        base_bytes=SIZE,
        resident_bytes=SIZE,
        events=tuple(events),
        buffers=tuple(buffers),
        saves=tuple(Save(value=v, event=v - 1) for v in range(1, LAYERS + 1)),
        other_bytes=(0,) * len(events),
        spike_bytes=(0,) * len(events),
        backward_event=LAYERS,
    )


def _problem(*, board: bool) -> Problem:
    bandwidth = Bandwidth(write=SIZE * 10, read=SIZE * 10, read_fresh=SIZE * 10) if board else None
    return Problem(trace=_trace(), base_bytes=SIZE, bandwidth=bandwidth)


def _solved(*, board: bool = False) -> tuple[Problem, Solution]:
    problem = _problem(board=board)
    solution = solve(problem, problem.plain_peak - 2 * SIZE)
    assert solution.state is not None
    assert solution.state.decisions
    return problem, solution


def _decisions(solution: Solution) -> dict[Key, Away]:
    assert solution.state is not None
    return solution.state.decisions


@pytest.mark.parametrize("board", [False, True], ids=["recompute", "move"])
def test_decisions_survive_conversion_to_a_plan_and_back(board: bool) -> None:  # noqa: FBT001
    """decisions_of(problem, plan_of(problem, solution)) are the solution's decisions; only a plan with an offload tier moves
    values.
    """
    problem, solution = _solved(board=board)
    plan = plan_of(problem, solution)
    assert decisions_of(problem, plan) == _decisions(solution)
    assert plan.budget_bytes == solution.budget_bytes
    assert plan.format == FORMAT
    actions = {c.action for c in plan.choices}
    assert (Action.MOVE.value in actions) == board


def test_a_plan_file_is_read_back_unchanged(tmp_path: Path) -> None:
    """load_plan(save_plan(plan)) == plan, and its decisions are the same."""
    problem, solution = _solved()
    plan = plan_of(problem, solution)
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert decisions_of(problem, loaded) == _decisions(solution)


def test_a_plan_file_is_json_that_names_modules(tmp_path: Path) -> None:
    """A person can read which operator of which module is dropped."""
    problem, solution = _solved()
    save_plan(plan_of(problem, solution), tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["format"] == FORMAT
    assert {c["module"].split(".")[0] for c in written["choices"]} == {"net"}


def test_dropped_sites_are_those_that_are_recomputed() -> None:
    """Values that are moved (offloaded) are not dropped."""
    for board in (False, True):
        problem, solution = _solved(board=board)
        dropped = {v for (v, _), away in _decisions(solution).items() if away.action is Action.RECOMPUTE}
        sites = {(problem.maker(v).site.module, problem.maker(v).site.op, problem.maker(v).site.nth, 0) for v in dropped}
        assert dropped_sites(plan_of(problem, solution)) == sites


def test_an_infeasible_solution_gives_a_plan_without_choices() -> None:
    """An infeasible answer still makes a plan: it decides nothing."""
    problem = _problem(board=False)
    solution = solve(problem, SIZE)
    assert solution.status is Status.INFEASIBLE
    plan = plan_of(problem, solution)
    assert plan.choices == ()
    assert decisions_of(problem, plan) == {}


def test_choices_at_unknown_sites_are_ignored() -> None:
    """A plan of another model decides nothing here."""
    problem, solution = _solved()
    plan = plan_of(problem, solution)
    other = Plan(fingerprint=0, budget_bytes=1, choices=tuple(
        type(c)("other", c.op, c.nth, c.slot, c.gap, c.action, c.until) for c in plan.choices))  # fmt: skip
    assert decisions_of(problem, other) == {}


def test_fingerprints_tell_recordings_apart() -> None:
    """Equal events have equal fingerprints, whatever their seconds and bytes; another operator or another input changes the
    fingerprint.
    """
    trace = _trace()
    first = trace.events[0]
    assert isinstance(first, Op)
    slower = replace(trace, events=(replace(first, seconds=9.0, inside_bytes=7), *trace.events[1:]))
    renamed = replace(trace, events=(replace(first, site=Site("net.0", "gelu", 0)), *trace.events[1:]))
    rewired = replace(trace, events=(replace(first, reads=()), *trace.events[1:]))
    assert fingerprint(trace) == fingerprint(_trace()) == fingerprint(slower)
    assert len({fingerprint(t) for t in (trace, renamed, rewired)}) == len((trace, renamed, rewired))


GOOD: dict[str, Any] = {"format": FORMAT, "fingerprint": 1, "budget_bytes": 2, "choices": []}
CHOICE = {"module": "net", "op": "relu", "nth": 0, "slot": 0, "gap": 0, "action": "recompute", "until": 0}
BAD = {
    "empty": "",
    "no json": "{",
    "another thing": "[1, 2]",
    "keys missing": json.dumps({"format": FORMAT}),
    "wrong type": json.dumps({**GOOD, "budget_bytes": "much"}),
    "wrong choices": json.dumps({**GOOD, "choices": [{"module": "net"}]}),
    "newer format": json.dumps({**GOOD, "format": FORMAT + 1}),
    "unknown action": json.dumps({**GOOD, "choices": [{**CHOICE, "action": "burn"}]}),
    "not text": "\udcff\udcfe",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_bad_plan_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Whatever is wrong with a plan file, PlanFileError (a UsageError) names the file."""
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanFileError, match="plan.json"):
        load_plan(path)
    assert issubclass(PlanFileError, UsageError)


def test_a_plan_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """A missing file and a folder are refused as plan files."""
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(PlanFileError, match="cannot read the plan"):
            load_plan(path)


def test_a_valid_plan_file_is_read(tmp_path: Path) -> None:
    """The smallest valid plan file."""
    (tmp_path / "plan.json").write_text(json.dumps({**GOOD, "choices": [CHOICE]}))
    assert len(load_plan(tmp_path / "plan.json").choices) == 1
