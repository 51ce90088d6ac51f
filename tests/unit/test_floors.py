"""Which package may import which, and where torch may be imported (docs/rooms.py lists the packages in order)."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from command import TIMEOUT
import pytest
from rooms import PACKAGES, RUNTIME, SOURCE, TORCH_FREE, package_of

LONG_FILE_LINES = 400
CLASS_FIELDS, CLASS_METHODS = 20, 30
FOLDER_MODULES = 14
"""How many modules a folder may hold ("about a dozen")."""
ENTRIES = 12
"""How many packages and modules may lie directly below ``lowtide``, ``__init__`` and ``__main__`` aside."""

EXCEPTIONS = {("runtime.agent.main", "report"), ("data", "runtime")}
"""Imports within functions that lead upwards. The agent runs the script of a verb and shows its summary in the end;
``lowtide.data.dataset`` and ``stream`` are classes of torch, loaded when they are asked for."""

RANK = {package: rank for rank, package in enumerate(PACKAGES)}


def _modules() -> dict[str, Path]:
    """Every module by its name within ``lowtide``; a package's ``__init__`` has the package's name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
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


def _names(nodes: Iterator[ast.AST]) -> set[str]:
    """Full names of what is imported; of modules where the name is a module's."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import, line {node.lineno}"
            module = node.module or ""
            deeper = {f"{module}.{alias.name}" for alias in node.names}
            known = {full for full in deeper if full.removeprefix("lowtide.") in MODULES}
            found |= known or {module}
    return found


def _ours(names: set[str]) -> set[str]:
    """Those of this package, without its name in front."""
    return {n.removeprefix("lowtide").removeprefix(".") for n in names if n.split(".")[0] == "lowtide"}


def _imported(name: str) -> set[str]:
    """Modules of this package that a module imports when it is loaded."""
    return _ours(_names(_at_import(ast.parse(MODULES[name].read_text()).body)))


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that a module may run, within functions, too; blocks under TYPE_CHECKING are left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _run(child)


def _imported_anywhere(name: str) -> set[str]:
    """Modules of this package that a module imports when it is loaded, or later within a function."""
    return _ours(_names(_run(ast.parse(MODULES[name].read_text()))))


def test_every_package_is_listed() -> None:
    """The list in docs/rooms.py names every package, and no other."""
    assert {package_of(path) for path in MODULES.values()} == set(PACKAGES)


@pytest.mark.parametrize("name", sorted(n for n in MODULES if n))
def test_imports_only_point_down(name: str) -> None:
    """A module imports only from its own package or from those before it, within functions, too, except for the listed
    exceptions.
    """
    mine = RANK[package_of(MODULES[name])]
    up = {package_of(MODULES[m]) for m in _imported_anywhere(name) if RANK[package_of(MODULES[m])] > mine}
    assert {(name, package) for package in up} <= EXCEPTIONS


@pytest.mark.parametrize("name", [name for name in MODULES if package_of(MODULES[name]) == "report"])
def test_reports_render_without_deriving(name: str) -> None:
    """Modules of `report` are given one value: none opens a recording, lays out its steps, or calls a study, a solver or a
    finder.
    """
    tree = ast.parse(MODULES[name].read_text())
    imported = {
        (node.module.removeprefix("lowtide."), alias.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module for alias in node.names
    }
    assert not [module for module, _ in imported if module in ("recording.reader", "recording.journal", "sqlite3")]
    assert not imported & {
        ("recording.recorded_step", "laid_out"), ("recording.explanation.explanation", "explain"),
        ("recording.peak_report", "peak_report"), ("recording.findings.all_findings", "findings"),
        ("studies.leak.findings", "explain_study"), ("studies.sweep.summary", "summary_of"),
        ("planning.solver.solve", "Solver"), ("planning.solver.figures", "by_module"), ("planning.solver.figures", "decides"),
    }


def test_every_exception_is_still_needed() -> None:
    """An exception that its module no longer needs must be removed from the list."""
    for name, package in EXCEPTIONS:
        assert package in {package_of(MODULES[m]) for m in _imported_anywhere(name)}


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    """No module needs itself to be loaded, directly or through others."""
    graphlib.TopologicalSorter({name: _imported(name) - {name} for name in MODULES if name}).prepare()


def test_folders_hold_at_most_a_dozen_modules() -> None:
    """A package has at most `FOLDER_MODULES` modules, and `lowtide` itself at most `ENTRIES` entries, so that a reader finds
    one at a glance.
    """
    below = [p for p in SOURCE.iterdir() if (p.is_dir() and (p / "__init__.py").exists()) or p.suffix == ".py"]
    assert len([p for p in below if not p.stem.startswith("__")]) <= ENTRIES
    for package in PACKAGES:
        held = [p for p in MODULES.values() if package_of(p) == package and p.name != "__init__.py"]
        assert len(held) <= FOLDER_MODULES, package


@pytest.mark.parametrize("file", [p for p in sorted(SOURCE.rglob("*")) if p.suffix in (".py", ".c")], ids=str)
def test_a_long_file_says_why_it_is_one_file(file: Path) -> None:
    """A file of more than `LONG_FILE_LINES` lines has a sentence that begins with "One module" or "One file"."""
    text = file.read_text()
    beginning = text[: text.find("*/")] if file.suffix == ".c" else ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= LONG_FILE_LINES or re.search(r"^[ *]*One (module|file)\b", beginning, re.MULTILINE)


def _size(kind: ast.ClassDef) -> tuple[int, int]:
    """Number of fields and of methods of a class; fields are those that it declares or sets in ``__init__``."""
    methods = [n for n in kind.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    fields = {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    fields |= {
        node.attr
        for method in methods if method.name == "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return len(fields), len(methods)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_large_class_says_why_it_is_large(name: str) -> None:
    """A class with more than `CLASS_FIELDS` fields or `CLASS_METHODS` methods has a sentence that contains "Its many"."""
    for kind in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(kind, ast.ClassDef):
            fields, methods = _size(kind)
            large = fields > CLASS_FIELDS or methods > CLASS_METHODS
            assert not large or "Its many" in (ast.get_docstring(kind) or ""), (kind.name, fields, methods)


def test_the_module_table_is_up_to_date() -> None:
    """The table of modules in docs/architecture.md equals what docs/rooms.py would write."""
    done = subprocess.run(
        [sys.executable, SOURCE.parent.parent / "docs" / "rooms.py", "--check"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if package_of(MODULES[n]) in TORCH_FREE])
def test_torch_free_packages_never_import_torch(name: str) -> None:
    """They do not import torch, not even inside a function."""
    assert not {n for n in _names(ast.walk(ast.parse(MODULES[name].read_text()))) if n.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if package_of(MODULES[n]) not in RUNTIME])
def test_only_the_runtime_imports_torch_at_load_time(name: str) -> None:
    """Other packages import torch inside functions at most."""
    nodes = _at_import(ast.parse(MODULES[name].read_text()).body)
    assert not {n for n in _names(nodes) if n.split(".")[0] == "torch"}


PURE = tuple(name for name in MODULES if name and package_of(MODULES[name]) in TORCH_FREE)


def test_torch_free_packages_import_without_torch() -> None:
    """They can be imported in a fresh interpreter that has no torch at all."""
    lines = "\n".join(f"import lowtide.{name}" for name in PURE)
    code = f"import sys\nsys.modules['torch'] = None\n{lines}\nassert sys.modules['torch'] is None"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_load_torch() -> None:
    """``import lowtide`` and the torch-free packages leave torch unloaded."""
    lines = "\n".join(f"import lowtide.{name}" for name in PURE)
    code = f"import sys, lowtide\n{lines}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["run", "record", "guard", "min", "batch", "leak"])
def test_a_verb_starts_without_heavy_imports(verb: str) -> None:
    """What only some verbs need is not imported at start: statistics, solvers and tables take longer than most verbs
    themselves. ``run`` and ``record`` make way for the script at once, and need no arrays either.
    """
    heavy = ("torch", "scipy", "ruptures", "rich", "jinja2", "pandas", "matplotlib", *(["numpy"] if verb in ("run", "record") else []))
    code = (
        "import sys, click\nfrom lowtide.cli.main import main\n"
        f"assert main.get_command(click.Context(main), {verb!r})\nprint([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
