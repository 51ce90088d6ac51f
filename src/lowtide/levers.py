"""What would lower a recorded step's peak beyond recomputing and moving, played on its graph; said, not yet done."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.advise import CHUNKS, loss_block
from lowtide.allowed import LOSS, UPDATE
from lowtide.explain import Step
from lowtide.finding import Case
from lowtide.pebble.graph import Graph
from lowtide.pebble.referee import play
from lowtide.pebble.schedule import Act, Move, Row, plain_row, unfold
from lowtide.stepgraph import graph_of, operator_of
from lowtide.store import PHASES
from lowtide.trace import Phase
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change of the step.

    Attributes:
        id: a name for programs.
        text: what it is, for people.
        peak_bytes: of the changed step, without any plan.
        saving_bytes: below the recorded step's peak.
    """

    id: str
    text: str
    peak_bytes: int
    saving_bytes: int


def levers(step: Step) -> list[Lever]:
    """Those that lower the peak."""
    return [*_update(step), *_loss(step)]


def _loss(step: Step) -> list[Lever]:
    """The loss in pieces: its blocks as large as one piece."""
    return [
        Lever(
            id=LOSS,
            text=f"the loss in {CHUNKS} pieces (--allow {LOSS}): peak {format_bytes(found.changed_peak_bytes)}, "
            f"{format_bytes(found.saving_bytes)} less",
            peak_bytes=found.changed_peak_bytes,
            saving_bytes=found.saving_bytes,
        )
        for found in loss_block(Case([step], step))
        if found.saving_bytes
    ]


def _update(step: Step) -> list[Lever]:
    plain = graph_of(step)
    given = play(plain, unfold(plain, plain_row(plain))).peak_bytes
    freed = graph_of(step, gradients_held=False)
    peak = play(freed, unfold(freed, updates_at_once(step, freed))).peak_bytes
    if peak >= given:
        return []
    text = (
        f"every parameter updated as soon as its gradient is whole, the gradient let go at once (optimizer step in backward): "
        f"peak {format_bytes(peak)} in place of {format_bytes(given)}"
    )
    return [Lever(id=UPDATE, text=text, peak_bytes=peak, saving_bytes=given - peak)]


def updates_at_once(step: Step, graph: Graph) -> Row:
    """The given order, but for the optimizer's operators, each of which runs as soon as it can.

    It can when what it reads is there and everybody else has read what it overwrites.
    """
    phase = PHASES.index(Phase.OPTIMIZER)
    operators = operator_of(graph)
    row = [m.node for m in plain_row(graph)]
    late = {v for v in row if v in operators and step.entries["phase"][step.ops[operators[v]]] == phase}
    leader = {u: v for v in row for u in (v, *graph.members[v])}
    needs = {v: {leader[p] for p in graph.reads[v] if p in leader} for v in row}
    for v in late:
        for old in graph.olds[v]:
            needs[v] |= {r for r in graph.children[old] if r != v and r in needs and (r not in late or r < v)}
    waiting = {v: set(n) for v, n in needs.items() if v in late}
    unlocks: dict[int, list[int]] = {}
    for v, before in waiting.items():
        for p in before:
            unlocks.setdefault(p, []).append(v)
    out: list[int] = []
    ready: list[int] = []

    def run(v: int) -> None:
        out.append(v)
        for u in unlocks.get(v, ()):
            waiting[u].discard(v)
            if not waiting[u]:
                ready.append(u)

    for v in row:
        if v not in late:
            run(v)
        elif not needs[v]:
            ready.append(v)
        while ready:
            ready.sort(reverse=True)
            run(ready.pop())
    return tuple(Move(Act.COMPUTE, v) for v in out)
