"""Law: the saving that a finding promises is what the change, made for real, saves."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import heap
from lowtide.recording.explanation.explanation import explain
from lowtide.recording.findings.loss_and_data import CHUNKS
from lowtide.base.errors import BudgetError
from lowtide.recording.recorded_step import laid_out
from lowtide.recording.peak_report import peak_report
from lowtide.recording.peak_floor import Floor, floor_of
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.recording import reader, recorded_step

SHARE = 0.02
"""A saving may be off by so much of itself ..."""
BYTES = 4096
"""... or by this: generator states, counters."""
STEPS = 3

Script = Callable[[bool], None]


def _model(out: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, out))


def _batch(out: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 256), torch.randint(0, out, (64,))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = _batch()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def zeroed_gradients(mended: bool) -> None:  # noqa: FBT001
    """``zero_grad(set_to_none=False)``."""
    model = _model(4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=mended)
        x, y = _batch(4000)
        loss = F.cross_entropy(model(x.repeat(8, 1)), y.repeat(8))
        loss.backward()
        optimizer.step()


def held_result(mended: bool) -> None:  # noqa: FBT001
    """The logits stay in a variable during the backward."""
    model = _model(4000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = _batch(4000)
        logits = model(x.repeat(8, 1))
        loss = F.cross_entropy(logits, y.repeat(8))
        if mended:
            del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logits = None


def foreach(mended: bool) -> None:  # noqa: FBT001
    """Adam over all parameters at once."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=not mended)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 300)).square().mean()
        loss.backward()
        optimizer.step()


def float64(mended: bool) -> None:  # noqa: FBT001
    """Inputs come as float64, and the model follows."""
    kind = torch.float32 if mended else torch.float64
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256), nn.Tanh())))
    extra = nn.Linear(256, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.01)
    model.to(kind)
    for _ in range(STEPS):
        x = torch.randn(1024, 256, dtype=kind)
        optimizer.zero_grad()
        loss = extra(model(x).float()).square().mean()
        loss.backward()
        optimizer.step()


class _Converts(nn.Sequential):
    """Computes in float32, whatever its input is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def float64_gathered(mended: bool) -> None:  # noqa: FBT001
    """The data are float64; of each batch the model's float32 copy lives on, and the gathered rows are freed."""
    kind = torch.float32 if mended else torch.float64
    model = _Converts(*_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, labels = torch.randn(4096, 256, dtype=kind), torch.randint(0, 10, (4096,))
    for _ in range(STEPS):
        rows = torch.randperm(4096)[:2048]
        loss = F.cross_entropy(model(data[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def graph_kept(mended: bool) -> None:  # noqa: FBT001
    """The running loss is summed with its graph."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    total: torch.Tensor | float = 0.0
    for _ in range(STEPS):
        x, y = _batch()
        loss = F.cross_entropy(model(x.repeat(8, 1)), y.repeat(8))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        total = total + (loss.item() if mended else loss)
        del loss


def model_copies(mended: bool) -> None:  # noqa: FBT001
    """The best models are kept whole."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best = [] if mended else [copy.deepcopy(model) for _ in range(2)]
    for _ in range(STEPS):
        _train(model, optimizer)
    del best


def evaluation_graph(mended: bool) -> None:  # noqa: FBT001
    """Evaluation at a larger batch records a graph that nothing uses."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        _train(model, optimizer)
        with torch.set_grad_enabled(not mended):
            wrong = model(torch.randn(4096, 256)).argmax(-1)
        del wrong


def resident_data(mended: bool) -> None:  # noqa: FBT001
    """The whole data set lies in memory; a batch is a slice of it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = None if mended else torch.randn(20000, 256)
    for step in range(STEPS):
        x = torch.randn(64, 256) if data is None else data[torch.arange(64) + 64 * step]
        y = torch.randint(0, 10, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def loss_block(mended: bool) -> None:  # noqa: FBT001
    """Logits of many classes and rows at once, or one chunk of rows after another with its backward."""
    body, head = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1000)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
    for _ in range(STEPS):
        x, y = torch.randn(2048, 16), torch.randint(0, 1000, (2048,))
        optimizer.zero_grad()
        if mended:
            outer = body(x)
            inner = outer.detach().requires_grad_()
            for rows, wanted in zip(inner.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
                (F.cross_entropy(head(rows), wanted, reduction="sum") / len(y)).backward()
            outer.backward(inner.grad)
        else:
            F.cross_entropy(head(body(x)), y).backward()
        optimizer.step()


CASES: dict[str, Script] = {
    "zeroed-gradients": zeroed_gradients, "held-result": held_result, "foreach": foreach, "float64": float64,
    "graph-kept": graph_kept, "model-copies": model_copies, "evaluation-graph": evaluation_graph,
    "resident-data": resident_data, "loss-block": loss_block,
}


def _recorded(script: Script, file: Path, *, mended: bool) -> reader.Recording:
    torch.manual_seed(0)
    gc.collect()
    with lowtide.record(file):
        script(mended)
    return reader.read(file)


def copies_of_the_best(mended: bool) -> None:  # noqa: FBT001
    """As scripts do it: evaluate, and keep a copy of a model that is better."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    for _ in range(STEPS):
        _train(model, optimizer)
        with torch.no_grad():
            model(torch.randn(64, 256))
        if not mended:
            kept.append(copy.deepcopy(model))


@pytest.mark.parametrize(("kind", "script"), [*CASES.items(), ("model-copies", copies_of_the_best), ("float64", float64_gathered)])
def test_the_saving_of_a_finding_is_what_the_change_saves(kind: str, script: Script, tmp_path: Path) -> None:
    """The script is run as it is and with the change: the difference of the peaks is the saving, and the changed script has no
    such finding (a chunk of a loss can be cut again, at a much smaller saving).
    """
    _recorded(script, tmp_path / "warm", mended=False)
    flawed = _recorded(script, tmp_path / "a", mended=False)
    mended = _recorded(script, tmp_path / "b", mended=True)
    found = [f for f in explain(flawed).findings if f.id == kind]
    assert len(found) == 1, [f.id for f in explain(flawed).findings]
    left = sum(f.saving_bytes for f in explain(mended).findings if f.id == kind)
    assert not left or (kind == "loss-block" and left < found[0].saving_bytes / CHUNKS), "a chunk can be cut up again"

    def above(recording: reader.Recording, step: int) -> int:
        return next(r.peak_bytes for r in recording.steps if r.step == step) - recording.steps[0].start_bytes

    step = found[0].step
    saved = above(flawed, step) - above(mended, step)
    assert abs(found[0].saving_bytes - saved) <= max(SHARE * saved, BYTES), (found[0], saved)
    assert saved > 0


FOREACH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd decay": partial(torch.optim.SGD, lr=0.01, weight_decay=0.1),
    "sgd momentum decay": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "sgd nesterov decay": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "adam decay amsgrad": partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "rmsprop centered decay": partial(torch.optim.RMSprop, centered=True, momentum=0.9, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad,
    "adadelta decay": partial(torch.optim.Adadelta, weight_decay=0.1),
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
}


@pytest.mark.parametrize("name", FOREACH)
def test_the_saving_without_foreach_follows_the_optimizers_own_loop(name: str, tmp_path: Path) -> None:
    """Depending on optimizer and settings, the loop holds none to six temporaries at once, each of the size of a parameter;
    the next may be the largest one. Where the loop takes more, nothing is reported.
    """

    def script(mended: bool) -> None:  # noqa: FBT001
        model = nn.Sequential(nn.Linear(300, 700), *(nn.Linear(700, 700) for _ in range(2)), *(nn.Linear(700, 100) for _ in range(1)))
        optimizer = FOREACH[name](model.parameters(), foreach=not mended)
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()

    flawed = _recorded(script, tmp_path / "a", mended=False)
    mended = _recorded(script, tmp_path / "b", mended=True)
    found = next((f for f in explain(flawed).findings if f.id == "foreach"), None)
    told = found.saving_bytes if found is not None else 0
    step = found.step if found is not None else 6
    above = [next(r.peak_bytes for r in made.steps if r.step == step) - made.steps[0].start_bytes for made in (flawed, mended)]
    saved = max(0, above[0] - above[1])  # with one large parameter the loop takes more, and there is no finding
    assert abs(told - saved) <= max(SHARE * saved, BYTES), (told, saved)


def test_tensors_made_by_the_standard_library_have_the_scripts_line(tmp_path: Path) -> None:
    """``copy.deepcopy`` clones in ``copy.py``; the source reported is the line of the script that asked for it."""
    recording = _recorded(copies_of_the_best, tmp_path / "copies", mended=False)
    clones = {b.source for step in recorded_step.laid_out(recording) for b in step.blocks if b.op.startswith("aten.clone")}
    assert clones
    assert all("test_findings.py" in source and "copies_of_the_best" in source for source in clones), clones


def _evaluated_at_the_end() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        _train(model, optimizer)
    model(torch.randn(4096, 256)).argmax(-1)


def _never_trained() -> None:
    _model()(torch.randn(4096, 256)).argmax(-1)


@pytest.mark.parametrize(("script", "steps"), [(_evaluated_at_the_end, STEPS + 1), (_never_trained, 1)])
def test_an_evaluation_graph_after_the_last_step_is_found(script: Callable[[], None], steps: int, tmp_path: Path) -> None:
    """It counts as a step of its own with the real peak, also in a script that never trains."""
    script()
    gc.collect()
    heap().tensor_peak = heap().tensor_live
    with lowtide.record(tmp_path / "end"):
        script()
    peak = heap().tensor_peak
    recording = reader.read(tmp_path / "end")
    assert len([r for r in recording.steps if r.step >= 0]) == steps
    assert recording.steps[-1].peak_bytes == peak
    assert [f.step for f in explain(recording).findings if f.id == "evaluation-graph"] == [steps - 1]


def _gan() -> None:
    """Two optimizers per step; the generator's graph outlives the discriminator's update."""
    generator, judge = _model(256), _model(1)
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(generator.parameters())
    for _ in range(STEPS + 1):
        fake = generator(torch.randn(512, 256))
        first.zero_grad()
        F.softplus(judge(fake.detach())).mean().backward()
        first.step()
        second.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        second.step()


def test_a_graph_that_outlives_one_of_two_optimizers_is_not_called_unused(tmp_path: Path) -> None:
    """The generator's graph is used by the second optimizer's backward, so it is no evaluation graph."""
    with lowtide.record(tmp_path / "gan"):
        _gan()
    recording = reader.read(tmp_path / "gan")
    assert len([r for r in recording.steps if r.step >= 0]) == STEPS + 1
    assert not [f for f in explain(recording).findings if f.id == "evaluation-graph"]


def test_a_recording_begun_during_training_knows_existing_roles(tmp_path: Path) -> None:
    """Less than 1 % of the first step's peak is unknown, and the optimizer's states are known as such."""
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        x, y = _batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    gc.collect()
    elsewhere = heap().tensor_live - sum(3 * p.nbytes for p in model.parameters()) - sum(p.nbytes for p in model.parameters())
    with lowtide.record(tmp_path / "late"):
        step()
    report = peak_report(next(s for s in laid_out(reader.read(tmp_path / "late")) if s.row.step == 0))
    assert report is not None
    assert report.by_role.get("unknown", 0) - elsewhere <= 0.01 * report.bytes
    assert report.by_role["optimizer_state"] >= 2 * sum(p.nbytes for p in model.parameters())


def test_reserved_memory_far_above_allocated_is_found(tmp_path: Path) -> None:
    """With the allocator's statistics of a full cache, the difference and `expandable_segments` are named; a tight cache gives
    no finding.
    """
    recording = _recorded(held_result, tmp_path / "a", mended=False)
    cache = {"reserved_bytes": 10 << 30, "allocated_bytes": 7 << 30, "split_bytes": 2 << 30, "retries": 3, "settings": ""}
    told = [f for f in explain(replace(recording, meta={**recording.meta, "allocator": cache})).findings if f.id == "allocator-cache"]
    assert "3.0 GiB more" in told[0].text.replace("3.00", "3.0")
    assert "expandable_segments" in told[0].text
    tight = {**cache, "allocated_bytes": 10 << 30}
    assert not [f for f in explain(replace(recording, meta={**recording.meta, "allocator": tight})).findings if f.id == "allocator-cache"]


def _deep(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(128, 128), nn.GELU())), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS + 2):
        model(torch.randn(rows, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _floor_told(path: Path, rows: int) -> tuple[Floor, int, str]:
    """The floor of the step that the finding names, the step's baseline peak, and the finding's text."""
    with lowtide.record(path):
        _deep(rows)
    recording = reader.read(path)
    told = [f for f in explain(recording).findings if f.id == "memory-floor"]
    assert len(told) == 1
    step = next(s for s in laid_out(recording) if s.row.step == told[0].step)
    peak = told[0].changed_peak_bytes
    return floor_of(step, peak), peak, told[0].text


def test_the_reported_minimum_and_largest_batch_are_tight_bounds(tmp_path: Path) -> None:
    """Under a budget of a small batch's baseline peak, 110 % of the largest batch is refused and 75 % of it is held. Memory
    that the process holds beside the model does not grow with the batch.
    """
    rows = 1024
    _deep(rows)
    gc.collect()
    floor, peak, text = _floor_told(tmp_path / "deep", rows)
    elsewhere = torch.zeros(8 << 20, dtype=torch.uint8)
    beside, higher, _ = _floor_told(tmp_path / "beside", rows)
    assert beside.batch_factor == floor.batch_factor, "what else the process holds does not grow with the batch"
    assert beside.bytes - floor.bytes == higher - peak == elsewhere.nbytes
    del elsewhere
    assert f"{floor.batch_factor:.1f} times" in text
    assert floor.batch_factor > 2
    with lowtide.budget(1 << 30) as roomy:
        _deep(rows)
    assert roomy.outcome.plan is not None
    assert floor.bytes <= roomy.outcome.plan.bound_peak_bytes + BYTES
    gc.collect()
    heap().tensor_peak = heap().tensor_live
    with lowtide.budget(peak):
        _deep(int(0.75 * floor.batch_factor * rows))
    assert heap().tensor_peak <= peak
    with pytest.raises(BudgetError), lowtide.budget(peak):
        _deep(int(1.1 * floor.batch_factor * rows))


def _loaded(data: torch.Tensor) -> Iterator[torch.Tensor]:
    for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=64, shuffle=True):
        yield x


READ_AS = {
    "a loader over a tensor data set": _loaded,
    "views": lambda data: iter(data.chunk(100)),
    "copies by index": lambda data: (data[torch.randint(len(data), (64,))] for _ in range(9)),
    "whole": lambda data: iter([data] * 9),
}


@pytest.mark.parametrize("how", READ_AS)
def test_a_data_set_held_in_memory_is_found_however_it_is_sliced(how: str, tmp_path: Path) -> None:
    """Law: if every operator reads a small part of the data, all but that part is reported as a saving; a data set that is one
    batch is not.
    """
    torch.manual_seed(0)
    data, model = torch.randn(8000, 128), nn.Linear(128, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with lowtide.record(tmp_path / "r.lowtide"):
        for _, x in zip(range(4), READ_AS[how](data), strict=False):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    found = [f for f in explain(reader.read(tmp_path / "r.lowtide")).findings if f.id == "resident-data"]
    assert len(found) == (how != "whole")
    assert all(f.saving_bytes >= 0.9 * data.nbytes for f in found)
