"""How many random training scripts it takes to find a fault of each kind, when the fault is put into the runtime.

Each fault (``planted.toml``) is a change of a line or two, of a kind that this project has had or could have: draws that are
not repeated, writes that are not seen, gradients that do not come back, peaks that are not counted. It is made in a copy of
the tree, in which scripts are drawn (``tests/drawn.py``) until one breaks a law of ``tests/torch/test_random_programs.py``.

Prints a table and, with ``--json FILE``, writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
DRAWS = """
import sys
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from drawn import programs
from test_random_programs import SHARES, holds

tried = 0

@seed(int(sys.argv[2]))
@settings(
    max_examples=int(sys.argv[1]), deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(programs(), st.sampled_from(SHARES), st.booleans())
def draw(program, share, offload):
    global tried
    tried += 1
    holds(program, share, offload=offload)

try:
    draw()
except BaseException as error:
    first = str(error).strip().splitlines() or [""]
    print("found", tried, type(error).__name__, first[0][:100])
else:
    print("missed", tried)
"""


@dataclass(frozen=True)
class Fault:
    """A change that makes the runtime wrong.

    Attributes:
        kind: what goes wrong.
        module: below ``src/lowtide``.
        old, new: text that stands there once, and what takes its place.
    """

    kind: str
    module: str
    old: str
    new: str


NONE = Fault("none: as it is", "__init__.py", "", "")


def _faults() -> list[Fault]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    return [NONE, *(Fault(**row) for row in rows)]


def tried(fault: Fault, most: int, seed: int) -> dict[str, object]:
    """Scripts that were drawn until one broke a law."""
    with tempfile.TemporaryDirectory(prefix="lowtide-planted-") as folder:
        tree = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        file = tree / "src/lowtide" / fault.module
        text = file.read_text()
        if fault.old and text.count(fault.old) != 1:
            raise SystemExit(f"{fault.kind}: {fault.module} has its text {text.count(fault.old)} times: bring it up to date")
        file.write_text(text.replace(fault.old, fault.new))
        heap = next((tree / "src/lowtide").rglob("_heap*.so"))
        paths = [tree / "src", tree / "tests", tree / "tests/torch"]
        done = subprocess.run(
            [sys.executable, "-c", DRAWS, str(most), str(seed)],
            env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "LD_PRELOAD": str(heap), "OMP_NUM_THREADS": "1"},
            cwd=tree, capture_output=True, text=True, check=False,
        )
    words = (done.stdout.strip().splitlines() or [f"ended {done.returncode}"])[-1].split(maxsplit=3)
    found = words[0] != "missed"
    number = int(words[1]) if words[0] in ("found", "missed") else 0
    return {"kind": fault.kind, "found": found, "programs": number, "by": " ".join(words[2:])}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--programs", type=int, default=200, help="scripts that are drawn for each fault, at most")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", help="faults whose kind contains this")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    chosen = [f for f in _faults() if given.only is None or given.only in f.kind]
    rows = []
    table = Table("fault", "found after", "by")
    for fault in track(chosen, "faults"):
        rows.append(row := tried(fault, given.programs, given.seed))
        after = f"{row['programs']} scripts" if row["found"] else f"not in {row['programs']}"
        table.add_row(fault.kind, after, str(row["by"]))
        if given.json:
            given.json.write_text(json.dumps({"seed": given.seed, "most": given.programs, "faults": rows}, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
