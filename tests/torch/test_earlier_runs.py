"""Law: a run follows what an earlier run of the same script recorded, from its first step on, with the baseline's bits.

What the earlier run recorded is never more than a guess: where the script is another one meanwhile, the bits are the same, the
budget is held, and no budget is refused for what the other script needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lowtide
import pytest
import torch
import zoo
from harness import Budgeted, Plain, above_of, budgeted, kept, live_now, plain, plain_of, remembering
from lowtide.base.trace import Op
from lowtide.planning.unit.solve import Front
from lowtide.runtime.control.runtime import Runtime
from lowtide.runtime.control.unit_review import UnitReview
from lowtide.runtime.units import earlier_runs
from lowtide.runtime.units.earlier_runs import EarlierRuns, cache_folder
from lowtide.runtime.units.recorded_unit import RecordedUnit
from lowtide.runtime.units.unit import Unit
from lowtide.runtime.units.unit_mode import Expectation
from torch import nn
from torch.nn import functional as F

STEPS = 6
WIDTH = 192


class Blocks(nn.Module):
    """Blocks whose function of activation can be exchanged, with as many more operators as a test asks for."""

    activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(F.gelu)
    rounds = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(type(self).rounds):
                x = x + self.dropout(type(self).activation(layer(x)))
        return x


def blocks() -> zoo.Job:
    """Gradients are zeroed after the forward: the first unit begins without them."""
    return zoo.simple(Blocks(), lambda m, i: m(torch.randn(512, WIDTH)).square().mean())


def accumulating() -> zoo.Job:
    """Two micro-batches in a step."""
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(i: int) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(512, WIDTH)).square().mean()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return zoo.Job(step, [model], [optimizer])


def gpt() -> zoo.Job:
    """A transformer with dropout and fused attention."""
    return zoo.simple(zoo.GPT(fused=True, layers=3), lambda m, i: zoo.language_loss(m, length=64))


def under(make: Callable[[], zoo.Job], folder: Path, above: float, **how: Any) -> Budgeted:
    """A run that follows what others recorded in the folder."""
    with remembering(folder):
        return budgeted(make, int(above), STEPS, **how)


def policies(run: Budgeted) -> list[str]:
    """How the steps ran."""
    return [s.policy for s in run.outcome.steps]


@pytest.mark.parametrize("share", [0.7, 0.45])
@pytest.mark.parametrize("make", [blocks, accumulating, gpt])
def test_a_second_run_is_planned_from_its_first_step(make: Callable[[], zoo.Job], share: float, tmp_path: Path) -> None:
    """The bits are the baseline's, every step is within the budget, and nothing is searched for."""
    reference = plain_of(make, STEPS)
    first, second = (under(make, tmp_path, above_of(reference, share)) for _ in range(2))
    assert first.bits == second.bits == reference.bits
    assert policies(first)[0] == "online"
    assert not first.outcome.units_of_earlier_runs
    assert set(policies(second)) == {"planned"}
    assert kept(second), second.over
    assert second.outcome.units_of_earlier_runs >= STEPS - 1
    assert second.outcome.plan is not None
    assert first.outcome.plan is not None
    assert second.outcome.plan.bound_peak_bytes == pytest.approx(first.outcome.plan.bound_peak_bytes, abs=64 << 10)


def test_a_share_of_the_baseline_is_known_in_the_first_step(tmp_path: Path) -> None:
    """The first step has no budget otherwise, because its peak is what the share is of."""
    reference = plain_of(blocks, STEPS)
    for _ in range(2):
        with remembering(tmp_path), lowtide.budget("60%") as run:
            assert zoo.run(blocks, STEPS) == reference.bits
    steps = run.outcome.steps
    assert {s.policy for s in steps} == {"planned"}
    assert max(s.peak_bytes for s in steps) <= run.outcome.budget_bytes


@pytest.mark.parametrize("before", [0.7, 0.45])
def test_another_budget_needs_no_recording_either(before: float, tmp_path: Path) -> None:
    """A plan for it is searched with what was recorded."""
    reference = plain_of(blocks, STEPS)
    under(blocks, tmp_path, above_of(reference, before))
    run = under(blocks, tmp_path, above_of(reference, 0.55))
    assert run.bits == reference.bits
    assert set(policies(run)) == {"planned"}
    assert kept(run), run.over


def exchanged(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> Plain:
    """Change the model so that its units look the same and run other operators; returns its baseline run."""
    for name, value in attributes.items():
        monkeypatch.setattr(Blocks, name, staticmethod(value) if callable(value) else value)
    return plain(blocks, STEPS)


@pytest.mark.parametrize("attributes", [{"activation": torch.sin}, {"rounds": 2}, {"activation": torch.relu, "rounds": 3}])
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_script_that_runs_other_operators_meanwhile_keeps_bits_and_budget(
    attributes: dict[str, Any], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded of the other operators is replaced: the third run is planned again."""
    under(blocks, tmp_path, above_of(plain_of(blocks, STEPS), share))
    reference = exchanged(monkeypatch, **attributes)
    second, third = (under(blocks, tmp_path, above_of(reference, share)) for _ in range(2))
    assert second.bits == third.bits == reference.bits
    assert kept(second), second.over
    assert kept(third), third.over
    assert policies(second)[-1] == "planned"
    assert set(policies(third)) == {"planned"}


def test_no_budget_is_refused_for_what_another_script_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier script kept three times as much; this one needs no plan at all within the same budget."""
    with pytest.MonkeyPatch.context() as other:
        reference = exchanged(other, rounds=3)
        under(blocks, tmp_path, above_of(reference, 0.9))
    reference = plain_of(blocks, STEPS)
    run = under(blocks, tmp_path, reference.above_bytes + (1 << 20))
    assert run.bits == reference.bits
    assert not run.outcome.over


def test_a_budget_that_cannot_be_held_is_refused_by_what_this_run_recorded(tmp_path: Path) -> None:
    """The first steps run as in a first run, and the refusal tells the same minimum."""
    reference = plain_of(blocks, STEPS)
    under(blocks, tmp_path, above_of(reference, 0.7))
    told = []
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(lowtide.BudgetError) as refused:
            under(blocks, folder, 0.02 * reference.above_bytes, without="move-gradients")
        told.append(refused.value.bound_bytes - refused.value.budget_bytes)
    assert told[0] == pytest.approx(told[1], abs=64 << 10)


@pytest.mark.parametrize("size", ["60%", "minimum"])
def test_a_budget_that_follows_from_another_script_falls_to_what_this_one_needs(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier script kept three times as much; within two steps the budget is that of a first run."""
    reference, budgets = plain_of(blocks, STEPS), []
    with pytest.MonkeyPatch.context() as other:
        heavy = exchanged(other, rounds=3)
        for _ in range(2):
            with remembering(tmp_path / "kept"), lowtide.budget(size):
                assert zoo.run(blocks, STEPS) == heavy.bits
    for folder in ("none", "kept"):
        base = live_now()
        with remembering(tmp_path / folder), lowtide.budget(size) as run:
            assert zoo.run(blocks, STEPS) == reference.bits
        budgets.append(run.outcome.budget_bytes - base)
    assert budgets[1] == pytest.approx(budgets[0], rel=0.15)


def test_parameters_that_a_first_call_makes_have_no_shape_yet(tmp_path: Path) -> None:
    """A lazy layer's parameters have none before; asking for it ended the run."""

    def make() -> zoo.Job:
        model = nn.Sequential(nn.LazyLinear(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LazyLinear(WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> torch.Tensor:
            loss = model(torch.randn(512, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return zoo.Job(step, [], [optimizer])

    reference = plain(make, STEPS)
    for _ in range(2):
        run = under(make, tmp_path, above_of(reference, 0.8))
        assert run.bits == reference.bits
    assert policies(run)[-1] == "planned"


@pytest.mark.parametrize("wrong", ["divergence", "crossing"])
def test_a_recording_that_leads_astray_is_given_up_at_once(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of this run's units: they are recorded and planned as in a first run."""
    reference = plain_of(blocks, STEPS)
    under(blocks, tmp_path, above_of(reference, 0.6))
    if wrong == "divergence":
        monkeypatch.setattr(RecordedUnit, "unfreed_bytes", lambda entry, _: -(1 << 40) if entry.is_untried else 0)
    else:
        verify = UnitReview._verify

        def crossing(review: UnitReview, unit: Unit, expected: Expectation) -> None:
            with pytest.MonkeyPatch.context() as high:
                if expected.entry.is_untried:
                    high.setattr(review._interception.meter, "op_peak", lambda: 1 << 40)
                verify(review, unit, expected)

        monkeypatch.setattr(UnitReview, "_verify", crossing)
    run = under(blocks, tmp_path, above_of(reference, 0.6))
    assert run.bits == reference.bits
    assert not run.outcome.units_of_earlier_runs
    assert policies(run)[-1] == "planned"
    assert kept(run), run.over


def test_new_sizes_in_every_step_are_not_described_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the parameters of a large model takes milliseconds, and each size is a kind of its own."""
    described: list[object] = []
    named = earlier_runs._class
    monkeypatch.setattr(earlier_runs, "_class", lambda item: (described.append(item), named(item))[1])

    def make() -> zoo.Job:
        return zoo.simple(Blocks(), lambda m, i: m(torch.randn(256 + 8 * i, WIDTH)).square().mean())

    reference = plain_of(make, STEPS)
    run = under(make, tmp_path, above_of(reference, 0.7))
    assert run.bits == reference.bits
    assert len(described) == 1


def test_modules_that_share_their_first_parameter_have_files_of_their_own(tmp_path: Path) -> None:
    """A part of a model is called before the whole."""

    def make() -> zoo.Job:
        inner = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        outer = nn.Sequential(inner, *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.01)

        def step(i: int) -> torch.Tensor:
            for model in (inner, outer):
                loss = model(torch.randn(512, WIDTH)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return zoo.Job(step, [outer], [optimizer])

    reference = plain_of(make, STEPS)
    for _ in range(2):
        run = under(make, tmp_path, above_of(reference, 0.7))
        assert run.bits == reference.bits
        assert kept(run), run.over
    assert len(list(tmp_path.iterdir())) == 2
    assert set(policies(run)) == {"planned"}


def test_a_budget_that_no_kept_plan_fits_does_not_remove_what_was_kept(tmp_path: Path) -> None:
    """The next run may have the former budget again."""
    reference = plain_of(blocks, STEPS)
    above = above_of(reference, 0.6)
    under(blocks, tmp_path, above)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(lowtide.BudgetError):
        under(blocks, tmp_path, 0.02 * reference.above_bytes, without="move-gradients")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert set(policies(under(blocks, tmp_path, above))) == {"planned"}


def test_an_optimizer_with_more_state_is_counted(tmp_path: Path) -> None:
    """The earlier run had none: what the recorded base lacks is added, and the budget is held."""

    def make(kind: type[torch.optim.Optimizer]) -> Callable[[], zoo.Job]:
        def job() -> zoo.Job:
            model = Blocks()
            optimizer = kind(model.parameters(), lr=1e-3)

            def step(i: int) -> torch.Tensor:
                loss = model(torch.randn(512, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return zoo.Job(step, [model], [optimizer])

        return job

    light, heavy = make(torch.optim.SGD), make(torch.optim.Adam)
    under(light, tmp_path, above_of(plain(light, STEPS), 0.6))
    reference = plain(heavy, STEPS)
    run = under(heavy, tmp_path, above_of(reference, 0.6))
    assert run.bits == reference.bits
    assert kept(run), run.over
    assert run.outcome.units_of_earlier_runs


def test_damaged_files_are_not_read(tmp_path: Path) -> None:
    """A file that is cut off or changed anywhere is as good as none."""
    reference = plain_of(blocks, STEPS)
    above = above_of(reference, 0.6)
    under(blocks, tmp_path, above)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for damaged in (whole[: len(whole) // 2], b"", bytes(changed)):
        file.write_bytes(damaged)
        run = under(blocks, tmp_path, above)
        assert run.bits == reference.bits
        assert policies(run)[0] == "online"
    assert file.read_bytes() != bytes(changed), "the last run has replaced it"


def test_files_that_led_astray_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of the other script are never planned, so nothing replaces what was recorded."""
    under(blocks, tmp_path, above_of(plain_of(blocks, STEPS), 0.6))
    reference = exchanged(monkeypatch, rounds=3)
    with remembering(tmp_path), lowtide.budget(reference.above_bytes * 4):
        zoo.run(blocks, 1)
    before = list(tmp_path.iterdir())
    assert before, "one step proves nothing"
    monkeypatch.setattr(earlier_runs, "_file", lambda entry: None)
    under(blocks, tmp_path, above_of(reference, 0.6))
    assert not list(tmp_path.iterdir())


def test_operators_that_this_process_lacks_are_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that registers them may not be loaded."""
    reference = plain_of(blocks, STEPS)
    above = above_of(reference, 0.6)
    under(blocks, tmp_path, above)
    found = earlier_runs._operator
    monkeypatch.setattr(earlier_runs, "_operator", lambda name: None if "gelu" in name else found(name))
    run = under(blocks, tmp_path, above)
    assert run.bits == reference.bits
    assert policies(run)[0] == "online"


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    reference = plain_of(blocks, STEPS)
    (tmp_path / "taken").write_text("")
    run = under(blocks, tmp_path / "taken", above_of(reference, 0.6))
    assert run.bits == reference.bits


def test_the_restored_front_answers_as_the_one_that_was_kept(tmp_path: Path) -> None:
    """The same recording, the same plans for the same budgets, and no budget is searched again."""
    reference = plain_of(blocks, STEPS)
    entries = []
    with remembering(tmp_path), pytest.MonkeyPatch.context() as patched:
        stop = Runtime.stop

        def stopped(runtime: Runtime, **how: bool) -> None:
            entries.extend(runtime.knowledge.recordings.latest())
            stop(runtime, **how)

        patched.setattr(Runtime, "stop", stopped)
        budgeted(blocks, int(above_of(reference, 0.6)), STEPS)
    followed = [entry for _, entry in entries if entry.followed]
    for entry in followed:
        file = earlier_runs._file(entry)
        assert file is not None
        again = earlier_runs.front_of(file.solved)
        assert again.problem == entry.problem
        assert again.bound == entry.front.bound
        for asked in entry.front.kept().proven:
            mine, other = entry.front.at(asked), again.at(asked)
            assert (mine.status, mine.lowest_bytes, mine.bound_seconds) == (other.status, other.lowest_bytes, other.bound_seconds)
            assert mine.state is not None
            assert other.state is not None
            assert mine.state.decisions == other.state.decisions
            assert again.solve_seconds < 60
    assert followed


def test_a_front_that_was_never_searched_is_not_searched_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for everything there is one state, and the walk would take seconds at the script's end."""
    reference = plain_of(blocks, STEPS)
    monkeypatch.setattr(Front, "_search", lambda *_, **__: pytest.fail("searched"))
    for _ in range(2):
        run = under(blocks, tmp_path, 2 * reference.above_bytes)
        assert run.bits == reference.bits
    assert run.outcome.units_of_earlier_runs


def test_what_a_run_needs_of_another_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable names a folder, or switches off; otherwise the user's folder for caches is used."""
    monkeypatch.setenv("LOWTIDE_CACHE", "off")
    assert cache_folder() is None
    assert EarlierRuns.of(("script",)) is None
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("LOWTIDE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lowtide"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "lowtide"


def test_scripts_that_ran_longest_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the cache does not grow for ever."""
    monkeypatch.setattr(earlier_runs, "_SCRIPTS", 2)
    reference = plain_of(blocks, STEPS)
    names = [digit * 32 for digit in "abc"]
    for number, name in enumerate(names):
        under(blocks, tmp_path / name, above_of(reference, 0.7))
        earlier_runs.os.utime(tmp_path / name, (number, number))
    under(blocks, tmp_path / names[2], above_of(reference, 0.7))
    assert sorted(p.name for p in tmp_path.iterdir()) == names[1:]


def test_nothing_but_its_own_files_is_ever_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be one of the user's: entries by other names stay, and a folder with others' files in it, too."""
    monkeypatch.setattr(earlier_runs, "_SCRIPTS", 0)
    monkeypatch.setattr(earlier_runs, "_FILES", 0)
    old, partial = tmp_path / ("a" * 32), f"{'b' * 32}.17.partial"
    for folder in (tmp_path / "thesis", old):
        folder.mkdir()
        (folder / "chapter.tex").write_text("")
    (old / ("c" * 32)).write_text("")
    (tmp_path / "notes.txt").write_text("")
    mine = tmp_path / ("d" * 32)
    mine.mkdir()
    (mine / partial).write_text("")
    (mine / "data.csv").write_text("")
    under(blocks, mine, above_of(plain_of(blocks, STEPS), 0.7))
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == [f"{old.name}/chapter.tex", f"{mine.name}/data.csv", "notes.txt", "thesis/chapter.tex"]


def test_seconds_are_kept_as_they_were_measured_last(tmp_path: Path) -> None:
    """A cold recording's seconds would be those of a first call."""
    reference = plain_of(blocks, STEPS)
    under(blocks, tmp_path, above_of(reference, 0.6))
    (path,) = tmp_path.iterdir()
    file = earlier_runs.unsealed(path.read_bytes(), earlier_runs._File)
    assert file is not None
    assert file.timed == 1
    assert all(e.seconds >= 0 for e in earlier_runs.front_of(file.solved).problem.trace.events if isinstance(e, Op))
