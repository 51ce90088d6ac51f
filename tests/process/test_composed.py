"""Laws of verbs around verbs: ``guard``, ``leak`` and ``sweep`` around ``run`` and ``record`` change nothing in them.

Where two verbs, or a verb and the script's own ``lowtide.budget``, ask for one process, one decides and says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import lowtide_in, script_in

LOWTIDE = [sys.executable, "-m", "lowtide"]
TRAINS = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
for i in range(12):
    optimizer.zero_grad()
    loss = net(torch.randn(64, 512)).square().mean()
    loss.backward()
    optimizer.step()
    print(i, loss.item(), flush=True)
    if i % 7 == 6:
        print("gradient", sum(p.grad.square().sum().item() for p in net.parameters()))
"""
OWN = TRAINS.replace("import torch\n", "import torch, lowtide\n").replace(
    "for i in range(12):", "with lowtide.BLOCK as run:\n  for i in range(12):"
).replace("\n    ", "\n      ")
SWEEP = """
command = {command}
steps = 8
[axes]
rows = {{ values = [1], argument = "--rows" }}
"""
AROUND = {
    "guard": ["guard", "--"],
    "leak": ["leak", "--"],
    "guard around leak": ["guard", "--", *LOWTIDE, "leak", "--"],
    "sweep": ["sweep", "s.toml"],
}


@pytest.mark.long("leak", "sweep")
@pytest.mark.parametrize("outer", AROUND)
def test_verbs_around_run_keep_its_lever_budget_and_losses(tmp_path: Path, outer: str) -> None:
    """The hooks and samplers that they put into the process are not taken for the script's, and switch no lever off."""
    script = script_in(tmp_path, TRAINS)
    inner = [*LOWTIDE, "run", "--quiet", "--budget", "28MiB", "--json", "f.json", script]
    (tmp_path / "s.toml").write_text(SWEEP.format(command=json.dumps(inner)))
    plain = lowtide_in(tmp_path, "run", "--quiet", "--budget", "1GiB", script, OMP_NUM_THREADS="1").stdout
    words = AROUND[outer]
    done = lowtide_in(tmp_path, *words, *(() if outer == "sweep" else inner), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert [x["name"] for x in found["levers"] if x["used"]] == ["move-gradients"]
    assert found["held"]
    assert len(found["steps"]) >= 8
    if outer != "sweep":  # which keeps what its cells print
        assert [line for line in plain.splitlines() if line in done.stdout.splitlines()] == plain.splitlines()


@pytest.mark.slow("leak")
@pytest.mark.long
@pytest.mark.parametrize("outer", ["guard", "leak"])
def test_verbs_around_record_keep_the_recorded_peaks(tmp_path: Path, outer: str) -> None:
    script = script_in(tmp_path, TRAINS)
    alone = lowtide_in(tmp_path, "record", "--quiet", "--json", "alone.json", "-o", "alone.lowtide", script)
    assert alone.returncode == 0, alone.stderr
    inner = [*LOWTIDE, "record", "--quiet", "--json", "within.json", "-o", "within.lowtide", script]
    done = lowtide_in(tmp_path, *AROUND[outer], *inner)
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "within.json"))
    assert [s["peak_bytes"] for s in one["steps"]] == [s["peak_bytes"] for s in other["steps"]]
    assert len(one["steps"]) == 12


@pytest.mark.long("inner0-outer1", "inner1-outer0", "inner1-outer3", "inner1-outer1", "inner0-outer3")
@pytest.mark.parametrize("outer", [("min", "--steps", "4", "--survive", "0"), ("batch", "--vary", "--rows=1,2"), ("record",), ("run", "--budget", "1GiB")])
@pytest.mark.parametrize("inner", [("run", "--budget", "28MiB"), ("record",)])
def test_two_verbs_for_one_process_are_refused(tmp_path: Path, outer: tuple[str, ...], inner: tuple[str, ...]) -> None:
    """Each of these verbs decides what the process does."""
    script = script_in(tmp_path, TRAINS)
    done = lowtide_in(tmp_path, *outer, "-m", "lowtide", *inner, script)
    assert done.returncode in (1, 2)
    said = " ".join((done.stdout + done.stderr).split())
    assert "Lowtide already runs this process" in said
    assert "Traceback" not in said


@pytest.mark.long("record-budget", "run-record", "record-record", "run-budget")
@pytest.mark.parametrize(
    ("verb", "block"),
    [("run", 'budget("24.5MiB")'), ("run", 'record("own.lowtide")'), ("record", 'budget("24.5MiB")'), ("record", 'record("own.lowtide")')],
)
def test_the_command_overrides_the_scripts_own_block(tmp_path: Path, verb: str, block: str) -> None:
    """A budget in the script that could not be held ends nothing; the figures are those of the script without it."""
    words = ("--budget", "1GiB") if verb == "run" else ("-o", "x.lowtide")
    plain = lowtide_in(tmp_path, verb, *words, "--quiet", "--json", "plain.json", script_in(tmp_path, TRAINS))
    done = lowtide_in(tmp_path, verb, *words, "--quiet", "--json", "own.json", script_in(tmp_path, OWN.replace("BLOCK", block)))
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "in the script is ignored" in done.stderr
    assert not (tmp_path / "own.lowtide").exists()
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("plain.json", "own.json"))
    assert [s["peak_bytes"] for s in one["steps"]] == [s["peak_bytes"] for s in other["steps"]]


def test_a_script_reads_the_commands_outcome(tmp_path: Path) -> None:
    text = OWN.replace("BLOCK", 'budget("2GiB")') + "\nprint('budget', run.outcome.budget_bytes, len(run.outcome.steps))\n"
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, text))
    assert f"budget {1 << 30} 11" in done.stdout, done.stderr
