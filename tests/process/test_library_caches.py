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
net = nn.Sequential(*[nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 96)) for _ in range(6)])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for i in range({LENGTHS}):
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(6, 200 + 3 * i, 96)).square().mean()
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


@pytest.mark.long("DNNL", "None", "ONEDNN")
@pytest.mark.parametrize("name", [None, "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"])
def test_memory_kept_for_new_shapes_is_bounded_unless_the_user_sets_a_limit(name: str | None, tmp_path: Path) -> None:
    """44 lengths used to add 2.4 MiB each."""
    plain, _ = _run(tmp_path)
    own = {} if name is None else {name: "1024", "LRU_CACHE_CAPACITY": "1024"}
    lines, figures = _run(tmp_path, "-m", "lowtide", "run", "--budget", "2GiB", "--json", "run.json", **own)
    assert lines[:-1] == plain[:-1]
    peaks = [step["peak_bytes"] for step in figures["steps"]]
    grown = peaks[-1] - peaks[LENGTHS - 12]
    if name is None:
        assert lines[-1] == "256 16"
        assert grown < 4 << 20, "the cache is full by then, and only batches are larger"
    else:
        assert lines[-1] == ("1024 1024" if name.startswith("ONEDNN") else "None 1024")
        assert grown > 12 << 20, "what was measured without a limit"
