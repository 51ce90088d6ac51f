"""The packages of Lowtide in the order in which they may import each other, and the table of their modules.

``python docs/rooms.py`` writes the table into ``docs/architecture.md``, from the first sentence of each module's docstring;
``--check`` only says whether it is up to date (exit code 1 where not). ``tests/unit/test_floors.py`` runs it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "lowtide"
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "<!-- rooms: written by docs/rooms.py -->"
END: Final = "<!-- end of rooms -->"

TORCH_FREE: Final = (
    "base", "", "probe", "probe.site", "checkpoint", "data",
    "planning", "planning.bounds", "planning.check", "planning.unit", "planning.search", "planning.solver",
    "recording", "recording.findings", "recording.explanation", "recording.rewrites",
)
"""Packages in which torch is not even named; ``""`` is the package itself."""

RUNTIME: Final = (
    "runtime", "runtime.device", "runtime.storage", "runtime.intercept", "runtime.updates", "runtime.levers", "runtime.replay",
    "runtime.online", "runtime.record", "runtime.planned", "runtime.units", "runtime.control", "runtime.agent",
)
"""Packages whose modules may import torch when they are loaded."""

ABOVE: Final = ("studies", "studies.leak", "studies.sweep", "studies.size", "guard", "report", "api", "cli", "__main__")

PACKAGES: Final = (*TORCH_FREE, *RUNTIME, *ABOVE)
"""Every package, from the lowest up: a module imports from its own package and from those before it."""


def package_of(path: Path) -> str:
    """The package in which a module lies; a module directly below ``lowtide`` is a package of its own."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[-1] == "__init__":
        return ".".join(parts[:-1])
    return ".".join(parts[:-1]) or parts[0]


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line.

    Raises:
        ValueError: if the module has no docstring.
    """
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    first = " ".join(text.split("\n\n")[0].split())
    end = first.find(". ")
    return (first if end < 0 else first[:end]).rstrip(".:").replace("|", "\\|")


def modules_of(package: str) -> list[Path]:
    """Modules of one package, without its ``__init__``."""
    found = (p for p in SOURCE.rglob("*.py") if package_of(p) == package)
    return sorted(p for p in found if p.name != "__init__.py" or not package)


def table() -> str:
    """All packages and modules, as Markdown."""
    lines = ["| package | module | what it is for |", "|---|---|---|"]
    for package in PACKAGES:
        init = SOURCE.joinpath(*package.split(".")) / "__init__.py"
        modules = modules_of(package)
        if package and init.exists():
            lines.append(f"| **`{package}`** | | {sentence(init)} |")
            lines += [f"| | `{path.stem}` | {sentence(path)} |" for path in modules]
        elif package:
            lines += [f"| **`{package}`** | `{path.stem}` | {sentence(path)} |" for path in modules]
        else:
            lines += [f"| **`lowtide`** | | {sentence(path)} |" for path in modules]
    return "\n".join(lines)


def page() -> str:
    """The page with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the table is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    current = page() == PAGE.read_text()
    if not current:
        sys.stderr.write("docs/architecture.md is out of date: run `python docs/rooms.py`\n")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
