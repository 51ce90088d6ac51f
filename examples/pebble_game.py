"""The pebble game on small graphs: what order and recomputation do to memory. Prints, and writes a page with the pictures.

python examples/pebble_game.py [pebble_game.html]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from lowtide.planning.graph import Graph
from lowtide.planning.graph_arrays import game_of
from lowtide.planning.graph_json import from_json
from lowtide.planning.referee import play
from lowtide.planning.schedule import Act, Row, Schedule, plain_row, unfold
from lowtide.planning.search import classics
from lowtide.planning.search.exhaustive import extreme_order
from lowtide.planning.solver.solve import Order, Solver

PAGE = """<!doctype html><meta charset="utf-8"><title>The pebble game</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 28px; color: #1f2328; max-width: 1100px }
h2 { margin: 26px 0 4px; font-size: 17px } p { margin: 2px 0 8px; color: #556 }
td { width: 22px; height: 22px; text-align: center; padding: 1px }
th { font-weight: 500; text-align: right; padding-right: 8px }
i { display: inline-block; width: 15px; height: 15px; border-radius: 50%; background: #1f6fb2; vertical-align: middle }
i.new { background: #d9822b } td.high { background: #fbe9e7 } td.n { font-size: 11px; color: #778 }
</style>
<h1>The pebble game</h1>
<p>A row is a value, a column a move. A dot is a value in memory, orange where it was just computed; the highest moment is
shaded.</p>
{% for c in cases %}
<h2>{{ c.title }}: {{ c.peak }} units{% if c.moves > c.least %}, {{ c.moves }} moves instead of {{ c.least }}{% endif %}</h2>
<p>{{ c.why }}</p>
<table>{% for name, cells in c.rows %}<tr><th>{{ name }}</th>
{% for x in cells %}<td class="{{ 'high' if loop.index0 == c.at }}">
{%- if x %}<i class="{{ 'new' if x == 2 }}"></i>{% endif %}</td>{% endfor %}</tr>{% endfor %}
<tr><th></th>{% for n in c.counts %}<td class="n">{{ n }}</td>{% endfor %}</tr></table>
{% endfor %}
"""


class Case(NamedTuple):
    """One schedule, drawn."""

    title: str
    why: str
    peak: int
    moves: int
    least: int
    rows: list[tuple[str, list[int]]]
    counts: list[int]
    at: int


def graph(names: str, links: str, **more: dict[str, Any]) -> Graph:
    """Nodes of one unit and one second each; links as ``a>b``."""
    nodes = [{"id": x, "bytes": 1, "seconds": 1, **more.get(x, {})} for x in names.split()]
    pairs = [link.split(">") for link in links.split()]
    return from_json({"nodes": nodes, "links": [{"source": a, "target": b} for a, b in pairs]})


def draw(title: str, why: str, found: Graph, row: Row, schedule: Schedule | None = None) -> Case:
    """Play a schedule and note what is in memory during each computation."""
    schedule = unfold(found, row) if schedule is None else schedule
    timeline = play(found, schedule)
    board: set[int] = set()
    columns: list[tuple[set[int], int]] = []
    counts: list[int] = []
    for t, (act, v) in enumerate(schedule):
        if act is Act.FREE:
            board.discard(v)
            continue
        board -= set(found.olds[v]) if act is Act.UPDATE else set()
        board.add(v)
        columns.append((set(board), v))
        counts.append(int(timeline.bytes_at[t]))
    rows = [(str(n.id), [2 if v == new else int(v in there) for there, new in columns]) for v, n in enumerate(found.nodes)]
    return Case(title, why, timeline.peak_bytes, len(columns), len(found.nodes), rows, counts, counts.index(max(counts)))


def cases() -> list[Case]:
    """The lessons, in order."""
    two = graph("f g f+g", "f>f+g g>f+g", **{"f+g": {"overwrites": "f"}})
    three = graph(
        "f g h f+g f+g+h", "f>f+g g>f+g f+g>f+g+h h>f+g+h", **{"f+g": {"overwrites": "f"}, "f+g+h": {"overwrites": "f+g"}}
    )
    ids = {str(n.id): v for v, n in enumerate(three.nodes)}
    early = plain_row(three, [ids[x] for x in ("f", "g", "f+g", "h", "f+g+h")])
    late = plain_row(three, [ids[x] for x in ("f", "g", "h", "f+g", "f+g+h")])
    chain = graph("a b c d e", "a>b b>c c>d d>e")
    keep = tuple(m for m in unfold(chain, plain_row(chain)) if m.act is not Act.FREE)
    tree = graph("a b c d e f r", "a>b b>c d>e e>f c>r f>r a>d", a={"bytes": 1}, b={"bytes": 3}, e={"bytes": 3})
    train = graph(
        "f0 f1 f2 f3 f4 b4 b3 b2 b1",
        "f0>f1 f1>f2 f2>f3 f3>f4 f4>b4 f3>b4 b4>b3 f2>b3 b3>b2 f1>b2 b2>b1 f0>b1",
    )
    solver = Solver(train, order=Order.FIXED)
    found = [
        draw("f + g", "Two operands must be there; the sum takes the place of one.", two, plain_row(two)),
        draw("f + g + h, adding at once", "f + g is added before h is made.", three, early),
        draw("f + g + h, adding late", "All three are made first.", three, late),
        draw("A chain, each value let go", "Two values at a time are enough.", chain, plain_row(chain)),
        draw("A chain, nothing let go", "The worst: every value stays.", chain, plain_row(chain), keep),
        draw(
            "Two branches, best order",
            "One branch is finished before the other begins.",
            tree,
            plain_row(tree, extreme_order(tree)),
        ),
        draw(
            "Two branches, worst order", "Both are half done at once.", tree, plain_row(tree, extreme_order(tree, worst=True))
        ),
        draw("Forward and backward", "Backward reads what forward made, in reverse.", train, plain_row(train)),
    ]
    found += [
        draw(
            f"The same in {budget} units",
            "The cheapest of all schedules: some values are made twice.",
            train,
            solver.at(budget).row,
        )
        for budget in (5, 4, 3)
    ]
    game = game_of(train)
    found.append(
        draw(
            "The same, nothing kept",
            "Every value backward reads is made from the beginning.",
            train,
            game.row(classics.keep_none(game)),
        )
    )
    return found


def main() -> None:
    """Print every case and write the page."""
    shown = cases()
    for c in shown:
        again = f", {c.moves} moves instead of {c.least}" if c.moves > c.least else ""
        print(f"{c.title}: {c.peak} units{again}")
        for name, cells in c.rows:
            print(f"  {name:>6} " + "".join(" .o●"[1 + x] for x in cells))
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "pebble_game.html")
    path.write_text(jinja2.Environment(autoescape=True).from_string(PAGE).render(cases=shown))
    print(f"pictures: {path}")


if __name__ == "__main__":
    main()
