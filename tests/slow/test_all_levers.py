"""Laws of levers on a real script: with all levers its minimum is lower than with none, each shown by capped runs.

`--optimizations list` says what each saves on this script, or why it is declined.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "process" / "scripts" / "sized.py"


def _lowtide(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "lowtide", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_levers_lower_the_minimum_in_at_most_ten_runs_per_set(tmp_path: Path) -> None:
    said = _lowtide("min", "--allow", "all", "--json", str(tmp_path / "f.json"), str(SCRIPT), "--batch-size", "32", "--length", "32")
    answer: dict[str, Any] = json.loads((tmp_path / "f.json").read_text())
    assert [s["name"] for s in answer["sets"]] == ["no levers", "exact levers", "all levers"]
    for found in answer["sets"]:
        assert len(found["runs"]) <= 10
        assert found["survived_steps"] == 50
        assert 0.99 * found["minimum_bytes"] - 1 <= found["fails_at_bytes"] < found["minimum_bytes"]
    none, _, every = (s["minimum_bytes"] for s in answer["sets"])
    assert every < 0.7 * none
    assert answer["minimum_bytes"] == every
    assert "all optimizations" in said


def test_the_list_of_levers_says_what_each_saves_or_why_not(tmp_path: Path) -> None:
    said = _lowtide("run", "--optimizations", "list", "--json", str(tmp_path / "f.json"), str(SCRIPT), "--batch-size", "32", "--clip")
    found = {x["name"]: x for x in json.loads((tmp_path / "f.json").read_text())["levers"]}
    assert found["chunked-loss"]["used"]
    assert found["chunked-loss"]["saving_bytes"] > 32 * 16 * 600 * 4
    assert not found["update-in-backward"]["used"]
    assert "gradient" in found["update-in-backward"]["text"]
    assert "update-in-backward: a consumed gradient is read (sized.py:" in " ".join(said.split())
    assert "the same" in said, "what a lever does to the bits"
