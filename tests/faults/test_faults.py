"""Law: whichever system call fails, a training ends as it would without Lowtide, or one line says why not.

The bits are the same, and nothing is left behind. With LOWTIDE_FULL every call is made to fail, and of the studies, which run
many processes, MOST_OF_A_STUDY of each class; without it some of each class, evenly spread, and no study.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from injected import CLASSES, TRAINED, Case, Ended, Fault, built, ran, wrong_with
from lowtide.runtime.device.heap_counters import library_path

FULL = bool(os.environ.get("LOWTIDE_FULL"))
MOST, MOST_OF_A_STUDY = 2, 6
EVERY_TIME = ("run", "record")
"""Cases of ``make test``."""
ALLOCATIONS = ("denied", "memory")
T = str(TRAINED)
SMALL = (T, "--code", "0", "--batch", "256")
WITHIN, SAVES = (str(TRAINED.with_name(f"{name}.py")) for name in ("within", "saves"))
LOWTIDE = ("-m", "lowtide")
RECORDED = ("a.lowtide-names", "a.lowtide-tail")
CASES = (
    Case("run", (*LOWTIDE, "run", "--budget", "12MiB", "--json", "{made}/f.json", "--save-plan", "{made}/f.plan", T), ("f.json", "f.plan"), code=7, trains=True),
    Case("run_at_a_share", (*LOWTIDE, "run", "--budget", "60%", "--json", "{made}/f.json", T), ("f.json",), code=7, trains=True),
    Case("record", (*LOWTIDE, "record", "-o", "{made}/a.lowtide", "--json", "{made}/f.json", T), ("a.lowtide", "f.json"), RECORDED, code=7, trains=True),
    Case("budget_in_a_script", (WITHIN, "budget"), trains=True),
    Case("record_in_a_script", (WITHIN, "record", "{made}/a.lowtide"), ("a.lowtide",), RECORDED, trains=True),
    Case("checkpoints", (SAVES, "{made}/saved", "synchronous"), ("saved",), trains=True),
    Case("asynchronous_checkpoints", (SAVES, "{made}/saved", "asynchronous"), ("saved",), trains=True),
    Case("guard", (*LOWTIDE, "guard", "--memory", "4GiB", "--json", "{made}/f.json", "-o", "{made}/g.lowtide", *SMALL), ("f.json", "g.lowtide"), ("g.lowtide-names", "g.lowtide-tail"), trains=True),
    Case(
        "report",
        (*LOWTIDE, "report", "{ready}/a.lowtide", "--json", "{made}/f.json", "--html", "{made}/f.html", "--snapshot", "{made}/s.pickle", "--perfetto", "{made}/t.json", "--speedscope", "{made}/s.json"),
        ("f.html", "f.json", "s.json", "s.pickle", "t.json"),
    ),
    Case("plan", (*LOWTIDE, "plan", "{ready}/a.lowtide", "--budget", "95%", "--json", "{made}/f.json", "--html", "{made}/f.html"), ("f.html", "f.json")),
    Case("batch", (*LOWTIDE, "batch", "--vary", "--batch=64,128", "--steps", "3", "--results", "{made}/r", "--json", "{made}/f.json", "--html", "{made}/f.html", *SMALL), ("f.html", "f.json", "r"), slow=True),
    Case("batch_predicts", (*LOWTIDE, "batch", "--vary", "--batch=64,128,256,512", "--predict", "-o", "{made}/r.lowtide", "--json", "{made}/f.json", *SMALL), ("f.json", "r.lowtide"), slow=True),
    Case("min", (*LOWTIDE, "min", "--steps", "4", "--survive", "0", "--json", "{made}/f.json", "--html", "{made}/f.html", *SMALL), ("f.html", "f.json"), slow=True),
    Case("leak", (*LOWTIDE, "leak", "--steps", "50", "--json", "{made}/f.json", "--html", "{made}/f.html", *SMALL, "--steps", "100", "--batch", "16"), ("f.html", "f.json"), slow=True),
    Case("sweep", (*LOWTIDE, "sweep", "{ready}/s.toml", "--results", "{made}/s.results", "--json", "{made}/f.json", "--csv", "{made}/f.csv", "--html", "{made}/f.html"), ("f.csv", "f.html", "f.json", "s.results"), ("s.results.cells", "s.results.lock"), slow=True),
)  # fmt: skip
SWEEP = f"""
command = "{sys.executable} {T} --code 0 --batch 16 --steps 20"
steps = 10
[axes]
threads = {{env = "THREADS", values = [1, 2]}}
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or library_path() is None, reason="no C compiler")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ready")
    made = subprocess.run([sys.executable, *LOWTIDE, "record", "--quiet", "-o", folder / "a.lowtide", *SMALL], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (folder / "s.toml").write_text(SWEEP)
    return folder


@functools.cache
def _unharmed(case: Case, library: Path, ready: Path, folder: Path) -> Ended:
    ended = ran(case, library, folder / str(case), ready)
    assert not wrong_with(case, ended, ended), ended
    assert ended.code == case.code, ended.err
    return ended


def _spread(count: int, most: int | None) -> Iterator[int]:
    """Numbers from 1 to `count`: all, or `most` of them."""
    if most is None or count <= most:
        yield from range(1, count + 1)
    elif most == 1:
        yield (count + 1) // 2
    else:
        yield from (1 + n * (count - 1) // (most - 1) for n in range(most))


def _faults(case: Case, kind: str, count: int) -> Iterator[Fault]:
    some = case.slow or (kind in ALLOCATIONS and case.name != "run")
    most = MOST_OF_A_STUDY if some else None
    if not FULL:
        most = 1 if case.name in EVERY_TIME else MOST
    yield from (Fault(kind, at) for at in _spread(count, most))
    if kind not in ALLOCATIONS and count > 1:
        yield from (Fault(kind, at, lasting=True) for at in ({1, (count + 1) // 2} if FULL else {1}))


@pytest.mark.slow("asynchronous", "budget_in_a_script", "record_in_a_script", "run_at_a_share")
@pytest.mark.long(
    "report", "guard", "plan", "share", "script", "checkpoints", "record-open", "record-map", "record-sync", "record-folder",
    "record-process", "record-pipe", "record-write", "record-reserve", "record-denied", "run-write", "run-rename", "run-map",
    "run-reserve",
)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("case", [case for case in CASES if FULL or not case.slow], ids=str)
def test_a_failing_system_call_ends_no_training_and_leaves_nothing(
    case: Case, kind: str, library: Path, ready: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if case.slow and kind in ALLOCATIONS:
        pytest.skip("what is denied in a process under a budget is seen in `run`")
    unharmed = _unharmed(case, library, ready, tmp_path_factory.getbasetemp() / "unharmed")
    found = {}
    for fault in _faults(case, kind, unharmed.counts[kind]):
        ended = ran(case, library, tmp_path / str(fault), ready, fault)
        wrong = wrong_with(case, ended, unharmed)
        if wrong:
            found[str(fault)] = (wrong, ended.failed, ended.err[-2000:])
        shutil.rmtree(tmp_path / str(fault))
    assert not found
