"""Every option of the command line is met by a test; the options that no other test is about are tested here."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from command import call, lowtide_in, script_in
from lowtide.cli import main

TESTS = Path(__file__).parent.parent

NET = """
import sys, torch
from torch import nn

torch.manual_seed(0)
rows = int(sys.argv[sys.argv.index("--batch") + 1]) if "--batch" in sys.argv else 512
layers = nn.Sequential(*[nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(6)])
opt = torch.optim.SGD(layers.parameters(), 0.01)
for step in range(60):
    loss = layers(torch.randn(rows, 128)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step in (5, 59):
        print(loss.item().hex(), flush=True)
        if "--short" in sys.argv:
            break
"""
STEPS = "import lowtide\nfor _ in range(25):\n    lowtide.step()\n"


def _read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def _options() -> list[tuple[str, frozenset[str]]]:
    """(verb, spellings) of every option; the opposite of a switch counts as an option of its own."""
    group = next(v for v in vars(main).values() if isinstance(v, click.Group))
    context = click.Context(group)
    found = []
    for verb in group.list_commands(context):
        command = group.get_command(context, verb)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option):
                found += [(verb, frozenset(names)) for names in (option.opts, option.secondary_opts) if names]
    return found


CALLED_BY = {"guard": "(?:guard|started|guarded)", "leak": "(?:leak|judged)", "record": "(?:record|_recorded|_train)", "plan": "(?:plan|_lowtide)"}
"""Functions of tests that call a verb."""


@functools.cache
def _tests() -> tuple[str, ...]:
    """The text of every test, with its decorators."""
    found = []
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found.append("\n".join(lines[first - 1 : node.end_lineno]))
    return tuple(found)


@pytest.mark.parametrize(("verb", "spellings"), _options(), ids=lambda x: x if isinstance(x, str) else max(x, key=len))
def test_every_option_is_given_to_its_verb_in_some_test(verb: str, spellings: frozenset[str]) -> None:
    """By a test that calls the verb or a helper that does."""
    given = "|".join(re.escape(name) for name in spellings)
    option, called = re.compile(rf"[\"' ({{]({given})[\"'= ,]"), re.compile(rf"[\"' ]{verb}[\"' ,(]|\b{CALLED_BY.get(verb, verb)}\(")
    assert any(option.search(text) and called.search(text) for text in _tests())


# --- run -----------------------------------------------------------------------------------------------------------------


def test_a_kept_module_is_not_recomputed(tmp_path: Path) -> None:
    """If every module must be kept, recomputation cannot lower the peak and the budget is refused."""
    script = script_in(tmp_path, NET)
    some = lowtide_in(tmp_path, "run", "--budget", "60%", "--no-offload", "--keep", "5", "--json", "f.json", script, "--short")
    assert some.returncode == 0, some.stderr
    assert any(s["recomputed_ops"] for s in _read(tmp_path, "f.json")["steps"])
    every = [word for i in range(6) for word in ("--keep", f"{i}.0", "--keep", f"{i}.1", "--keep", f"{i}.2")]
    done = lowtide_in(tmp_path, "run", "--budget", "60%", "--no-offload", *every, "--json", "f.json", script, "--short")
    assert done.returncode == 1, done.stderr
    assert not any(s["recomputed_ops"] for s in _read(tmp_path, "f.json")["steps"])


@pytest.mark.parametrize("option", ["--optimizations", "--levers"])
def test_optimizations_are_listed_under_their_new_and_old_name(tmp_path: Path, option: str) -> None:
    """The old name is not in the help."""
    done = lowtide_in(tmp_path, "run", option, "list", "missing.py")
    assert (done.returncode, done.stderr) == (2, "lowtide: error: no such script: missing.py\n")
    assert "--levers" not in lowtide_in(tmp_path, "run", "--help").stdout


@pytest.mark.long
def test_an_excluded_lever_is_not_used(tmp_path: Path) -> None:
    """The budget that needed it is then refused."""
    script = script_in(tmp_path, NET)
    budget = "3300KiB"
    pulled = lowtide_in(tmp_path, "run", "--budget", budget, "--json", "f.json", script, "--short", "--batch", "64")
    assert pulled.returncode == 0, pulled.stderr
    assert [x["name"] for x in _read(tmp_path, "f.json")["levers"] if x["used"]] == ["move-gradients"]
    done = lowtide_in(tmp_path, "run", "--budget", budget, "--without", "move-gradients", script, "--short", "--batch", "64")
    assert done.returncode == 1, done.stderr
    assert "cannot be held" in done.stderr


# --- min, batch ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_min_survives_the_given_steps_and_respects_no_offload(tmp_path: Path) -> None:
    """With offload the minimum is lower."""
    script = script_in(tmp_path, NET)
    without = "move-gradients,move-states,sliced-update,plan-checkpoints"
    words = ["--steps", "4", "--survive", "7", "--no-offload", "--without", without, "--timeout", "600"]
    done = lowtide_in(tmp_path, "min", *words, "--json", "m.json", script)
    assert done.returncode == 0, done.stderr
    (found,) = _read(tmp_path, "m.json")["sets"]
    assert found["survived_steps"] == 7
    assert found["name"] == "no levers"
    moving = lowtide_in(tmp_path, "min", "--steps", "4", "--survive", "0", "--offload", "--json", "m.json", script)
    assert moving.returncode == 0, moving.stderr
    assert _read(tmp_path, "m.json")["minimum_bytes"] < found["minimum_bytes"], "what is moved need not be there"


@pytest.mark.long
def test_batch_keeps_its_points_and_starts_over_only_when_asked(tmp_path: Path) -> None:
    """Known points are not measured again, `--fresh` measures all of them again, and other `--samples` than those of the file
    are refused.
    """
    script = script_in(tmp_path, NET)
    words = ["batch", "--vary", "batch=64,128", "--samples", "10", "--steps", "4", "--results", "points", "--timeout", "600"]
    assert lowtide_in(tmp_path, *words, "--json", "b.json", script).returncode == 0
    first = _read(tmp_path, "b.json")["points"]
    lines = (tmp_path / "points").read_text().splitlines()
    assert len(lines) == 3
    assert lowtide_in(tmp_path, *words, "--json", "b.json", script).returncode == 0
    assert _read(tmp_path, "b.json")["points"] == first
    assert (tmp_path / "points").read_text().splitlines() == lines, "points that are known are not measured again"
    assert lowtide_in(tmp_path, *words, "--fresh", "--json", "b.json", script).returncode == 0
    assert (tmp_path / "points").read_text().splitlines()[1:] != lines[1:]
    other = lowtide_in(tmp_path, *words[:-4], "--results", "points", "--samples", "20", script)
    assert other.returncode == 2
    assert "other options: give another file with --results, or --fresh" in other.stderr


WEIGHTS = """
import sys, torch
torch.manual_seed(0)
rows = int(sys.argv[sys.argv.index("--batch") + 1]) if "--batch" in sys.argv else 4
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
for _ in range(6):
    loss = net(torch.randn(rows, 512)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex())
"""
"""8 MiB of weights and as much of gradients, of which an update in the backward keeps one at a time."""


@pytest.mark.long
def test_batch_uses_allowed_levers_under_its_budget(tmp_path: Path) -> None:
    script = script_in(tmp_path, WEIGHTS)
    words = ["batch", "--vary", "batch=4", "--steps", "4", "--fresh"]
    alone = lowtide_in(tmp_path, *words, "--allow", "update-in-backward", script)
    assert alone.returncode == 2
    assert "--allow needs --budget" in alone.stderr
    limits = ["--budget", "12MiB", "--memory", "13MiB"]
    for more, used in (([], "move-gradients"), (["--allow", "update-in-backward"], "update-in-backward")):
        done = lowtide_in(tmp_path, *words, *limits, *more, "--json", "b.json", script)
        assert f"largest that fits under the budget: 4, with {used}" in done.stderr
        points = [(point["how"], point["fits"], point["optimizations"]) for point in _read(tmp_path, "b.json")["points"]]
        assert points == [("plain", False, []), ("budget", True, [used])]


@pytest.mark.long
def test_run_uses_an_allowed_lever_and_reports_it(tmp_path: Path) -> None:
    script = script_in(tmp_path, WEIGHTS)
    plain = call(tmp_path, script)
    done = lowtide_in(tmp_path, "run", "--budget", "12MiB", "--allow", "update-in-backward", "--json", "f.json", script)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert [x["name"] for x in _read(tmp_path, "f.json")["levers"] if x["used"]] == ["update-in-backward"]


@pytest.mark.long
def test_run_offloads_only_where_it_may(tmp_path: Path) -> None:
    script = script_in(tmp_path, NET)
    moved = {}
    for switch in ("--offload", "--no-offload"):
        done = lowtide_in(tmp_path, "run", "--budget", "60%", switch, "--json", "f.json", script, "--short")
        assert done.returncode == 0, done.stderr
        moved[switch] = sum(s["offloaded_bytes"] for s in _read(tmp_path, "f.json")["steps"])
    assert moved["--offload"] > 0 == moved["--no-offload"]


@pytest.mark.long
def test_batch_keeps_the_recordings_of_a_prediction(tmp_path: Path) -> None:
    """They answer another prediction."""
    script = script_in(tmp_path, NET)
    alone = lowtide_in(tmp_path, "batch", "--vary", "batch=8,16,32,512", "-o", "kept", script)
    assert alone.returncode == 2
    assert "-o needs --predict" in alone.stderr
    done = lowtide_in(tmp_path, "batch", "--predict", "--vary", "batch=8,16,32,512", "--output", "kept", script)
    assert done.returncode == 0, done.stderr
    again = lowtide_in(tmp_path, "predict", "kept", "--set", "batch=512", "--json", "p.json")
    assert again.returncode == 0, again.stderr


# --- leak ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_leak_uses_the_given_ticks_and_samples_per_step(tmp_path: Path) -> None:
    """If nothing marks steps, a step is a tick of the clock, and rates are of samples."""
    script = script_in(tmp_path, "while True:\n    sum(range(1000))\n")
    words = ["leak", "--processes", "1", "--steps", "50", "--every", "0.02", "--samples-per-step", "32", "--who"]
    done = lowtide_in(tmp_path, *words, "--json", "l.json", script)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stderr
    assert "a step is a tick of the clock" in done.stderr


# --- plan, sweep ---------------------------------------------------------------------------------------------------------


def test_transfers_without_overlap_cost_their_own_time(tmp_path: Path) -> None:
    nodes = [{"id": i, "bytes": 100 if i < 4 else 1, "seconds": 10.0} for i in range(12)]
    links = [{"source": i, "target": i + 1} for i in range(11)] + [{"source": i, "target": 11 - i} for i in range(4)]
    (tmp_path / "g.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    costs = {}
    for switch in ("--overlap", "--no-overlap"):
        words = ["plan", "g.json", "--budget", "320", "--offload", "100", switch, "--json", "p.json"]
        done = lowtide_in(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        costs[switch] = _read(tmp_path, "p.json")["seconds"]
    assert costs["--overlap"] < costs["--no-overlap"]


def _sweep(folder: Path, values: str) -> None:
    (folder / "job.py").write_text(STEPS)
    (folder / "s.toml").write_text(
        f'command = "python job.py"\nsteps = 20\n[axes]\nnumber = {{argument = "", values = {values}}}\n'
    )


def test_sweep_runs_cells_in_parallel_and_warns_about_rates(tmp_path: Path) -> None:
    _sweep(tmp_path, "[0, 1, 2]")
    done = lowtide_in(tmp_path, "sweep", "s.toml", "--jobs", "2", "--json", "s.json")
    assert done.returncode == 0, done.stderr
    assert "2 cells run in parallel, which disturbs their rates" in done.stderr
    assert [cell["ended"] for cell in _read(tmp_path, "s.json")["cells"]] == ["ok"] * 3


@pytest.mark.parametrize(("words", "said"), [
    (["--address", "127.0.0.1:1"], "--address needs --executor dask"),
    (["--executor", "dask", "--jobs", "2"], "--jobs needs --executor local: with dask, use --workers"),
])
def test_options_of_one_executor_are_refused_by_the_other(tmp_path: Path, words: list[str], said: str) -> None:
    _sweep(tmp_path, "[0]")
    done = lowtide_in(tmp_path, "sweep", "s.toml", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_a_dask_scheduler_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    """A sweep with workers of its own ends complete."""
    pytest.importorskip("distributed")
    _sweep(tmp_path, "[0, 1]")
    done = lowtide_in(tmp_path, "sweep", "s.toml", "--executor", "dask", "--workers", "1", "--json", "s.json")
    assert done.returncode == 0, done.stderr
    assert _read(tmp_path, "s.json")["complete"]
    done = lowtide_in(tmp_path, "sweep", "s.toml", "--fresh", "--executor", "dask", "--address", "127.0.0.1:1")
    assert done.returncode == 2
    assert "no dask scheduler answers at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


# --- missing packages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "words", "missing", "said"), [
    ("leak", ["--deep"], "memray", "--deep needs memray: pip install memray"),
    ("guard", ["--prometheus", "9091"], "prometheus_client", "--prometheus needs prometheus-client: pip install prometheus-client"),
    ("guard", ["--tensorboard", "events"], "tensorboard", "--tensorboard needs tensorboard: pip install tensorboard"),
    ("sweep", ["--executor", "dask"], "dask", "--executor dask needs dask: pip install 'lowtide[dask]'"),
])
def test_a_missing_package_is_one_line_with_the_remedy(
    tmp_path: Path, verb: str, words: list[str], missing: str, said: str
) -> None:
    """The package is hidden by a None in `sys.modules`."""
    _sweep(tmp_path, "[0]")
    hidden = f"import sys; sys.modules[{missing!r}] = None; from lowtide.__main__ import main; main()"
    done = call(tmp_path, "-c", hidden, verb, *words, "s.toml" if verb == "sweep" else script_in(tmp_path, "pass\n"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == f"lowtide: error: {said}"


def test_a_second_run_begins_with_what_the_first_one_kept(tmp_path: Path) -> None:
    """It prints the same, is planned from its first step on and says so; ``--no-cache`` begins anew and keeps nothing.

    An edited script begins anew, too. What is kept are files in one folder.
    """
    script, kept = script_in(tmp_path, NET), {"LOWTIDE_CACHE": str(tmp_path / "kept")}
    asked = ("run", "--budget", "70%", "--json", "run.json")
    first = lowtide_in(tmp_path, *asked, "--no-cache", script, **kept)
    assert first.returncode == 0, first.stderr
    assert not (tmp_path / "kept").exists()
    for options, begins in ((("--cache",), "online"), ((), "planned"), (("--no-cache",), "online"), ((), "planned")):
        done = lowtide_in(tmp_path, *asked, *options, script, **kept)
        assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
        figures = _read(tmp_path, "run.json")
        assert figures["steps"][0]["policy"] == begins
        assert bool(figures["units_of_earlier_runs"]) is (begins == "planned")
        assert ("of an earlier run of this script" in done.stderr) is (begins == "planned")
    assert len(list((tmp_path / "kept" / "units").iterdir())) == 1
    done = lowtide_in(tmp_path, *asked, script_in(tmp_path, f"{NET}\n"), **kept)
    assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
    assert _read(tmp_path, "run.json")["steps"][0]["policy"] == "online"


def test_a_folder_for_plans_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """Nothing is kept, and nothing is said."""
    (tmp_path / "file").write_text("")
    script = script_in(tmp_path, NET)
    for place in ("/proc/lowtide", str(tmp_path / "file")):
        done = lowtide_in(tmp_path, "run", "--budget", "64MiB", "--quiet", script, LOWTIDE_CACHE=place)
        assert (done.returncode, done.stderr) == (0, "")
