"""Law: in everyday loops no finding advises freeing something used again, and what could be freed is found with its saving."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowtide.base.trace import Phase
import pytest
import torch
from harness import heap, live_now
from lowtide.recording.explanation.explanation import explain
from lowtide.recording.findings.all_findings import would_fit
from lowtide.recording.recorded_step import laid_out
from lowtide.recording.peak_report import peak_report
from lowtide.recording.whatif import Finding
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowtide
from lowtide.recording import file_format, reader

SHARE = 0.02
"""A saving may be off by so much of itself."""
BYTES = 4096
"""Or by so much: generator states, counters."""
WIDTH = 256

Script = Callable[[bool], None]


def _net(out: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, out))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 64) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(rows, WIDTH)), torch.randint(0, 10, (rows,))).backward()
    optimizer.step()


def _recorded(script: Script, file: Path, *, mended: bool = False, whole: bool = True) -> reader.Recording:
    """The recording of a script, marked as one that ran to its end if ``whole``."""
    torch.manual_seed(0)
    gc.collect()
    with lowtide.record(file):
        script(mended)
    recording = reader.read(file)
    return replace(recording, meta={**recording.meta, "whole": whole})


def _told(recording: reader.Recording, kind: str) -> list[Finding]:
    return [f for f in explain(recording).findings if f.id == kind]


def held_out_data(mended: bool) -> None:  # noqa: FBT001
    """Evaluated on in the last steps, or (mended) never."""
    held_out = torch.randn(4000, WIDTH)
    model = _net()
    optimizer = _sgd(model)
    for i in range(6):
        _update(model, optimizer)
        if i >= 4 and not mended:
            with torch.no_grad():
                model(held_out[:100])
    assert len(held_out)


def test_data_that_a_later_step_reads_is_not_called_unused(tmp_path: Path) -> None:
    """Only data that nothing reads until the script's end is reported."""
    assert not _told(_recorded(held_out_data, tmp_path / "a"), "held-result")
    assert not _told(_recorded(held_out_data, tmp_path / "b", mended=True, whole=False), "held-result")
    unused = _told(_recorded(held_out_data, tmp_path / "c", mended=True), "held-result")
    assert ["held_out" in f.text for f in unused] == [True]


def large_scalar(mended: bool) -> None:  # noqa: FBT001, ARG001
    """On the CPU the mean of a loss shares a storage as large as its input."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = _sgd(model)
    for _ in range(4):
        x = torch.randn(1024, WIDTH)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_loss_is_held_only_in_the_forward_of_the_next_step(tmp_path: Path) -> None:
    """The variable holds the former loss until there is a new one; no finding advises deleting a loss before its own backward.
    """
    recording = _recorded(large_scalar, tmp_path / "a")
    step = next(s for s in recording.steps if s.step == 2)
    assert step.entries is not None
    held = step.entries[step.entries["kind"] == file_format.EntryKind.HELD]
    names = [(recording.names[e["b"]].split(" ")[0], file_format.PHASES[e["phase"]]) for e in held]
    assert names == [("loss", Phase.FORWARD)]


def carried_state(mended: bool) -> None:  # noqa: FBT001, ARG001
    """Each of many steps hands a state to the next."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = _sgd(model)
    state = torch.zeros(128, WIDTH)
    for _ in range(60):
        optimizer.zero_grad()
        state = model(state).tanh()
        state.square().mean().backward()
        state = state.detach()
        optimizer.step()


def test_later_uses_are_noted_only_for_blocks_of_kept_steps(tmp_path: Path) -> None:
    """The notes of a long run do not grow with its number of steps."""
    recording = _recorded(carried_state, tmp_path / "a")
    kept = [row.step for row in recording.steps if row.entries is not None]
    assert len(recording.steps) > 50
    assert 0 < len(recording.meta["later"]) <= 3 * len(kept)
    assert not _told(recording, "held-result")


def test_the_use_of_a_block_of_the_last_kept_step_is_noted(tmp_path: Path) -> None:
    """A state is made in a step whose entries are kept, and last read in the next, whose entries are not."""
    recording = _recorded(carried_state, tmp_path / "a")
    kept = {row.step for row in recording.steps if row.entries is not None}
    last = next(step for step in sorted(kept) if 0 < step < 58 and step + 1 not in kept)
    assert any(read == last + 1 for _, read, _ in recording.meta["later"])


@pytest.mark.parametrize("later", [None, 5, "x", [1], [[1, 2]], [[1, 2, None]], {"a": 1}])
def test_malformed_later_uses_in_a_file_are_ignored(later: object, tmp_path: Path) -> None:
    recording = _recorded(large_scalar, tmp_path / "a")
    without = {name: value for name, value in recording.meta.items() if name != "later"}
    assert explain(replace(recording, meta={**without, "later": later})).findings == explain(replace(recording, meta=without)).findings


def sampled_buffer(mended: bool) -> None:  # noqa: FBT001
    """Some tensors of a list are read again, some are not; or (mended) none is."""
    model = _net()
    optimizer = _sgd(model)
    seen: list[torch.Tensor] = []
    for i in range(8):
        seen.append(torch.randn(100, WIDTH))
        if not mended and i % 2:
            with torch.no_grad():
                model(torch.cat(seen[::3]))
        _update(model, optimizer)


def mask_of_a_layer(mended: bool) -> None:  # noqa: FBT001, ARG001
    """A mask made before training and read in every step, also in the last, which is the highest."""
    model = _net()
    optimizer = _sgd(model)
    keep = (torch.rand(400, WIDTH) > 0.5).float()
    for i in range(5):
        rows = 400 if i == 4 else 300
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(rows, WIDTH) * keep[:rows]), torch.randint(0, 10, (rows,))).backward()
        optimizer.step()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("script", [sampled_buffer, mask_of_a_layer])
def test_tensors_read_now_and_then_are_not_called_unused(script: Script, whole: bool, tmp_path: Path) -> None:
    """A buffer that is sampled from counts as in use as a whole."""
    assert not _told(_recorded(script, tmp_path / "a", whole=whole), "held-result")


def test_a_list_that_nothing_reads_is_found_as_held(tmp_path: Path) -> None:
    found = _told(_recorded(sampled_buffer, tmp_path / "a", mended=True), "held-result")
    assert ["seen[...]" in f.text for f in found] == [True]


def averaged(mended: bool) -> None:  # noqa: FBT001
    """An average of the parameters that is updated every third step, or (mended) never."""
    model = _net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = _sgd(model)
    for i in range(8):
        _update(model, optimizer)
        if i % 3 == 2 and not mended:
            average.update_parameters(model)
            with torch.no_grad():
                average(torch.randn(8, WIDTH))


def test_an_average_that_later_steps_write_is_not_a_forgotten_copy(tmp_path: Path) -> None:
    """An average that is never written is."""
    assert not _told(_recorded(averaged, tmp_path / "a"), "model-copies")
    assert not _told(_recorded(averaged, tmp_path / "b"), "held-result")
    assert len(_told(_recorded(averaged, tmp_path / "c", mended=True), "model-copies")) == 1


def summed_validation(mended: bool) -> None:  # noqa: FBT001
    """The validation's loss is summed up with its graphs."""
    model = _net()
    optimizer = _sgd(model)
    for _ in range(3):
        for _ in range(2):
            _update(model, optimizer, 256)
        model.eval()
        total = torch.zeros(())
        with torch.set_grad_enabled(not mended):
            for _ in range(5):
                x = torch.randn(1024, WIDTH)
                total = total + F.cross_entropy(model(x), torch.randint(0, 10, (1024,)))
        model.train()


def validation_whose_loss_is_kept(mended: bool) -> None:  # noqa: FBT001
    """Its loss is kept to the end, with its graph; training goes on."""
    model = _net()
    optimizer = _sgd(model)
    kept = []
    for i in range(4):
        _update(model, optimizer, 256)
        if i == 1:
            with torch.set_grad_enabled(not mended):
                kept.append(F.cross_entropy(model(torch.randn(4096, WIDTH)), torch.randint(0, 10, (4096,))))


def validation_in_batches(mended: bool) -> None:  # noqa: FBT001
    """Each batch stays in its variable until the next one is there, with a graph or without; one of them goes through a wider head."""
    model, head = _net(), nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = _sgd(model)
    for _ in range(4):
        _update(model, optimizer, 256)
        with torch.set_grad_enabled(not mended):
            for i in range(3):
                x = torch.randn(4096, WIDTH)
                out = head(x) if i == 1 else model(x)
        del x, out


def outputs_of_the_batch_before(mended: bool) -> None:  # noqa: FBT001
    """The logits stay in a variable until the next ones are there, through the backward and the next forward."""
    model = _net(4000)
    optimizer = _sgd(model)
    for _ in range(4):
        x = torch.randn(512, WIDTH)
        logits = model(x)
        loss = F.cross_entropy(logits, torch.randint(0, 4000, (512,)))
        if mended:
            del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def outputs_of_the_evaluated_batch_before(mended: bool) -> None:  # noqa: FBT001
    """So do an evaluation's."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 2000))
    optimizer = _sgd(model)
    for _ in range(3):
        _update(model, optimizer)
        with torch.no_grad():
            for _ in range(3):
                out = model(torch.randn(1024, WIDTH))
                assert out.argmax(1).sum().item() >= 0
                if mended:
                    del out


def zeroed_by_a_factor(mended: bool) -> None:  # noqa: FBT001
    """Without an optimizer, and without ``zero_``."""
    zeroed_by_hand(mended, factor=True)


def zeroed_by_hand(mended: bool, *, factor: bool = False) -> None:  # noqa: FBT001
    """Without an optimizer."""
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1000))
    for _ in range(5):
        loss = F.cross_entropy(model(torch.randn(1024, WIDTH)), torch.randint(0, 1000, (1024,)))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad
                if mended:
                    p.grad = None
                elif factor:
                    p.grad *= 0
                else:
                    p.grad.zero_()
        del loss


def graph_after_a_high_setup(mended: bool) -> None:  # noqa: FBT001
    """The setup stands above every step; the evaluation of a late one records a graph."""
    data = torch.randn(20_000, WIDTH, dtype=torch.float64).float()[:2000].clone()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    optimizer = _sgd(model)
    for i in range(8):
        _update(model, optimizer)
        if i == 5:
            with torch.set_grad_enabled(not mended):
                model(data).argmax(1)


CASES: dict[str, tuple[Script, str]] = {
    "summed validation": (summed_validation, "evaluation-graph"),
    "validation whose loss is kept": (validation_whose_loss_is_kept, "evaluation-graph"),
    "validation in batches": (validation_in_batches, "evaluation-graph"),
    "outputs of the batch before": (outputs_of_the_batch_before, "held-result"),
    "outputs of the evaluated batch before": (outputs_of_the_evaluated_batch_before, "held-result"),
    "zeroed by hand": (zeroed_by_hand, "zeroed-gradients"),
    "zeroed by a factor": (zeroed_by_a_factor, "zeroed-gradients"),
    "graph after a high setup": (graph_after_a_high_setup, "evaluation-graph"),
}


@pytest.mark.long("zeroed by a factor", "validation in batches")
@pytest.mark.parametrize("name", CASES)
def test_the_saving_of_a_finding_is_what_the_real_change_saves(name: str, tmp_path: Path) -> None:
    """The change is made for real in the script. An evaluation that records a graph counts as part of the next step, so for
    these the highest peaks of the runs are compared.
    """
    script, kind = CASES[name]
    _recorded(script, tmp_path / "warm")
    flawed, mended = _recorded(script, tmp_path / "a"), _recorded(script, tmp_path / "b", mended=True)
    found = _told(flawed, kind)
    assert len(found) == 1, [(f.id, f.text) for f in explain(flawed).findings]
    assert not _told(mended, kind)

    def above(recording: reader.Recording) -> int:
        peaks = {r.step: r.peak_bytes for r in recording.steps if r.step >= 0}
        highest = max(peaks.values()) if kind == "evaluation-graph" else peaks[found[0].step]
        return highest - recording.steps[0].start_bytes

    saved = above(flawed) - above(mended)
    assert saved > 0
    assert abs(found[0].saving_bytes - saved) <= max(SHARE * saved, BYTES), (found[0], saved)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.second = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x).relu()
        return self.first(h), self.second(h)


def head_without_a_loss(mended: bool) -> None:  # noqa: FBT001, ARG001
    """This task trains one of two heads."""
    model = _TwoHeads()
    optimizer = _sgd(model)
    for _ in range(5):
        optimizer.zero_grad()
        out, _unused = model(torch.randn(2048, WIDTH))
        F.cross_entropy(out, torch.randint(0, 10, (2048,))).backward()
        optimizer.step()


def test_a_head_without_a_loss_is_not_called_an_evaluation(tmp_path: Path) -> None:
    assert not _told(_recorded(head_without_a_loss, tmp_path / "a"), "evaluation-graph")


def failing_validation(mended: bool) -> None:  # noqa: FBT001
    """Memory runs out in the first validation, whose graphs are recorded."""
    model = _net()
    optimizer = _sgd(model)
    for _ in range(4):
        _update(model, optimizer)
    model.eval()
    total = torch.zeros(())
    with torch.set_grad_enabled(not mended):
        for _ in range(5):
            total = total + F.cross_entropy(model(torch.randn(1024, WIDTH)), torch.randint(0, 10, (1024,)))


def outputs_in_a_list(mended: bool) -> None:  # noqa: FBT001
    """Every batch's outputs are kept, without their graphs."""
    model = _net(512)
    optimizer = _sgd(model)
    kept = []
    for _ in range(12):
        optimizer.zero_grad()
        out = model(torch.randn(512, WIDTH))
        out.square().mean().backward()
        optimizer.step()
        if not mended:
            kept.append(out.detach())
        del out


def outputs_that_are_read(mended: bool) -> None:  # noqa: FBT001, ARG001
    """The outputs of the last batches are compared with each new one."""
    model = _net(512)
    optimizer = _sgd(model)
    kept: list[torch.Tensor] = []
    for i in range(12):
        optimizer.zero_grad()
        out = model(torch.randn(512 if i < 10 else 1024, WIDTH))
        sum((out[:512] - other).square().mean() for other in [*kept[-8:], torch.zeros(512, 512)]).backward()
        optimizer.step()
        kept = [*kept[-7:], out.detach()[:512]]
        del out


def states_of_the_best(mended: bool) -> None:  # noqa: FBT001
    """The state of every better model is kept, or (mended) only the best one's; memory runs out while one is copied, or in
    training.
    """
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = _sgd(model)
    kept: list[dict[str, torch.Tensor]] = []
    for _ in range(8):
        _update(model, optimizer, 8)
        kept = [*([] if mended else kept), copy.deepcopy(model.state_dict())]


def evaluated_copies(mended: bool) -> None:  # noqa: FBT001, ARG001
    """Five copies of the model, each of which was evaluated once."""
    model = _net()
    optimizer = _sgd(model)
    kept = []
    for _ in range(5):
        _update(model, optimizer)
        kept.append(copy.deepcopy(model))
        with torch.no_grad():
            kept[-1](torch.randn(4, WIDTH))
    _update(model, optimizer)


def test_a_single_kept_model_state_is_not_reported(tmp_path: Path) -> None:
    """It is what the finding on many copies advises."""
    recording = _recorded(states_of_the_best, tmp_path / "a", mended=True)
    assert not {f.id for f in explain(recording).findings} & {"model-copies", "held-result"}
    assert len(_told(_recorded(states_of_the_best, tmp_path / "b"), "model-copies")) == 1


def test_model_copies_that_were_called_are_counted(tmp_path: Path) -> None:
    [found] = _told(_recorded(evaluated_copies, tmp_path / "a"), "model-copies")
    weights = sum(p.nbytes for p in _net().parameters())
    assert "5 more copies of the parameters" in found.text
    assert abs(found.saving_bytes - 5 * weights) <= SHARE * 5 * weights


FAILING: dict[str, tuple[Script, str]] = {
    "validation": (failing_validation, "evaluation-graph"),
    "zeroed by hand": (zeroed_by_hand, "zeroed-gradients"),
    "outputs of the evaluated batch before": (outputs_of_the_evaluated_batch_before, "held-result"),
    "outputs in a list": (outputs_in_a_list, "held-result"),
    "states of the best": (states_of_the_best, "model-copies"),
}


@pytest.mark.parametrize("name", FAILING)
def test_running_out_of_memory_is_explained_by_the_avoidable_cause(name: str, tmp_path: Path) -> None:
    """With a cap between the peaks of the flawed and the mended script, the planted cause is the first finding that alone
    would let it fit.
    """
    script, kind = FAILING[name]
    peaks = []
    for mended in (True, False, True, False):  # the first two make libraries warm
        live = live_now()
        heap().tensor_peak = live
        script(mended)
        peaks.append(heap().tensor_peak - live)
    cap = live_now() + sum(peaks[2:]) // 2
    heap().cap = cap
    try:
        with pytest.raises(RuntimeError, match="allocate memory"), lowtide.record(tmp_path / "oom"):
            script(False)  # noqa: FBT003
    finally:
        heap().cap = 0
    fitting = would_fit(explain(reader.read(tmp_path / "oom")).findings, cap)
    assert fitting[0].id == kind, [(f.id, f.text) for f in fitting]


def test_outputs_read_in_every_step_are_not_blamed_when_memory_runs_out(tmp_path: Path) -> None:
    """The step that ran out of memory was cut short before it could read them."""
    heap().tensor_peak = live = live_now()
    outputs_that_are_read(False)  # noqa: FBT003
    heap().cap = live + (heap().tensor_peak - live) * 9 // 10
    try:
        with pytest.raises(RuntimeError, match="allocate memory"), lowtide.record(tmp_path / "oom"):
            outputs_that_are_read(False)  # noqa: FBT003
    finally:
        heap().cap = 0
    torch.ones((), requires_grad=True).backward()  # after an error the engine's queue holds the graph until it runs again
    recording = reader.read(tmp_path / "oom")
    assert not [f for f in _told(recording, "held-result") if "kept" in f.text]


class _Distances(nn.Module):
    """A local variable of its forward outlives its use."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.out = nn.Parameter(torch.randn(500, 32)), nn.Linear(500, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist(x, self.points.detach())
        near = (distances < 8).float()
        return self.out(near)


def test_the_variable_that_holds_memory_when_it_runs_out_is_named(tmp_path: Path) -> None:
    """The variable may be in use, so no finding advises freeing it."""
    model = _Distances()
    x = torch.randn(1000, 32)
    model(x)
    heap().cap = live_now() + (10 << 20)
    try:
        with pytest.raises(RuntimeError, match="allocate memory"), lowtide.record(tmp_path / "oom"):
            model(x)
    finally:
        heap().cap = 0
    recording = reader.read(tmp_path / "oom")
    report = peak_report(next(s for s in laid_out(recording) if s.denied.any()))
    assert report is not None
    named = {str(row["held_by"]).split(" ")[0] for row in report.top}
    assert {"distances", "near"} & named, (report.op, report.top)
    assert not _told(recording, "held-result")


def two_backwards(mended: bool) -> None:  # noqa: FBT001, ARG001
    """The second is the higher one."""
    small, large = nn.Linear(64, 8), nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.SGD([*small.parameters(), *large.parameters()], 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        small(torch.randn(64, 64)).square().mean().backward()
        large(torch.randn(2048, WIDTH)).square().mean().backward()
        optimizer.step()


def test_the_rise_of_a_backward_is_measured_from_its_own_start(tmp_path: Path) -> None:
    """The activations of the second forward are not part of what its backward adds; the named parts add up to the rise."""
    found = _told(_recorded(two_backwards, tmp_path / "a"), "backward-extra")
    assert len(found) == 1
    assert not re.search(r"what grew: .*(activation|input)", found[0].text), found[0].text
    rise, *parts = [float(n) for n in re.findall(r"([\d.]+) MiB", found[0].text)]
    assert sum(parts) == pytest.approx(rise, rel=0.1), "all that it gained, less what it gave back"
