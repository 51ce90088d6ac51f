"""Laws of a process that began without the heap counter (a notebook): it is attached when a budget begins.

It is then as exact as a preloaded one: blocks from before are counted, requests are counted and capped, and bits stay equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest
from lowtide.runtime.device.heap_counters import library_path

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(library_path() is None, reason="no compiler built the counter")

COUNTS = """
import json, torch
before = torch.empty(1 << 20)
from lowtide.runtime.device.heap_meter import counters
found = counters()
seen = [found.tensor_live]
y = torch.empty(1000)
seen.append(found.tensor_live)
del y
seen.append(found.tensor_live)
del before
seen.append(found.tensor_live)
refused = False
found.cap = found.tensor_live + (1 << 20)
try:
    torch.empty(1 << 20)
except RuntimeError as error:
    refused = "allocate memory" in str(error)
found.cap = 0
print(json.dumps({"seen": seen, "refused": refused, "peak": found.tensor_peak}))
"""

BUDGET = """
import gc, json, sys
import torch, zoo
torch.use_deterministic_algorithms(True)
zoo.run(zoo.MODELS["gpt_eager"], 1)
plain = zoo.run(zoo.MODELS["gpt_eager"], 5)
import lowtide
from lowtide.runtime.device.heap_meter import counters
with lowtide.budget("1GiB") as roomy:
    zoo.run(zoo.MODELS["gpt_eager"], 5)
plan = roomy.outcome.plan
gc.collect()
base = counters().tensor_live
budget = int(plan.resident_bytes + 0.5 * (plan.baseline_peak_bytes - plan.resident_bytes))
with lowtide.budget(budget) as run:
    bits = zoo.run(zoo.MODELS["gpt_eager"], 5)
outcome = run.outcome
print(json.dumps({
    "exact": outcome.exact, "equal": bits == plain, "budget": budget, "peaks": [s.peak_bytes for s in outcome.steps],
    "plain": plan.baseline_peak_bytes, "predicted": outcome.plan.predicted_peak_bytes,
}))
"""


def _run(code: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["PYTHONPATH"] = str(TESTS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_attached_counter_counts_all_blocks_and_caps_requests() -> None:
    found = _run(COUNTS)
    start, with_block, without, emptied = found["seen"]
    assert start >= 4 << 20
    assert with_block - start == 4000
    assert without == start
    assert start - emptied == 4 << 20
    assert found["refused"]
    assert found["peak"] >= start


def test_a_budget_is_held_exactly_without_preloading() -> None:
    found = _run(BUDGET)
    assert found["exact"]
    assert found["equal"]
    assert found["budget"] < found["plain"]
    assert max(found["peaks"]) <= found["budget"] + (64 << 10)
    assert abs(found["peaks"][-1] - found["predicted"]) <= 64 << 10

LIBRARY_BYTES = {"gpt_eager": 64 << 10, "lstm": 256 << 10, "cnn": 640 << 10}
"""What oneDNN takes past torch's allocator for these models at most, which the profiler does not see."""

NO_LIBRARY = """
import lowtide.runtime.device.heap_meter
real = lowtide.runtime.device.heap_meter.counters()
lowtide.runtime.device.heap_meter.library_path = lambda: None
"""
JUDGED = """
import gc, json
import torch, zoo
torch.use_deterministic_algorithms(True)
zoo.run(zoo.MODELS[NAME], 1)
plain = zoo.run(zoo.MODELS[NAME], 6)
import lowtide
from torch.optim.optimizer import register_optimizer_step_post_hook
peaks = []
def stepped(*_):
    peaks.append(real.tensor_step_peak)
    real.tensor_step_peak = real.tensor_live
with lowtide.budget("1GiB") as roomy:
    zoo.run(zoo.MODELS[NAME], 6)
plan = roomy.outcome.plan
gc.collect()
hidden = real.tensor_live  # seen by the judge alone: what oneDNN keeps
budget = int(plan.resident_bytes + 0.7 * (plan.baseline_peak_bytes - plan.resident_bytes))
register_optimizer_step_post_hook(stepped)
real.tensor_step_peak = real.tensor_live
with lowtide.budget(budget) as run:
    bits = zoo.run(zoo.MODELS[NAME], 6)
print(json.dumps({
    "exact": run.outcome.exact, "equal": bits == plain, "budget": budget, "hidden": hidden, "peaks": peaks,
    "plain": plan.baseline_peak_bytes, "predicted": run.outcome.plan.predicted_peak_bytes,
}))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", LIBRARY_BYTES)
def test_without_any_counter_planned_steps_keep_the_budget(name: str) -> None:
    """torch's profiler measures the inside of operators instead. Judged by a counter that Lowtide is not shown: bits, and the
    peaks of all steps but the first two, except what oneDNN takes past torch's allocator.
    """
    found = _run(f"NAME = {name!r}\n" + NO_LIBRARY + JUDGED)
    assert not found["exact"]
    assert found["equal"]
    assert found["budget"] < 0.9 * found["plain"]
    measured = max(found["peaks"][2:]) - found["hidden"]
    assert measured <= found["budget"] + LIBRARY_BYTES[name]
    assert abs(measured - found["predicted"]) <= LIBRARY_BYTES[name]


PROFILED = """
import torch
from torch.profiler import profile
with lowtide.budget("1GiB"), profile(profile_memory=True) as seen:
    zoo.run(zoo.MODELS["cnn"], 3)
assert any(e.key == "aten::mkldnn_convolution" for e in seen.key_averages())
print("{}")
"""


def test_a_script_that_uses_the_profiler_keeps_it() -> None:
    _run("import lowtide, zoo\n" + NO_LIBRARY + PROFILED)
