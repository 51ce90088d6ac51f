"""The floors of the house: who may import whom (DESIGN.md, section 2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from command import TIMEOUT
import pytest

import lowtide

SOURCE = Path(lowtide.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "", "units", "allowed", "tell", "disk", "interrupts", "processes", "scratch", "outputs"),
    (
        "trace", "store", "probe.marks", "probe.counters", "probe.family", "probe.census", "probe.keras_arms", "probe.arms", "probe.sampler", "probe.catalogue", "probe.beat",
        "probe.lend", "probe.site.sitecustomize",
        "checkpoint.sharded", "checkpoint.tree", "checkpoint.ranks", "checkpoint.store", "checkpoint.parts", "checkpoint.batches", "checkpoint.request",
        "checkpoint.points", "checkpoint.whole", "checkpoint.callbacks", "checkpoint",
        "data.sources", "data.blocks", "data.wire", "data.worker", "data.isolate", "data",
    ),
    (
        "pebble.status",
        "pebble.graph",
        "pebble.schedule",
        "pebble.referee",
        "pebble.check_segments",
        "pebble.check",
        "pebble.game",
        "pebble.anneal",
        "pebble.search",
        "pebble.before",
        "pebble.apart",
        "pebble.bound",
        "pebble.windows",
        "pebble.lazy",
        "pebble.checkpoints",
        "pebble.descent",
        "pebble.prefetch",
        "pebble.programs",
        "pebble.classics",
        "pebble.exact",
        "pebble.solve",
        "pebble.segments",
        "pebble.account",
        "pebble.eager.problem",
        "pebble.eager.play",
        "pebble.eager.ahead",
        "pebble.eager.bound",
        "pebble.eager.walk",
        "pebble.eager.relax",
        "pebble.eager.solve",
        "planner",
    ),
    (
        "data.datasets",
        "live.micro",
        "live.ops",
        "live.mode",
        "live.native",
        "live.wraps",
        "live.peak_statistics",
        "live.task",
        "live.enough",
        "live.constants",
        "live.coarse",
        "live.outcome",
        "live.tensors",
        "live.kind",
        "live.heap",
        "live.available",
        "live.board",
        "live.derivatives",
        "live.steps",
        "live.stack",
        "live.origin",
        "live.aside",
        "live.frames",
        "live.numerics",
        "live.bits",
        "live.value",
        "live.unreached",
        "live.replay",
        "live.foresee",
        "live.ledger",
        "live.recorder",
        "live.guard",
        "live.saver",
        "live.patches",
        "live.engine",
        "live.full",
        "live.stopwatch",
        "live.rises",
        "live.lean",
        "live.owed",
        "live.unit",
        "live.recordings",
        "live.resident",
        "live.agree",
        "live.verdict",
        "live.slices",
        "live.single_update",
        "live.update",
        "live.gradients",
        "live.loss",
        "live.logits",
        "live.samples",
        "live.pieces",
        "live.runtime",
        "live.trial",
        "live.watch",
        "live.agent",
    ),
    (
        "explain",
        "finding",
        "stepgraph",
        "leastpeak",
        "precision",
        "advise",
        "earlyupdates",
        "levers",
        "choice",
        "size.vary",
        "size.trial",
        "size.minimum",
        "size.throughput",
        "size.predict",
        "size.fit",
        "size.bundle",
        "leak.watch",
        "leak.trend",
        "leak.verdict",
        "leak.study",
        "leak.books",
        "leak.ablate",
        "leak.findings",
        "sweep.axes",
        "sweep.definition",
        "sweep.results",
        "sweep.cell",
        "sweep.run",
        "sweep.trends",
        "guard.rule",
        "guard.forecast",
        "guard.fence",
        "guard.memory",
        "guard.cause",
        "guard.process",
        "guard.outcome",
        "guard.keep",
        "api",
    ),
    (
        "report.terminal",
        "report.pages",
        "report.recording",
        "report.process",
        "report.html",
        "report.export",
        "report.plan",
        "report.leak",
        "report.sweep",
        "report.guard",
        "report.size",
        "cli.launch",
        "cli.script",
        "cli.run",
        "cli.leak",
        "cli.sweep",
        "cli.guard",
        "cli.minimum",
        "cli.batch",
        "cli.plan",
        "cli.record",
        "cli.report",
        "cli.main",
        "pytest_plugin",
        "start",
        "__main__",
    ),
)
"""Every module, by floor, and on its floor in the order in which it may be imported; ``""`` is the package itself."""

EXCEPTIONS = {("live.agent", "report.terminal"), ("live.agent", "report.recording")}
"""The agent is what a verb's process starts: it reads the verb's task and shows the figures at its end."""

PURE = tuple(name for floor in FLOORS[:3] for name in floor if name)

RANK = {name: rank for rank, name in enumerate(name for floor in FLOORS for name in floor)}


def _at_import_imports(path: Path) -> bool:
    return any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(ast.parse(path.read_text())))


def _modules() -> dict[str, Path]:
    """Every module of the package but import-free sub-package ``__init__`` files, by its name within the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if path.parent == SOURCE or path.name != "__init__.py" or _at_import_imports(path):
            found[name] = path
    return found


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield from _at_import(node.orelse)
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from _at_import(getattr(node, part, []))


def _imports(name: str, path: Path) -> set[str]:
    """Modules of the package that a module imports when it is imported."""
    found: set[str] = set()
    for node in _at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively, line {node.lineno}"
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {full for full in deeper if full.removeprefix("lowtide.") in RANK}
            found |= known or {node.module or ""}
    return {m.removeprefix("lowtide").removeprefix(".") for m in found if m.split(".")[0] == "lowtide"}


MODULES = _modules()


def test_every_module_has_a_floor() -> None:
    """The list above names every module of the package, and no other."""
    assert set(MODULES) == set(RANK)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down_only(name: str) -> None:
    """A module imports from lower floors, or from modules named before it on its own."""
    up = {m for m in _imports(name, MODULES[name]) if RANK.get(m, len(RANK)) >= RANK.get(name, -1)}
    assert {(name, m) for m in up} <= EXCEPTIONS


def test_the_exceptions_are_still_in_use() -> None:
    """An exception whose module no longer needs it is struck off."""
    text = MODULES["live.agent"].read_text()
    assert all(importer == "live.agent" and f"from lowtide.{m} import" in text for importer, m in EXCEPTIONS)


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if n in PURE])
def test_floors_0_to_2_name_no_torch(name: str) -> None:
    """Not even inside a function do the lower floors import torch."""
    nodes = ast.walk(ast.parse(MODULES[name].read_text()))
    named = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    named |= {n.module or "" for n in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(n, ast.ImportFrom)}
    assert not {m for m in named if m.split(".")[0] == "torch"}


def test_floors_0_to_2_import_without_torch() -> None:
    """In a fresh interpreter that has no torch at all, the lower floors import."""
    lines = "\n".join(f"import lowtide.{name}" for name in PURE)
    code = f"import sys\nsys.modules['torch'] = None\n{lines}\nassert sys.modules['torch'] is None"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_does_not_load_torch() -> None:
    """``import lowtide`` and the lower floors leave torch unloaded until it is asked for."""
    lines = "\n".join(f"import lowtide.{name}" for name in PURE)
    code = f"import sys, lowtide\n{lines}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_without_what_only_some_verbs_need() -> None:
    """Statistics, solvers and tables take longer to import than most verbs take for themselves."""
    heavy = ("torch", "scipy", "ruptures", "rich", "jinja2", "pandas", "matplotlib")
    code = f"import sys, lowtide.cli.main\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
