"""Plan files: converts a unit's decisions from values to sites and back, so that they can be saved and shared."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lowtide.base.errors import PlanFileError
from lowtide.base.files import write_file
from lowtide.base.trace import Op, Trace
from lowtide.planning.unit.problem import Action, Away, Key, Problem
from lowtide.planning.unit.solve import Solution

FORMAT = 1
"""Version of the plan file."""


class Choice(msgspec.Struct, frozen=True):
    """One decision, by site.

    Attributes:
        module, op, nth, slot: identify the value: the slot-th fresh storage of the nth run of an operator in a module.
        gap: index of the value's gap.
        action: ``recompute`` or ``move``.
        until: event from which on a rematerialized value is held.
    """

    module: str
    op: str
    nth: int
    slot: int
    gap: int
    action: Action
    until: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions by site, for a file or for another rank."""

    format: int = FORMAT
    fingerprint: int
    budget_bytes: int
    choices: tuple[Choice, ...]


def fingerprint(trace: Trace) -> int:
    """A checksum (CRC-32) of a recording's events, equal for recordings whose events agree one by one."""
    import zlib

    text = "\n".join(
        f"{e.site} {e.reads} {e.writes} {e.overwrites}" if isinstance(e, Op) else f"need {e.value}" for e in trace.events
    )
    return zlib.crc32(text.encode())


def plan_of(problem: Problem, solution: Solution) -> Plan:
    """The plan with a solution's decisions by site."""
    choices = []
    for (v, gap), away in solution.state.decisions.items() if solution.state is not None else ():
        site, slot = problem.maker(v).site, problem.trace.buffers[v].slot
        choices.append(Choice(site.module, site.op, site.nth, slot, gap, away.action, away.until))
    return Plan(fingerprint=fingerprint(problem.trace), budget_bytes=solution.budget_bytes, choices=tuple(choices))


def decisions_of(problem: Problem, plan: Plan) -> dict[Key, Away]:
    """A plan's decisions for the values of a recording with the same fingerprint."""
    where = {}
    for v, buffer in enumerate(problem.trace.buffers):
        if buffer.born >= 0:
            site = problem.maker(v).site
            where[site.module, site.op, site.nth, buffer.slot] = v
    found: dict[Key, Away] = {}
    for c in plan.choices:
        value = where.get((c.module, c.op, c.nth, c.slot))
        if value is not None:
            found[value, c.gap] = Away(c.action, c.until)
    return found


def dropped_sites(plan: Plan) -> frozenset[tuple[str, str, int, int]]:
    """(module, op, nth, slot) of every value that the plan drops and recomputes."""
    return frozenset((c.module, c.op, c.nth, c.slot) for c in plan.choices if c.action == Action.RECOMPUTE)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan file (JSON).

    Raises:
        OSError: if the file cannot be written; names the file.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(plan), indent=1))


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: if the file cannot be read, or is not a plan of this version.
    """
    try:
        plan: Plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise PlanFileError(f"cannot read the plan {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise PlanFileError(f"{path} is not a plan written by --save-plan: {error}") from None
    if plan.format != FORMAT:
        raise PlanFileError(f"{path} has plan format {plan.format}, not {FORMAT}: write a new one with --save-plan")
    return plan
