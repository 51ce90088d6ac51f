"""``lowtide run --rescue``: steps that fit are left alone, and one that does not survives with the baseline's bits.

``lowtide run --slowdown`` shows what other budgets would cost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import Done, call, lowtide_in, script_in
import pytest

NET = """
import hashlib, os, resource, sys, torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(8)]
model = nn.Sequential(*blocks, nn.Linear(64, 4))
rank = int(os.environ.get("RANK", -1))
if rank >= 0:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + rank)
for step in range(STEPS):
    if step == 4 and sys.argv[1:]:  # from here on there is only so much memory
        data = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
        limit = 1024 * int(data.split()[1]) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    loss = model(torch.randn(ROWS, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{rank}: {step} {loss.item()}\\n", end="", flush=True)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(f"{rank}: {hashlib.sha256(weights).hexdigest()}\\n", end="", flush=True)
if rank >= 0:
    torch.distributed.destroy_process_group()
"""
SMALL, LARGE = 64, 6_000
ONE_IN_MANY = NET.replace("STEPS", "60").replace("ROWS", f"{LARGE} if step == 40 else {SMALL}")
MOSTLY = NET.replace("ROWS", f"{LARGE} + step if rank == 1 and step >= 4 else {SMALL}")
ROOM = str(96 << 20)
"""Bytes in which a large step does not fit, but does once what autograd has saved is evicted."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RESCUE = ("-m", "lowtide", "run", "--rescue", "--json", "f.json")


def _python(folder: Path, *arguments: str) -> Done:
    return call(folder, *arguments, OMP_NUM_THREADS="1")


def _steps(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["steps"]
    return found


def test_one_oversized_batch_survives_and_other_steps_are_left_alone(tmp_path: Path) -> None:
    """Law: the large step ends the plain script; with ``--rescue`` it passes with equal bits, and nothing else is intercepted."""
    script = script_in(tmp_path, ONE_IN_MANY)
    unlimited, plain = _python(tmp_path, script), _python(tmp_path, script, ROOM)
    assert plain.returncode != 0
    assert len(plain.stdout.splitlines()) == 40
    done = _python(tmp_path, *RESCUE, script, ROOM)
    assert done.returncode == 0, done.stderr
    assert done.stdout == unlimited.stdout
    steps = _steps(tmp_path / "f.json")
    assert [step["index"] for step in steps if step["policy"] != "plain"] == [0, 1, 40]
    assert steps[40]["rescued_ops"] > 0
    assert "in 1 of 60" in done.stderr


@pytest.mark.slow("100")
@pytest.mark.long("15")
@pytest.mark.parametrize("rescues", [15, 100])
def test_rescues_of_one_rank_keep_two_ranks_together(tmp_path: Path, rescues: int) -> None:
    """Law: one rank runs out of memory in many steps, the other never; both end, with the bits of a run that never did."""
    script = script_in(tmp_path, MOSTLY.replace("STEPS", str(4 + rescues)))
    unlimited, done = _python(tmp_path, *TORCHRUN, script), _python(tmp_path, *TORCHRUN, *RESCUE, script, ROOM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(unlimited.stdout.splitlines())
    mine, theirs = _steps(tmp_path / "f.json"), _steps(tmp_path / "f.json.rank1")
    assert not any(step["rescued_ops"] for step in mine)
    assert sum(step["rescued_ops"] > 0 for step in theirs) == rescues


@pytest.mark.long
def test_a_slowdown_shows_neighbouring_budgets_and_excludes_others(tmp_path: Path) -> None:
    """Law: the JSON has what the summary shows; wrong usage is one line, and exit code 2."""
    script = script_in(tmp_path, NET.replace("STEPS", "8").replace("ROWS", "2000"))
    done = _python(tmp_path, "-m", "lowtide", "run", "--slowdown", "400%", "--json", "f.json", script)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["held"]
    assert found["neighbours"]
    assert done.stderr.count("with that budget") == len(found["neighbours"])
    for other in (("--budget", "50%"), ("--rescue",)):
        wrong = lowtide_in(tmp_path, "run", "--slowdown", "10%", *other, script)
        assert (wrong.returncode, wrong.stderr) == (
            2,
            "lowtide: error: --slowdown sets the budget itself: give --budget only as a size, such as 6GiB, and no --rescue\n",
        )


def test_rescue_excludes_a_budget(tmp_path: Path) -> None:
    """Wrong usage: one line, and exit code 2."""
    done = lowtide_in(tmp_path, "run", "--rescue", "--budget", "1GiB", script_in(tmp_path, "print(1)"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "lowtide: error: --rescue has no budget and makes no plan: leave out --budget, --plan and --save-plan"
    ]
