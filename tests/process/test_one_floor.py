"""Law: verbs tell one floor. What no plan of a recording goes below is the same number in `record` and in `plan`, and the run's."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command import lowtide_in, script_in

from lowtide.units import format_bytes

HELD = """
import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.GELU())])
head = nn.Linear(512, 10)
opt = torch.optim.Adam(head.parameters())
for step in range(4):
    features = backbone(torch.randn(2048, 512))
    loss = nn.functional.cross_entropy(head(features), torch.randint(10, (2048,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
"""The variable ``features`` keeps 4 MiB over the whole backward, which nothing can take from it."""
TOLERANCE_BYTES = 64 << 10


def test_record_plan_and_run_tell_one_floor_where_a_variable_holds_a_saved_tensor(tmp_path: Path) -> None:
    script = script_in(tmp_path, HELD)
    one = {"OMP_NUM_THREADS": "1"}
    recorded = lowtide_in(tmp_path, "record", "-o", "r.lowtide", script, COLUMNS="1000", **one)
    assert recorded.returncode == 0, recorded.stderr
    lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "2MiB", "--json", "plan.json")
    planned = json.loads((tmp_path / "plan.json").read_text())
    lowtide_in(tmp_path, "run", "--budget", "20MiB", "--keep-going", "--json", "run.json", script, **one)
    run = json.loads((tmp_path / "run.json").read_text())
    floor = planned["floor_with_moving_bytes"]
    assert abs(run["plan"]["bound"]["peak_bytes"] - floor) <= TOLERANCE_BYTES
    assert min(s["peak_bytes"] for s in run["steps"][2:]) >= floor - TOLERANCE_BYTES
    told = re.search(r"no plan that recomputes and moves goes below ([\d.]+ \w+)", recorded.stdout + recorded.stderr)
    assert told is not None
    assert told[1] == format_bytes(floor)


def test_a_floor_is_named_by_what_it_may_do(tmp_path: Path) -> None:
    script = script_in(tmp_path, HELD)
    lowtide_in(tmp_path, "record", "-o", "r.lowtide", "--quiet", script, OMP_NUM_THREADS="1")
    alone = lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "2MiB", COLUMNS="200")
    assert "no recomputing goes below" in alone.stdout + alone.stderr
    moving = lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "2MiB", "--offload", "1GB", "--json", "m.json", COLUMNS="200")
    assert "no recomputing and moving goes below" in moving.stdout + moving.stderr
    assert "floor_with_moving_bytes" not in json.loads((tmp_path / "m.json").read_text())
