"""``lowtide run`` as its user meets it: exit codes, one-line errors, the script's environment, the files it writes."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import until
import pytest
from command import PACKAGE, TIMEOUT, Done, call, environment, hears_interrupts, lowtide_in, script_in
from forked import forked
import torch

from lowtide.base.errors import INTERRUPTED


MLP = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4096, 64)
for step in range(5):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""

STEP_KEYS = {"index", "seconds", "peak_bytes", "policy", "recomputed_ops", "recompute_seconds", "offloaded_bytes"}
PLAN_KEYS = {"predicted_peak_bytes", "baseline_peak_bytes", "resident_bytes", "predicted_step_seconds",
             "baseline_step_seconds", "extra_seconds", "bound"}  # fmt: skip


def _one_line(done: Done, code: int) -> str:
    """The single error line of a run that ended with a code."""
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("lowtide: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    return done.stderr


# --- bad usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--budget", "1GiB", "absent.py"), "absent.py"),
        (("--budget", "1GiB", "-m", "absent_module"), "absent_module"),
        (("--budget", "1GiB", "-m", "absent.module"), "absent.module"),
        (("--budget", "1GiB"), "SCRIPT"),
        (("--budgte", "1GiB", "x.py"), "No such option '--budgte'. Did you mean '--budget'?"),
        (("--budget", "much", "x.py"), "much"),
        (("--budget", "0", "x.py"), "0"),
        (("--budget", "0%", "x.py"), "0%"),
        (("x.py",), "--budget"),
        (("--budget", "1GiB", "--plan", "absent.json", "x.py"), "absent.json"),
        (("--budget", "1GiB", "--plan", "bad.json", "x.py"), "bad.json"),
        (("--budget", "1GiB", "--json", "absent/f.json", "x.py"), "absent/f.json"),
        (("--budget", "1GiB", "--save-plan", "absent/f.json", "x.py"), "absent/f.json"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    """The line names what is wrong with the call; the script does not run."""
    script_in(tmp_path, "print('ran')", "x.py")
    (tmp_path / "bad.json").write_text("{")
    assert named in _one_line(forked("run", *arguments, cwd=tmp_path), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_auto_without_a_device_is_bad_usage(tmp_path: Path) -> None:
    """A budget that cannot be determined is not taken for no budget."""
    script_in(tmp_path, "print('ran')", "x.py")
    assert "CUDA" in _one_line(lowtide_in(tmp_path, "run", "--budget", "auto", "x.py"), 2)


def test_an_unknown_verb_is_bad_usage(tmp_path: Path) -> None:
    """A verb that does not exist exits with 2."""
    _one_line(lowtide_in(tmp_path, "walk"), 2)


def test_a_run_within_a_run_is_refused(tmp_path: Path) -> None:
    """A second budget in the same process exits with 2 and one line; no script runs."""
    script_in(tmp_path, "print('ran')", "x.py")
    nested = ("run", "--budget", "1GiB", "--quiet", "-m", "lowtide", "run", "--budget", "1GiB", "x.py")
    assert "Lowtide already runs this process" in _one_line(lowtide_in(tmp_path, *nested), 2)


# --- how it ends -----------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    """sys.exit(3) in the script is exit code 3, also in the JSON file."""
    script = script_in(tmp_path, "import sys\nsys.exit(3)")
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", "--json", "f.json", script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert json.loads((tmp_path / "f.json").read_text())["exit_code"] == 3


def test_an_exit_message_is_printed_as_by_python(tmp_path: Path) -> None:
    """sys.exit("text") prints the text on standard error and exits with 1."""
    script = script_in(tmp_path, "import sys\nsys.exit('no data')")
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no data\n")


RAISES = MLP.replace("    print(loss.item().hex())", "    if step == 1: raise ValueError('the data is bad')")


def test_an_exception_shows_only_the_scripts_frames(tmp_path: Path) -> None:
    """Code 1, and a traceback like plain python's: no frame of Lowtide in it."""
    script = script_in(tmp_path, RAISES)
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script)
    assert done.returncode == 1
    assert PACKAGE not in done.stderr
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "ValueError: the data is bad"


def test_a_traceback_is_that_of_plain_python(tmp_path: Path) -> None:
    """Letter for letter, file names included."""
    script = script_in(tmp_path, RAISES)
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script)
    assert done.stderr == call(tmp_path, script).stderr


INSIDE = "import torch\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.ones(2, 4)).sum().backward()\nmodel(torch.ones(2, 5))\n"


def test_an_exception_inside_torch_shows_no_frame_of_lowtide(tmp_path: Path) -> None:
    """An error raised below a module call hides the frames that Lowtide put around it."""
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, INSIDE))
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "script.py" in done.stderr
    assert PACKAGE not in done.stderr


CAUSED = """
import torch
model = torch.nn.Linear(4, 4)
try:
    model(torch.ones(2, 5))
except RuntimeError as error:
    raise ValueError("wrong shape") from error
"""


def test_the_cause_of_an_exception_shows_no_frame_of_lowtide(tmp_path: Path) -> None:
    """The chained exception's traceback is as clean as the last one's."""
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, CAUSED))
    assert done.returncode == 1
    assert "ValueError: wrong shape" in done.stderr
    assert "direct cause" in done.stderr
    assert PACKAGE not in done.stderr


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    """A script that does not compile: code 1, no frame of Lowtide."""
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, "x = = 1\n"))
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert PACKAGE not in done.stderr


def test_an_infeasible_budget_is_code_1_with_its_proof(tmp_path: Path) -> None:
    """The last line is the error, the code is 1, and the JSON file has a bound above the budget."""
    script = script_in(tmp_path, MLP)
    done = lowtide_in(tmp_path, "run", "--budget", "1MiB", "--quiet", "--json", "f.json", script)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("lowtide: error: ")
    assert "somewhat above the lowest plan found" in done.stderr
    assert "Traceback" not in done.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["exit_code"] == 1
    assert figures["plan"]["bound"]["peak_bytes"] > figures["budget_bytes"] == 1 << 20


def test_ctrl_c_interrupts_the_script(tmp_path: Path) -> None:
    """SIGINT: a KeyboardInterrupt traceback without frames of Lowtide, and the process dies of it."""
    wait = "import pathlib, time\npathlib.Path('ready').touch()\nwhile True: time.sleep(0.05)\n"
    script = script_in(tmp_path, wait)
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "run", "--budget", "1GiB", "--quiet", "--json", "told.json", script],
        cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True,
        preexec_fn=hears_interrupts,  # noqa: PLW1509 - no threads between fork and exec here
    )  # fmt: skip
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode in (-signal.SIGINT, INTERRUPTED)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert PACKAGE not in errors
    assert json.loads((tmp_path / "told.json").read_text())["exit_code"] == INTERRUPTED


def test_os_exit_keeps_its_code(tmp_path: Path) -> None:
    """os._exit(5) is exit code 5."""
    assert lowtide_in(tmp_path, "run", "--budget", "1GiB", script_in(tmp_path, "import os\nos._exit(5)")).returncode == 5


# --- what the script sees --------------------------------------------------------------------------------------------

SEES = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path, "file": __file__, "main": sys.modules["__main__"].__file__,
    "globals": sorted(globals()), "spec": getattr(__spec__, "name", None), "package": __package__,
}))
"""


def _seen(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


SCRIPT_ARGUMENTS = ("folder/script.py", "--budget", "2", "-m", "a b", "--", "-x")
MODULE_ARGUMENTS = ("-m", "package.module", "--flag", "value")
SEEN = ("argv", "path", "name", "file", "main", "globals", "spec", "package")


@pytest.fixture(scope="module")
def sights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What a script, and a module, sees under Lowtide and under plain python."""
    home = tmp_path_factory.mktemp("sights")
    for folder in ("folder", "package"):
        (home / folder).mkdir()
    script_in(home, SEES, "folder/script.py")
    script_in(home, "", "package/__init__.py")
    script_in(home, SEES, "package/module.py")
    both = {"script": SCRIPT_ARGUMENTS, "module": MODULE_ARGUMENTS}
    run = ("run", "--budget", "1GiB", "--quiet")
    return {kind: (_seen(lowtide_in(home, *run, *a)), _seen(call(home, *a))) for kind, a in both.items()}


@pytest.mark.xdist_group("sights")
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_script_sees_what_plain_python_shows_it(
    sights: dict[str, tuple[dict[str, Any], dict[str, Any]]], kind: str, seen: str
) -> None:
    """sys.argv, sys.path, __name__, __file__, __main__, __spec__, __package__ and the globals are python's own."""
    ours, plain = sights[kind]
    if (kind, seen) == ("module", "globals"):  # runpy's own dictionary, which differs in what only the interpreter sets
        assert set(plain[seen]) - set(ours[seen]) <= {"sys", "__annotations__"}
        return
    assert ours[seen] == plain[seen]


@pytest.mark.xdist_group("sights")
def test_the_scripts_folder_is_first_on_the_path(sights: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """For a module it is the working directory."""
    for ours, plain in sights.values():
        assert ours["path"][0] == plain["path"][0]


def test_the_script_does_not_see_lowtides_preload(tmp_path: Path) -> None:
    """The script's environment is the user's: nothing preloaded, no task; its child processes start clean."""
    leak = "import os\nprint(sorted(k for k in os.environ if k == 'LD_PRELOAD' or k == 'LOWTIDE_TASK'))"
    leak += "\nprint(os.popen('env | grep -c LD_PRELOAD').read().strip())"
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, leak))
    assert done.stdout == "[]\n0\n", done.stderr


def test_the_users_own_preload_is_kept(tmp_path: Path) -> None:
    """The script sees LD_PRELOAD as the user set it, and that library is loaded beside Lowtide's."""
    (tmp_path / "own.c").write_text("int own(void) { return 7; }\n")
    own = str(tmp_path / "own.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", own, tmp_path / "own.c"], check=True)
    asks = "import ctypes, os\nprint(os.environ['LD_PRELOAD'], ctypes.CDLL(None).own())"
    asks += "\nfrom lowtide.runtime.device.heap_meter import counters\nprint(counters() is not None)"
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script_in(tmp_path, asks), LD_PRELOAD=own)
    assert done.stdout == f"{own} 7\nTrue\n", done.stderr


def test_a_script_that_never_steps_ends_well(tmp_path: Path) -> None:
    """No torch, no step: code 0, standard output untouched, no steps in the JSON file."""
    done = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--json", "f.json", script_in(tmp_path, "print('hello')"))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert "Traceback" not in done.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["steps"], figures["exit_code"]) == ([], 0)


def test_tensors_without_training_end_well(tmp_path: Path) -> None:
    """Inference only: code 0, standard output untouched."""
    text = "import torch\nwith torch.no_grad():\n    print(torch.nn.Linear(4, 4)(torch.ones(1, 4)).shape)"
    done = lowtide_in(tmp_path, "run", "--budget", "50%", script_in(tmp_path, text))
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 4])\n"), done.stderr


def test_standard_input_goes_to_the_script(tmp_path: Path) -> None:
    """Piped input reaches the script."""
    script = script_in(tmp_path, "print(input()[::-1])")
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "run", "--budget", "1GiB", "--quiet", script],
        cwd=tmp_path, env=environment(), input="abc\n", capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "cba\n"), done.stderr


# --- what it writes --------------------------------------------------------------------------------------------------


def test_a_budget_is_held_and_its_saved_plan_is_reused(tmp_path: Path) -> None:
    """Bit-equal output, the documented keys in the JSON file, and peaks within the budget; a saved plan is in force from the
    first step.

    The summary is on standard error, and absent with --quiet.
    """
    script = script_in(tmp_path, MLP)
    plain = call(tmp_path, script)
    first = ("--budget", "60%", "--json", "first.json", "--save-plan", "plan.json")
    done = lowtide_in(tmp_path, "run", *first, script)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    figures = json.loads((tmp_path / "first.json").read_text())
    _check_figures(figures)
    assert figures["steps"][0]["peak_bytes"] > figures["budget_bytes"] >= max(s["peak_bytes"] for s in figures["steps"][1:])
    assert "within the budget" in done.stderr
    assert "over the budget" not in done.stderr  # of the first step it is a share
    assert "ran without the budget" in done.stderr
    budget = str(figures["budget_bytes"])
    second = ("--budget", budget, "--json", "second.json", "--plan", "plan.json", "--quiet")
    again = lowtide_in(tmp_path, "run", *second, script)
    assert (again.returncode, again.stdout, again.stderr) == (0, plain.stdout, "")
    steps = json.loads((tmp_path / "second.json").read_text())["steps"]
    choices = json.loads((tmp_path / "plan.json").read_text())["choices"]
    recomputes = any(c["action"] == "recompute" for c in choices)  # a plan that only offloads is carried out online
    assert steps[0]["policy"] == ("planned" if recomputes else "online")
    assert max(s["peak_bytes"] for s in steps) <= figures["budget_bytes"]


def _check_figures(figures: dict[str, Any]) -> None:
    assert {"budget_bytes", "steps", "plan", "exit_code"} <= set(figures)
    assert figures["exit_code"] == 0
    assert [s["index"] for s in figures["steps"]] == list(range(5))
    assert all(set(s) >= STEP_KEYS for s in figures["steps"])
    assert set(figures["plan"]) >= PLAN_KEYS
    assert set(figures["plan"]["bound"]) == {"peak_bytes", "extra_seconds", "at"}
    assert figures["plan"]["resident_bytes"] < figures["budget_bytes"] < figures["plan"]["baseline_peak_bytes"]
    assert figures["steps"][-1]["policy"] == "planned"
    assert figures["steps"][-1]["recomputed_ops"] + figures["steps"][-1]["offloaded_bytes"] > 0
    assert figures["steps"][-1]["peak_bytes"] <= figures["budget_bytes"]


@pytest.mark.long
def test_quiet_leaves_standard_error_empty(tmp_path: Path) -> None:
    """With --quiet a good run leaves standard error empty; without it, the summary is there and not on standard output."""
    script = script_in(tmp_path, MLP)
    quiet = lowtide_in(tmp_path, "run", "--budget", "1GiB", "--quiet", script)
    loud = lowtide_in(tmp_path, "run", "--budget", "1GiB", script)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert loud.returncode == 0
    assert loud.stderr.strip()
    assert quiet.stdout == loud.stdout


def test_help_and_version_are_printed(tmp_path: Path) -> None:
    """``--help`` and ``--version`` print on standard output and exit with 0."""
    said = {}
    for arguments in ("--help", "run --help", "-h", "--version"):
        done = lowtide_in(tmp_path, *arguments.split())
        assert (done.returncode, done.stderr) == (0, "")
        said[arguments] = done.stdout
    assert said["--help"] == said["-h"]
    assert all(f"\n  {verb} " in said["--help"] for verb in ("run", "record", "plan", "guard", "leak", "sweep", "min", "batch"))
    assert said["run --help"].splitlines()[0].endswith("run [OPTIONS] SCRIPT [ARGUMENTS]...")
    assert said["--version"].split()[-1] == importlib.metadata.version("lowtide")
