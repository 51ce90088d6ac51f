"""Runs jobs with and without a recording in one process, with a second counter as the judge: prints where the recording is
off.

The phases of the baseline are found here by other means than the recorder's: torch's hooks where there are some, and the job's
own calls.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import recorded_jobs
import torch
from torch.optim import optimizer as optim
from lowtide.recording.recorded_step import Role, laid_out

import lowtide

STEPS = 3
SMALLEST = 64 << 10
SHARE = 0.005
UNKNOWN = 0.01


class Judge:
    """Highest point of each phase of each step."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["JUDGE"])
        self.live = ctypes.c_int64.in_dll(library, "judge_live")
        self.peak = ctypes.c_int64.in_dll(library, "judge_peak")
        self.found: dict[str, int] = {}
        self.base = 0
        self.now = ""

    def mark(self, phase: str) -> str:
        """Another phase begins; the one before."""
        before, self.now = self.now, phase
        self.found[before] = max(self.found.get(before, 0), self.peak.value - self.base)
        self.peak.value = self.live.value
        return before


def plain(make: Callable[[], Any], judge: Judge) -> dict[str, int]:
    """Highest points above the base, by phase, over all steps."""
    engine = torch.autograd._engine_run_backward
    depth = 0
    stepping = False

    def steps(*_: Any, begins: bool) -> None:
        nonlocal stepping
        stepping = begins
        judge.mark("optimizer" if begins else "data")

    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if torch._C._functorch.peek_interpreter_stack() is not None:  # a transform within the forward
            return engine(*args, **kwargs)
        before = judge.now if depth else judge.mark("backward")
        depth += 1
        try:
            return engine(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                graph = args[3] if len(args) > 3 else kwargs.get("create_graph")
                if before == "loss" and graph:
                    judge.mark("loss")  # a penalty on a derivative belongs to the loss
                else:
                    judge.mark("optimizer" if stepping else "data")  # a closure's backward lies within the step

    torch.manual_seed(0)
    gc.collect()
    judge.base, judge.found, judge.now = judge.live.value, {}, "data"
    judge.peak.value = judge.live.value
    torch.autograd._engine_run_backward = backward
    inside = 0

    def enter(module: torch.nn.Module, _: Any) -> None:
        nonlocal inside
        inside += 1
        if inside > 1 or depth or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if judge.now == "optimizer":
            judge.now = "before the closure"  # memory held there is not the update's
        criterion = judge.now == "loss" and next(module.parameters(), None) is None
        judge.mark("evaluation" if not torch.is_grad_enabled() else "loss" if criterion else "forward")

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        nonlocal inside
        inside -= 1
        if not inside and not depth and judge.now in ("forward", "loss", "evaluation"):
            judge.mark("loss" if torch.is_grad_enabled() else "data")

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        optim.register_optimizer_step_pre_hook(partial(steps, begins=True)),
        optim.register_optimizer_step_post_hook(partial(steps, begins=False)),
    ]
    try:
        job = make()
        for i in range(STEPS):
            job.step(i)
    finally:
        torch.autograd._engine_run_backward = engine
        for handle in handles:
            handle.remove()
    judge.mark("end")
    return judge.found


def recorded(make: Callable[[], Any], judge: Judge) -> tuple[dict[str, int], dict[str, float], float]:
    """The same by the recording; the worst shares of unknown bytes; and of backward's bytes the share whose line is known."""
    torch.manual_seed(0)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.lowtide"
        with lowtide.record(file):
            job = make()
            for i in range(STEPS):
                job.step(i)
        recording = lowtide.api.read(file)
    del job
    start = recording.steps[0].start_bytes
    found: dict[str, int] = {}
    for row in recording.steps:
        for p in row.phases:
            found[p.name] = max(found.get(p.name, 0), p.peak_bytes - start)
    worst: dict[str, float] = {}
    first = laid_out(recording)[0]  # what other jobs of this process left is known where a tensor has it
    left = start - sum(b.bytes for b in first.blocks if b.met and b.counted and b.born < first.ops[0])
    for step in laid_out(recording):
        if step.row.step >= 0 and len(step.ops):
            assert (step.before.sum(axis=1) == step.entries["size"][step.ops]).all()
            assert (step.at_peak.sum(axis=1) == step.entries["peak"][step.ops]).all()
            unknown = abs(step.at_peak[:, Role.UNKNOWN] - left).max()
            worst[str(step.row.step)] = float(unknown / max(int(step.peaks.max()) - start, 1))
    made = [b for s in laid_out(recording) for b in s.blocks if b.phase == "backward" and b.born >= 0 and b.counted]
    known = sum(b.bytes for b in made if b.source)
    return found, worst, known / sum(b.bytes for b in made) if made else 1.0


def main() -> None:
    """Jobs named on the command line."""
    judge = Judge()
    torch.set_num_threads(1)
    told = {}
    for name in sys.argv[1:]:
        make = (recorded_jobs.JOBS | recorded_jobs.SUMS)[name]
        plain(make, judge)  # libraries are warm from here on
        want = plain(make, judge)
        have, worst, lines = recorded(make, judge)
        off = {}
        top = max(want.values())
        phases = ("forward", "loss", "evaluation", "backward", "optimizer")
        for phase in phases:
            if phase in want and phase in have:
                off[phase] = abs(want[phase] - have[phase])
        lost = [phase for phase in phases if phase in want and phase not in have]
        off["all"] = abs(top - max(have.values()))
        told[name] = {"want": want, "have": have, "off": off, "lost": lost, "allowed": max(SMALLEST, int(SHARE * top)), "unknown": worst, "peak": top, "lines": lines}
    print(json.dumps(told))


main()
