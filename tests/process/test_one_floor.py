"""Law: all verbs report one floor: the bytes that no plan of a recording can go below are equal in `record`, `plan` and `run`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import lowtide_in, script_in

from lowtide.base.units import format_bytes

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
LITTLE_BYTES = 1 << 10
"""The optimizer's counters, and what either does not see."""

MANY_OPERATORS = (Path(__file__).parents[2] / "examples/small_gpt.py").read_text()
"""So many operators that only some are sampled; the forced bytes rise over the backward while the baseline's fall."""
KEPT_OUTPUT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(4000, 64), nn.Linear(64, 4000))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randint(4000, (500,))
for step in range(4):
    opt.zero_grad()
    out = net(x)
    loss = nn.functional.nll_loss(nn.functional.log_softmax(out, 1), x)
    loss.backward()
    opt.step()
"""
"""No operator saves ``out`` and the variable keeps it to the next step."""
UPDATE = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
opt = torch.optim.AdamW(net.parameters(), foreach=True)
for step in range(4):
    opt.zero_grad()
    net(torch.randn(8, 512)).square().mean().backward()
    opt.step()
"""
"""The optimizer's update is the highest point."""
REBUILT = """
import torch
from torch import nn

def build():
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    return net, torch.optim.Adam(net.parameters(), foreach=False)

torch.manual_seed(0)
net, opt = build()
net(torch.randn(4, 512)).sum().backward()
opt.step()
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "saved.pt")
del net, opt
net, opt = build()
saved = torch.load("saved.pt")
net.load_state_dict(saved["net"])
opt.load_state_dict(saved["opt"])
del saved
for step in range(4):
    loss = net(torch.randn(64, 512)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
"""A step in which one model makes way for another, whose states no operator was seen to make."""
EVALUATION = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
opt = torch.optim.Adam(net.parameters())
for step in range(6):
    opt.zero_grad()
    net(torch.randn(16, 64)).square().mean().backward()
    opt.step()
    with torch.no_grad():
        net(torch.randn(4096, 64))
"""
"""The evaluation takes more memory than a training step."""
FRAME = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(128, 512), nn.Linear(512, 128), nn.LayerNorm(128)

    def forward(self, x):
        h = self.norm(x)
        u = self.up(h)
        gate = torch.sigmoid(u) * u
        out = self.down(gate)
        return x + out

torch.manual_seed(0)
net = nn.Sequential(*[Gated() for _ in range(4)])
opt = torch.optim.Adam(net.parameters(), foreach=False)
for step in range(4):
    opt.zero_grad()
    net(torch.randn(1024, 128)).square().mean().backward()
    opt.step()
"""
"""Local variables of a forward hold what autograd has saved until it returns."""
CHECKPOINTED = FRAME.replace("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n").replace(
    "    net(torch.randn(1024, 128)).square()",
    """    x = torch.randn(1024, 128)
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False)
    x.square()""",
)
"""Unpacking a node's saved tensor runs operators again while the node waits."""

SCRIPTS = {"operators": MANY_OPERATORS, "output": KEPT_OUTPUT, "update": UPDATE, "rebuilt": REBUILT, "evaluation": EVALUATION, "frame": FRAME,
           "checkpointed": CHECKPOINTED}
LEVERS = "move-gradients,move-states,sliced-update,plan-checkpoints,split-ops"


OUTSIDE_A_UNIT = ("update", "rebuilt", "evaluation")
"""Kinds of scripts whose floor no forward with its backward sets."""


@pytest.mark.long("operators", "update", "rebuilt", "checkpointed", "frame", "output")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_plan_and_run_report_the_same_baseline_peak_and_floor(tmp_path: Path, kind: str) -> None:
    """For scripts in which an output, the update, a rebuilt model, an evaluation, a frame or a checkpoint decides."""
    script, one = script_in(tmp_path, SCRIPTS[kind]), {"OMP_NUM_THREADS": "1"}
    recorded = lowtide_in(tmp_path, "record", "-o", "r.lowtide", "--quiet", script, **one)
    assert recorded.returncode == 0, recorded.stderr
    lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "64KiB", "--json", "plan.json")
    options = ("--budget", "64KiB", "--without", LEVERS, "--keep-going")
    lowtide_in(tmp_path, "run", *options, "--json", "run.json", script, **one)
    planned, run = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "run.json"))
    bound, plain = run["plan"]["bound"]["peak_bytes"], run["plan"]["baseline_peak_bytes"]
    assert planned["floor_with_moving_bytes"] == pytest.approx(bound, abs=LITTLE_BYTES)
    assert planned["given_peak_bytes"] == pytest.approx(plain, abs=LITTLE_BYTES)
    at = run["plan"]["bound"]["at"]
    assert (at is None) is (kind in OUTSIDE_A_UNIT)
    if at is not None:
        assert at["operator"].startswith("aten.")
        assert sum(part["bytes"] for part in at["parts"]) == bound


@pytest.mark.long
def test_record_plan_and_run_report_one_floor_for_a_held_saved_tensor(tmp_path: Path) -> None:
    """A variable of the script holds a saved tensor over the whole backward. No later step of a run is below the floor."""
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
    told = re.search(r"recomputing and offloading cannot go below ([\d.]+ \w+)", recorded.stdout + recorded.stderr)
    assert told is not None
    assert told[1] == format_bytes(floor)


@pytest.mark.long
def test_a_floor_is_named_after_the_moves_it_allows(tmp_path: Path) -> None:
    """"recomputing cannot go below" without `--offload`, "recomputing and offloading cannot go below" with it."""
    script = script_in(tmp_path, HELD)
    lowtide_in(tmp_path, "record", "-o", "r.lowtide", "--quiet", script, OMP_NUM_THREADS="1")
    alone = lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "2MiB", COLUMNS="200")
    assert "recomputing cannot go below" in alone.stdout + alone.stderr
    moving = lowtide_in(tmp_path, "plan", "r.lowtide", "--budget", "2MiB", "--offload", "1GB", "--json", "m.json", COLUMNS="200")
    assert "recomputing and offloading cannot go below" in moving.stdout + moving.stderr
    assert "floor_with_moving_bytes" not in json.loads((tmp_path / "m.json").read_text())
