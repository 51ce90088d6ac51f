"""Law: what oneDNN keeps for each new shape is bounded under a budget, unless the user says otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LENGTHS = 44
SCRIPT = f"""
import os
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Conv1d(96, 96, 3 + 2 * k, padding=1 + k), nn.GELU()) for k in range(6)])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range({LENGTHS}):
    loss = net(torch.randn(6, 96, 200 + 3 * i)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(i, loss.item().hex())
print(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY"), os.environ.get("LRU_CACHE_CAPACITY"))
"""


def _run(folder: Path, *command: str, **environment: str) -> tuple[list[str], dict[str, Any]]:
    """What the script prints, and the figures of the run."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.json").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, *command, str(folder / "script.py")], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, check=True,
    )
    figures = folder / "run.json"
    return done.stdout.splitlines(), json.loads(figures.read_text()) if figures.is_file() else {}


def _budgeted(folder: Path, **environment: str) -> tuple[list[str], int]:
    """What the script prints under a roomy budget, and by how many bytes the peak grows over the last 12 lengths."""
    lines, figures = _run(folder, "-m", "lowtide", "run", "--budget", "2GiB", "--json", "run.json", **environment)
    peaks = [step["peak_bytes"] for step in figures["steps"]]
    return lines, peaks[-1] - peaks[LENGTHS - 12]


@pytest.mark.long("ONEDNN", "DNNL")
@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"])
def test_memory_kept_for_new_shapes_is_bounded_unless_the_user_sets_a_limit(name: str, tmp_path: Path) -> None:
    """oneDNN compiles float32 convolutions on every processor; 44 lengths fill its cache and used to add 0.4 MiB each.

    The two runs are compared with each other, because the size of a compiled primitive depends on the processor.
    """
    plain, _ = _run(tmp_path)
    bounded, grown_bounded = _budgeted(tmp_path)
    own, grown_own = _budgeted(tmp_path, **{name: "1024", "LRU_CACHE_CAPACITY": "1024"})
    assert bounded[:-1] == own[:-1] == plain[:-1]
    assert bounded[-1] == "256 16"
    assert own[-1] == ("1024 1024" if name.startswith("ONEDNN") else "None 1024")
    assert grown_own > 2 * grown_bounded, "a full cache keeps no more; what still grows are the larger batches"
