"""Law: a script of any framework is recorded, more coarsely: process, heap, child processes, and steps where they can be
found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest

MIB = 1 << 20

MARKED = """
import time
import numpy as np, lowtide
kept = []
time.sleep(1.2)
for i in range(5):
    kept.append(np.ones((8 << 20) // 8))
    lowtide.step(loss=i / 2)
print("done")
"""

UNMARKED = """
import time
import numpy as np
kept = []
start = time.monotonic()
while time.monotonic() - start < 3.3:
    kept.append(np.ones((1 << 20) // 8))
    time.sleep(0.05)
print(len(kept))
"""

CHILDREN = """
import multiprocessing, time
import numpy as np, lowtide

def work(ready, done):
    held = np.ones((64 << 20) // 8)
    ready.set()
    done.wait()

ready, done = multiprocessing.Event(), multiprocessing.Event()
child = multiprocessing.Process(target=work, args=(ready, done))
child.start()
ready.wait()
lowtide.step()
done.set()
child.join()
lowtide.step()
"""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import numpy as np
import keras
model = keras.Sequential([keras.layers.Input((20, 1)), keras.layers.LSTM(8), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
x, y = np.random.rand(60, 20, 1), np.random.rand(60, 1)
model.fit(x, y, batch_size=10, epochs=1, verbose=0)
model.train_on_batch(x[:10], y[:10])
"""


def _recorded(folder: Path, script: str, *, timeout: int = TIMEOUT) -> dict[str, Any]:
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "record", "-o", "a.lowtide", "--json", "a.json", "script.py"], cwd=folder,
        capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, "COLUMNS": "140"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "a.json").read_text())
    return {**found, "stderr": done.stderr, "stdout": done.stdout}


def test_marked_steps_show_the_bytes_that_each_adds(tmp_path: Path) -> None:
    """Time before the first and after the last mark is no step."""
    found = _recorded(tmp_path, MARKED)
    assert found["stdout"] == "done\n"
    first = next(i for i, r in enumerate(found["process"]) if r["marked"])
    assert first >= 1, "what comes before the first mark takes longer than a tick of the clock"
    assert not any(r["marked"] for r in found["process"][:first])
    rows = found["process"][first:]
    assert [r["step"] for r in rows[:5]] == [0, 1, 2, 3, 4], "what came before the first is no step either"
    assert [r["loss"] for r in rows[:5]] == [0, 0.5, 1, 1.5, 2]
    assert [r["marked"] for r in rows] == [True] * 5 + [False], "what follows the last mark is no step"
    assert "by step" in found["stderr"]
    assert not [line for line in found["stderr"].splitlines() if line.split()[:1] == ["5"]], "nor is it shown as one"
    for a, b in zip(rows, rows[1:5], strict=False):
        assert abs(b["heap_bytes"] - a["heap_bytes"] - 8 * MIB) < MIB
        assert abs(b["change_bytes"] - 8 * MIB) < 2 * MIB
    assert rows[4]["highest_bytes"] >= rows[4]["resident_bytes"] > 40 * MIB
    assert rows[4]["unique_bytes"] > 40 * MIB
    assert "torch" not in found["meta"]
    assert "highest resident" in found["stderr"]


def test_without_marks_rows_are_taken_by_time(tmp_path: Path) -> None:
    found = _recorded(tmp_path, UNMARKED)
    rows = found["process"]
    assert len(rows) >= 3
    assert not any(r["marked"] for r in rows)
    grown = sum(r["change_bytes"] for r in rows[1:])
    assert all(r["change_bytes"] > 0 for r in rows[1:-1])
    assert 10 * MIB < grown < (int(found["stdout"]) + 20) * MIB


def test_child_processes_are_counted_while_they_run(tmp_path: Path) -> None:
    rows = [row for row in _recorded(tmp_path, CHILDREN)["process"] if row["marked"]]
    assert rows[0]["children_bytes"] > 60 * MIB
    assert rows[1]["children_bytes"] == 0


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_batches_of_keras_are_steps_with_their_losses(tmp_path: Path) -> None:
    rows = _recorded(tmp_path, KERAS)["process"]
    marked = [r for r in rows if r["marked"] and r["loss"] is not None]
    assert len(marked) == 7
    assert all(r["loss"] > 0 and r["highest_bytes"] > 100 * MIB for r in marked)


def test_a_torch_script_gets_steps_and_process_rows(tmp_path: Path) -> None:
    found = _recorded(tmp_path, "import torch\nm = torch.nn.Linear(9, 9)\no = torch.optim.SGD(m.parameters())\n"
                                "for _ in range(2):\n    m(torch.ones(3, 9)).sum().backward()\n    o.step()\n")
    assert len(found["steps"]) == 2
    assert found["peak"] is not None
    assert found["process"]
    assert "process: highest resident" in found["stderr"]
