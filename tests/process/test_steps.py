"""Law: all verbs that count the training steps of a script count the same ones, and every one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

from command import TIMEOUT
import pytest
from lowtide.base.processes import python
from lowtide.studies.leak.watch import Progress, Watch, Watched
from lowtide.probe.marks import MarkSource

SCRIPTS = {
    "one optimizer": (60, """
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(60):
            step(model, optimizer)
    """),
    "a GAN": (40, """
        maker, judge = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        made, judged = torch.optim.SGD(maker.parameters(), 0.1), torch.optim.SGD(judge.parameters(), 0.1)
        for _ in range(40):
            judged.zero_grad()
            judge(maker(torch.ones(4, 8)).detach()).sum().backward()
            judged.step()
            made.zero_grad()
            judge(maker(torch.ones(4, 8))).sum().backward()
            made.step()
    """),
    "trials that keep their optimizers": (60, """
        kept = []
        for _ in range(12):
            model = torch.nn.Linear(8, 8)
            kept.append((model, torch.optim.Adam(model.parameters())))
            for _ in range(5):
                step(*kept[-1])
    """),
    "folds of one model that drop theirs": (60, """
        model = torch.nn.Linear(8, 8)
        for _ in range(12):
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(5):
                step(model, optimizer)
    """),
}
HEAD = """
import torch

def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(params=SCRIPTS)
def case(request, tmp_path):
    steps, body = SCRIPTS[request.param]
    path = tmp_path / "train.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path, steps


@pytest.mark.long("folds", "trials", "one optimizer")
def test_a_watched_process_writes_one_row_per_step(case):
    path, steps = case
    with Watched(python(str(path), module=False, arguments=()), Watch(steps=0)) as process:
        run = process.wait(Progress())
    assert (run.kind, run.steps, run.code) == (MarkSource.OPTIMIZER, steps, 0)


@pytest.mark.long("folds", "a GAN", "trials")
def test_a_recording_has_every_step(case):
    path, steps = case
    found = path.parent / "found.json"
    command = [sys.executable, "-m", "lowtide", "record", "--quiet", "--level", "phases", "-o", str(path.parent / "r.lowtide"),
               "--json", str(found), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(found.read_text())["steps"]) == steps
