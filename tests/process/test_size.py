"""Laws of `min`, `batch` and `predict` on real runs.

The minimum passes under a hard cap and 1 % less fails; sizes reach the script however it takes them; a killed `batch` goes on
where it was; predictions at eight times the largest recorded size are within 1 % of real runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lowtide.base.errors import UsageError
from lowtide.runtime.agent.script_constants import with_constants
from lowtide.studies.size.minimum import CLOSE
from lowtide.studies.size.predict import Model
from lowtide.report.size_batch import show_batch
from lowtide.studies.size.throughput import Point, Rate, SizeResults, SizeStudy, knee, largest, measure
from lowtide.studies.size.trial import TrialRequest, TrialResult, Target, record, run
from lowtide.studies.size.vary import ScriptSetting, Vary, option_of, parse_axis, with_option
from lowtide.recording.reader import read

SCRIPT = Path(__file__).parent / "scripts" / "sized.py"
TARGET = Target(script=str(SCRIPT), module=False, seconds=120)


def lowtide(*words: str, code: int = 0, cwd: Path | None = None) -> str:
    """Run a verb as a user does; returns what it prints on standard error."""
    done = subprocess.run([sys.executable, "-m", "lowtide", *words], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stderr


# --- how sizes are set -----------------------------------------------------------------------------------------------


def test_an_option_is_replaced_in_place_or_appended() -> None:
    assert with_option(("--lr", "1", "--batch-size", "4", "x"), "batch-size", "8") == ("--lr", "1", "--batch-size", "8", "x")
    assert with_option(("--batch_size=4",), "batch-size", "8") == ("--batch_size=8",)
    assert with_option(("data",), "batch", "8") == ("data", "--batch", "8")
    assert with_option(("-b", "1"), "b", "2") == ("-b", "2")
    assert option_of(("--batch_size=4",), "batch-size") == 4
    assert option_of(("--batch-size", "16", "y"), "batch_size") == 16
    assert option_of(("batch-size", "16"), "batch-size") is None


def test_axes_are_parsed_and_malformed_ones_refused() -> None:
    axis = parse_axis("batch-size=1,2,4,...", "train.py")
    each = axis.each()
    assert [next(each) for _ in range(6)] == ["1", "2", "4", "8", "16", "32"]
    assert parse_axis("env:BATCH=2", "t.py").kind == "environment"
    assert parse_axis("train.py:BATCH=2", "dir/train.py").kind == "constant"
    for wrong in ("batch", "batch=", "=1", "batch=a", "batch=0", "batch=1,1", "other.py:X=1", "batch=4,...", "batch=4,2,..."):
        with pytest.raises(UsageError):
            parse_axis(wrong, "train.py")


def test_constants_are_set_where_the_script_assigns_them() -> None:
    space: dict[str, Any] = {}
    exec(compile(with_constants(b"A = 1\nB: int = 2\nC = A + B\n", {"A": "10", "B": "5"}, "s.py"), "s.py", "exec"), space)  # noqa: S102
    assert space["C"] == 15
    with pytest.raises(UsageError, match="no line `D = ...`"):
        with_constants(b"A = 1\n", {"D": "1"}, "s.py")


@pytest.mark.long
def test_sizes_reach_the_script_by_option_variable_and_constant() -> None:
    def peak(*axes: str) -> int:
        vary = Vary([parse_axis(a, str(SCRIPT)) for a in axes], ())
        return run(TARGET, vary.set(next(vary.points())), TrialRequest(steps=3)).peak_bytes

    small = peak("batch-size=4")
    assert peak("env:BATCH=4") == small
    assert peak("batch-size=16") == peak("env:BATCH=16") > 2 * small
    assert peak("sized.py:WIDTH=64") > 1.5 * small


# --- trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_trial_ends_after_its_steps_or_at_its_cap() -> None:
    """Above the cap it ends out of memory; a budget within the cap holds."""
    whole = run(TARGET, ScriptSetting(arguments=("--batch-size", "32")), TrialRequest(steps=4))
    assert whole.ended == "ok"
    assert len(whole.steps) == 4
    assert whole.cold_peak_bytes < whole.warm_peak_bytes, "the optimizer's states come with the first step"
    capped = run(TARGET, ScriptSetting(arguments=("--batch-size", "32")), TrialRequest(steps=4, cap_bytes=whole.peak_bytes // 2))
    assert capped.ended == "memory"
    assert "can't allocate memory" in capped.message
    held = run(TARGET, ScriptSetting(arguments=("--batch-size", "32")),
               TrialRequest(steps=5, budget_bytes=int(0.7 * whole.peak_bytes), cap_bytes=int(0.7 * whole.peak_bytes)))
    assert held.ended == "ok"
    assert held.peak_bytes <= 0.7 * whole.peak_bytes


@pytest.mark.long
def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    """An error, no training step, or a timeout."""
    script = tmp_path / "bad.py"
    script.write_text("import torch\nraise KeyError('what')\n")
    ran = run(Target(script=str(script), module=False, seconds=60), ScriptSetting(arguments=()), TrialRequest(steps=2))
    assert ran.ended == "error"
    assert "what" in ran.message
    script.write_text("print('no training')\n")
    ran = run(Target(script=str(script), module=False, seconds=60), ScriptSetting(arguments=()), TrialRequest(steps=2))
    assert (ran.ended, ran.message) == ("error", "no training step was seen")
    script.write_text("import time\ntime.sleep(60)\n")
    assert run(Target(script=str(script), module=False, seconds=2), ScriptSetting(arguments=()), TrialRequest(steps=2)).ended == "timeout"


# --- lowtide min -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_minimum_passes_under_a_hard_cap_and_one_percent_less_fails(tmp_path: Path) -> None:
    said = lowtide("min", "--without", "all", "--json", str(tmp_path / "f.json"), "--html", str(tmp_path / "f.html"), str(SCRIPT),
                   "--batch-size", "32", "--length", "32")
    answer = json.loads((tmp_path / "f.json").read_text())
    (found,) = answer["sets"]
    assert answer["minimum_bytes"] == found["minimum_bytes"] < 0.7 * answer["plain"]["peak_bytes"]
    assert found["survived_steps"] == 50
    assert len(found["runs"]) <= 10
    assert (1 - CLOSE) * found["minimum_bytes"] - 1 <= found["fails_at_bytes"] < found["minimum_bytes"]
    assert any(r["budget_bytes"] == found["fails_at_bytes"] and not r["passes"] for r in found["runs"])
    capped = [r for r in found["runs"] if r["cap_bytes"]]
    assert all(r["cap_bytes"] == r["budget_bytes"] >= r["peak_bytes"] for r in capped if r["passes"])
    assert answer["plain"]["cold_peak_bytes"] < answer["plain"]["warm_peak_bytes"]
    assert "50 steps" in said
    assert "Step time by memory" in (tmp_path / "f.html").read_text()


# --- lowtide batch ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_batch_measures_until_memory_ends_and_resumes_after_a_kill(tmp_path: Path) -> None:
    """Points that were complete are not measured again; other options are refused."""
    words = ["batch", "--vary", "batch-size=4,32,...", "--memory", "9MB", "--steps", "5", "--json", str(tmp_path / "f.json"),
             "--html", str(tmp_path / "f.html"), str(SCRIPT)]
    said = lowtide(*words, cwd=tmp_path)
    found = json.loads((tmp_path / "f.json").read_text())
    assert [p["value"] for p in found["points"]]== ["4", "32", "256"]
    assert found["points"][-1]["ended"] == "memory"
    assert found["largest"] == found["points"][-2]["value"]
    assert all(p["peak_bytes"] <= 9_000_000 for p in found["points"] if p["fits"])
    assert "knee" in said
    assert "Throughput" in (tmp_path / "f.html").read_text()
    file = tmp_path / "sized.batch"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # killed while it wrote the second point
    lowtide(*words, cwd=tmp_path)
    again = json.loads((tmp_path / "f.json").read_text())
    assert again["points"][0] == found["points"][0], "measured once"
    assert [p["value"] for p in again["points"]] == [p["value"] for p in found["points"]]
    assert file.read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert "other options" in lowtide(*words[:3], "--memory", "8MB", str(SCRIPT), code=2, cwd=tmp_path)


@pytest.mark.long
def test_batch_tries_sizes_that_do_not_fit_under_the_budget(tmp_path: Path) -> None:
    lowtide("batch", "--vary", "batch-size=16,48", "--budget", "8MB", "--memory", "9MB", "--steps", "6", "--json",
            str(tmp_path / "f.json"), str(SCRIPT), cwd=tmp_path)
    found = json.loads((tmp_path / "f.json").read_text())
    assert [(p["value"], p["how"], p["fits"]) for p in found["points"]] == [
        ("16", "plain", True), ("48", "plain", False), ("48", "budget", True)]
    assert (found["largest"], found["largest_under_budget"]) == ("16", "48")


def _ran(seconds: float, ended: str = "ok") -> TrialResult:
    steps = tuple({"seconds": seconds, "peak_bytes": 1} for _ in range(6)) if ended == "ok" else ()
    return TrialResult(asked=TrialRequest(steps=6), ended=ended, message="", steps=steps, resident_bytes=0, plan=None, levers=())


def test_batch_stops_when_throughput_falls_and_finds_the_knee(tmp_path: Path) -> None:
    """The throughputs of a published study: 64 at 15,840/s, 128 at 22,840/s, then falling."""
    rates = {"1": 565, "2": 1089, "4": 2196, "8": 4006, "16": 8275, "32": 12664, "64": 15840, "128": 22840, "256": 22415, "512": 21000}
    vary = Vary([parse_axis("batch=1,2,4,...", "t.py")], ())
    results = SizeResults(tmp_path / "r", {}, fresh=False)

    def go(setting: ScriptSetting, _: TrialRequest) -> TrialResult:
        value = setting.arguments[-1]
        return _ran(float(value) / rates[value])

    points = list(measure(vary, go, results, samples=lambda v: float(v[0]), plain=TrialRequest(steps=6), budget=None))
    results.close()
    assert [p.values[0] for p in points][-1] == "512"
    best = knee(points)
    assert best is not None
    assert best.values == ("128",)


@pytest.mark.parametrize(("slow", "last"), [(1.02, "64"), (1.3, "16")])
def test_batch_goes_on_where_throughput_may_not_have_fallen(tmp_path: Path, slow: float, last: str) -> None:
    """Medians fall from 4 on; only a rate below the quartiles of the best is certain to be lower."""
    vary = Vary([parse_axis("batch=4,8,16,32,64", "t.py")], ())
    results = SizeResults(tmp_path / "r", {}, fresh=False)

    def go(setting: ScriptSetting, _: TrialRequest) -> TrialResult:
        value = float(setting.arguments[-1])
        each = value * (1.0 if value == 4 else slow)
        seconds = (each, each, 0.9 * each, 0.95 * each, each, each, 1.05 * each, 1.1 * each)
        steps = tuple({"seconds": s, "peak_bytes": 1} for s in seconds)
        return TrialResult(asked=TrialRequest(steps=8), ended="ok", message="", steps=steps, resident_bytes=0, plan=None, levers=())

    points = list(measure(vary, go, results, samples=lambda v: float(v[0]), plain=TrialRequest(steps=8), budget=None))
    results.close()
    assert points[-1].values[0] == last


@pytest.mark.parametrize("whole", [False, True])
def test_no_verdict_is_given_before_all_sizes_have_run(whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    rate = Rate(low=1, median=1, high=1)
    points = [Point(values=("64",), how="plain", ended="ok", message="", rate=rate, cold_peak_bytes=1, peak_bytes=1)]
    vary = Vary([parse_axis("batch=64,128", "t.py")], ())
    show_batch(SizeStudy(script="t.py", vary=vary, points=tuple(points), per_sample=True, whole=whole))
    said = capsys.readouterr().err
    assert ("knee" in said) is whole
    assert ("largest" in said) is whole


def test_the_largest_size_is_the_last_that_fits() -> None:
    rate = Rate(low=1, median=1, high=1)

    def point(value: str, how: str, *, fits: bool) -> Point:
        return Point(values=(value,), how=how, ended="ok" if fits else "memory", message="", rate=rate if fits else None,
                     cold_peak_bytes=1, peak_bytes=1)

    points = [point("1", "plain", fits=True), point("2", "plain", fits=False), point("2", "budget", fits=True)]
    plain, held = largest(points, "plain"), largest(points, "budget")
    assert plain is not None
    assert held is not None
    assert (plain.values, held.values) == (("1",), ("2",))


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow("sequence")
@pytest.mark.long
@pytest.mark.parametrize(("small", "large"), [
    (["batch-size=2", "batch-size=3", "batch-size=4"], "batch-size=32"),
    (["length=8", "length=16", "length=24", "length=32"], "length=256"),
], ids=["batch", "sequence"])
def test_predictions_at_8x_the_recorded_size_are_within_one_percent(small: list[str], large: str, tmp_path: Path) -> None:
    def setting(axis: str) -> ScriptSetting:
        vary = Vary([parse_axis(axis, str(SCRIPT))], ("--batch-size", "4"))
        return vary.set(next(vary.points()))

    found = []
    for i, axis in enumerate(small):
        record(TARGET, setting(axis), 3, tmp_path / f"{i}.lowtide")
        found.append((setting(axis).sizes, read(tmp_path / f"{i}.lowtide")))
    model = Model(found)
    assert model.aligned
    assert model.checked
    predicted = model.at(setting(large).sizes)
    real = run(TARGET, setting(large), TrialRequest(steps=3))
    assert abs(predicted.peak_bytes - real.peak_bytes) <= 0.01 * real.peak_bytes
    assert abs(predicted.cold_peak_bytes - real.cold_peak_bytes) <= 0.01 * real.cold_peak_bytes
    assert predicted.at_most_bytes >= real.peak_bytes
    assert predicted.fits(real.peak_bytes - 1) is not True
    assert model.degrees == ((1,) if "batch-size=32" == large else (2,))


@pytest.mark.slow
def test_two_sizes_are_predicted_together_and_a_plan_is_made(tmp_path: Path) -> None:
    """The saved file answers whether given sizes fit, plainly or by a plan, which a real run then holds."""
    file = tmp_path / "f.lowtide"
    lowtide("batch", "--predict", "-o", str(file), "--json", str(tmp_path / "f.json"), "--vary", "batch-size=2,3,4,16",
            "--vary", "length=8,16,24,96", str(SCRIPT))
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["degrees"] == {"batch-size": 1, "length": 2}
    last = next(p for p in found["points"] if p["sizes"] == {"batch-size": 16, "length": 96})
    real = run(TARGET, ScriptSetting(arguments=("--batch-size", "16", "--length", "96")), TrialRequest(steps=3))
    assert abs(last["peak_bytes"] - real.peak_bytes) <= 0.01 * real.peak_bytes
    sizes = ("--set", "batch-size=16", "--set", "length=96")
    assert "fits in" in lowtide("predict", str(file), *sizes, "--memory", str(int(1.02 * real.peak_bytes)))
    tight = int(0.75 * real.peak_bytes)
    assert "plan that" in lowtide("predict", str(file), *sizes, "--memory", str(tight), "--plan", str(tmp_path / "plan.json"))
    held = run(TARGET, ScriptSetting(arguments=("--batch-size", "16", "--length", "96")), TrialRequest(steps=5, budget_bytes=tight, cap_bytes=tight))
    assert held.passes
    assert json.loads((tmp_path / "plan.json").read_text())["status"] in ("optimal", "feasible")
    assert "does not fit" in lowtide("predict", str(file), *sizes, "--memory", "100KiB", code=1)


@pytest.mark.long
def test_recordings_know_their_sizes_from_the_scripts_options(tmp_path: Path) -> None:
    """Sizes that the recordings do not vary, or that are given twice, are refused."""
    files = []
    for size in ("2", "4", "6"):
        files.append(str(tmp_path / f"{size}.lowtide"))
        lowtide("record", "-o", files[-1], "--quiet", str(SCRIPT), "--batch-size", size, "--length", "8", "--steps", "4")
    assert "batch-size 64: peak" in lowtide("predict", *files, "--set", "batch-size=64")
    assert "one recording covers one size" in lowtide("predict", files[0], "--set", "batch-size=64", code=2)
    assert "only whole numbers were recorded" in lowtide("predict", *files, "--set", "batch-size=2.5", code=2)
    assert "given twice" in lowtide("predict", *files, "--set", "batch-size=64", "--set", "batch-size=32", code=2)
    assert "same length" in lowtide("predict", *files, "--set", "batch-size=64", "--set", "length=9", code=2)
    assert "has no value for width" in lowtide("predict", *files, "--set", "width=64", code=2)
