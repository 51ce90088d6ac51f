"""Arms of an ablation: what is switched off does not run, the rest goes on, and steps are still marked."""

from __future__ import annotations

import json
import textwrap

import pytest

from lowtide.base.processes import python
from lowtide.studies.leak.watch import Progress, Watch, Watched
from lowtide.probe.arms import PARTS
from lowtide.probe.marks import MarkSource

SCRIPT = """
    import json, logging, sys, torch
    class Counting(torch.nn.Module):
        calls = 0
        def forward(self, x):
            Counting.calls += 1
            return x * 1.0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Counting(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    graded = 0
    for step in range(30):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        graded += bool(model[0].weight.grad.any())
        optimizer.step()
        norm = model[0].weight.grad.norm()
        torch.save(model.state_dict(), "saved")
        print("step", step)
    moved = not torch.equal(before, model[0].weight)
    with open("seen", "w") as file:
        json.dump({"calls": Counting.calls, "moved": moved, "graded": graded}, file)
"""


def seen(tmp_path, monkeypatch, **task):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    arm = {"parts": PARTS, "stub": [], "twice": [], **task}
    with Watched(python("script.py", module=False, arguments=()), Watch(steps=0, arm=arm)) as process:
        run = process.wait(Progress())
    assert run.code == 0, run.tail
    assert (run.kind, run.steps) == (MarkSource.OPTIMIZER, 30)
    assert [(m.path, m.type) for m in run.modules] == [("", "Sequential"), ("0", "Linear"), ("1", "Counting"), ("2", "Linear")]
    assert [m.holds for m in run.modules] == [True, False, False, False]
    found = json.loads((tmp_path / "seen").read_text())
    return {**found, "saved": (tmp_path / "saved").exists(), "printed": "step 29" in run.tail}


@pytest.mark.long
@pytest.mark.parametrize(("parts", "expected"), [
    (1, {"calls": 1, "moved": False, "graded": 0, "saved": False, "printed": False}),
    (2, {"calls": 30, "moved": False, "graded": 0, "saved": False, "printed": False}),
    (3, {"calls": 30, "moved": False, "graded": 30, "saved": False, "printed": False}),
    (4, {"calls": 30, "moved": True, "graded": 30, "saved": False, "printed": False}),
    (6, {"calls": 30, "moved": True, "graded": 30, "saved": True, "printed": True}),
])
def test_each_arm_runs_exactly_its_parts(tmp_path, monkeypatch, parts, expected):
    assert seen(tmp_path, monkeypatch, parts=PARTS[:parts]) == expected


def test_a_layer_can_be_switched_off(tmp_path, monkeypatch):
    """It runs once, to learn what its output looks like."""
    assert seen(tmp_path, monkeypatch, stub=["1"])["calls"] == 1


@pytest.mark.long
def test_a_layer_can_be_run_twice(tmp_path, monkeypatch):
    found = seen(tmp_path, monkeypatch, twice=["Counting"])
    assert found["calls"] == 60
    assert found["moved"]
