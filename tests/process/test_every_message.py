"""Every error that a user can meet is met here or by another test; its text is in ``messages.json``, to be reviewed.

``LOWTIDE_SNAPSHOT=1`` writes that file again.
"""

from __future__ import annotations

import ast
import collections
import functools
import json
import os
import re
import sqlite3
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import lowtide_in
from forked import forked, forked_call
from lowtide.checkpoint import resume, store, whole
from lowtide.checkpoint.tree import pack
from lowtide import data
from lowtide.base.errors import LowtideError
from lowtide.planning import graph_json, schedule
from lowtide.planning.unit.plan_file import Plan, save_plan
from lowtide.studies.size.predict import Model

import lowtide

SOURCE, TESTS = Path(lowtide.__file__).parent, Path(__file__).parent.parent
SNAPSHOT = Path(__file__).with_name("messages.json")
NODES = {"nodes": [{"id": 0, "bytes": 1}, {"id": 1, "bytes": 1}], "links": [{"source": 0, "target": 1}]}
SWEEP = 'command = "python train.py"\nsteps = 5\n'


def _graph(**more: Any) -> str:
    return json.dumps({**NODES, **more})


def _node(**more: Any) -> str:
    return _graph(nodes=[{"id": 0, "bytes": 1}, {"id": 1, "bytes": 1, **more}])


def _recording(folder: Path, level: str = "ops", steps: int = 3) -> None:
    """``a.lowtide``, of a small training."""
    with lowtide.record(folder / "a.lowtide", level=level):  # type: ignore[arg-type]
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def _without_operators(folder: Path) -> None:
    _recording(folder, level="phases")


def _of_a_later_format(folder: Path) -> None:
    _recording(folder)
    with sqlite3.connect(folder / "a.lowtide") as base:
        base.execute("UPDATE meta SET value = '999' WHERE key = 'format'")


def _archive(folder: Path, *, damaged: bool = False) -> None:
    with zipfile.ZipFile(folder / "r.zip", "w") as file:
        file.writestr("a.lowtide" if damaged else "x.txt", "x" * 1000)
    if damaged:
        whole = bytearray((folder / "r.zip").read_bytes())
        whole[40:60] = bytes(20)
        (folder / "r.zip").write_bytes(bytes(whole))


def _plan_of_a_later_format(folder: Path) -> None:
    (folder / "train.py").write_text("pass\n")
    save_plan(Plan(format=999, fingerprint=0, budget_bytes=1, choices=()), folder / "p.plan")


def _of_unknown_levers(folder: Path) -> None:
    _recording(folder)
    (folder / "s.json").write_text('{"status": "optimal", "bound": {}, "with_levers": ["unknown"]}')


def _swept_otherwise(folder: Path) -> None:
    (folder / "train.py").write_text("import lowtide\nfor _ in range(9): lowtide.step()\n")
    axes = '[axes]\nn = {argument = "", values = [1]}\n'
    (folder / "s.toml").write_text(SWEEP + axes)
    assert forked("sweep", "s.toml", "--quiet", "--results", "r", cwd=folder).returncode == 0
    (folder / "s.toml").write_text(SWEEP.replace("5", "6") + axes)


Made = dict[str, str] | Callable[[Path], None]
TRAIN = {"train.py": "pass\n"}
COMMANDS: dict[str, tuple[str, Made]] = {
    "a lever both allowed and excluded": ("run --budget 1GiB --allow chunked-loss --without chunked-loss train.py", TRAIN),
    "no budget": ("run train.py", TRAIN),
    "a plan that is not there": ("run --budget 1GiB --plan p.plan train.py", TRAIN),
    "a plan of another format": ("run --budget 1GiB --plan p.plan train.py", {**TRAIN, "p.plan": '{"format": 999, "decisions": []}'}),
    "a plan of a later format": ("run --budget 1GiB --plan p.plan train.py", _plan_of_a_later_format),
    "constants of what is not Python": ("batch --vary train.py:N=1,2 train.py", {"train.py": "N = ("}),
    "auto without CUDA": ("run --budget auto train.py", TRAIN),
    "no module": ("run --budget 1GiB -m no_such_module_at_all", {}),
    "a folder that is not there": ("run --budget 1GiB --json no/f.json train.py", TRAIN),
    "a folder for a file": ("run --budget 1GiB --json . train.py", TRAIN),
    "open axes of two": ("batch --vary batch=1,2,... --vary length=1,2 train.py", TRAIN),
    "an open axis to predict": ("batch --vary batch=1,2,... --predict train.py", TRAIN),
    "a measured option to predict": ("batch --vary batch=1,2 --predict --fresh train.py", TRAIN),
    "one size to predict": ("batch --vary batch=1 --predict train.py", TRAIN),
    "an axis without values": ("batch --vary batch train.py", TRAIN),
    "an axis of an unnamed variable": ("batch --vary env:=1,2 train.py", TRAIN),
    "a results file that is none": ("batch --vary batch=1,2 --results r train.py", {**TRAIN, "r": "nonsense\n"}),
    "a size twice": ("predict a.lowtide --set batch=1 --set batch=2", _recording),
    "a size that is none": ("predict a.lowtide --set batch=x", _recording),
    "recordings without operators": ("predict a.lowtide --set batch=2", _without_operators),
    "exit without a sign": ("guard --recycle exit train.py", TRAIN),
    "a sign without exit": ("guard --done d train.py", TRAIN),
    "no command": ("leak --", {}),
    "two tolerances": ("leak --tolerance 1KiB --memory-left 1GiB --planned-steps 10 train.py", TRAIN),
    "one file for two": ("plan g.json --budget 1 --json x --html x", {"g.json": _graph()}),
    "auto for a plan": ("plan g.json --budget auto", {"g.json": _graph()}),
    "a step of a graph": ("plan g.json --budget 1 --step 1", {"g.json": _graph()}),
    "a plan of what has no operators": ("plan a.lowtide --budget 50%", _without_operators),
    "a host without offload": ("plan g.json --budget 2 --host 1", {"g.json": _graph()}),
    "an infinite limit": ("plan g.json --budget 2 --seconds inf", {"g.json": _graph()}),
    "revolve of no chain": ("plan g.json --budget 100% --strategy revolve", {"g.json": _graph(nodes=[{"id": i, "bytes": 1} for i in range(4)], links=[{"source": 0, "target": i} for i in (1, 2, 3)])}),
    "no JSON": ("plan g.json", {"g.json": "{"}),
    "unknown levers of a solution": ("plan a.lowtide --check s.json", _of_unknown_levers),
    "an allocator and a curve": ("plan g.json --budget 2 --allocator cuda --curve", {"g.json": _graph()}),
    "orders of too many": ("plan g.json --strategy best-order", {"g.json": _graph(nodes=[{"id": i, "bytes": 1} for i in range(99)])}),
    "a module after the dashes": ("leak -m -- ls", {}),
    "an axis that falls": ("batch --vary batch=2,1,... train.py", TRAIN),
    "nested too deeply": ("plan g.json", {"g.json": "[" * 100_000}),
    "no node-link graph": ("plan g.json", {"g.json": "[]"}),
    "links that are no list": ("plan g.json", {"g.json": _graph(links=5)}),
    "about no object": ("plan g.json", {"g.json": _graph(graph=[1])}),
    "an unknown node": ("plan g.json", {"g.json": _graph(links=[{"source": 0, "target": 7}])}),
    "an order against the links": ("plan g.json", {"g.json": _graph(graph={"order": [1, 0]})}),
    "an order that names one twice": ("plan g.json", {"g.json": _graph(graph={"order": [0, 0, 1]})}),
    "a cycle": ("plan g.json", {"g.json": _graph(links=[{"source": 0, "target": 1}, {"source": 1, "target": 0}])}),
    "a node without an id": ("plan g.json", {"g.json": _graph(nodes=[{"bytes": 1}])}),
    "a link without a target": ("plan g.json", {"g.json": _graph(links=[{"source": 0}])}),
    "bytes below zero": ("plan g.json", {"g.json": _node(bytes=-1)}),
    "held and resident": ("plan g.json", {"g.json": _graph(nodes=[{"id": 0, "bytes": 1, "resident": True, "held_until": 1}, {"id": 1, "bytes": 1}])}),
    "made with what is none": ("plan g.json", {"g.json": _graph(nodes=[{"id": 0, "bytes": 1, "resident": True}, {"id": 1, "bytes": 1, "made_with": 0}], links=[])}),
    "made with, and seconds": ("plan g.json", {"g.json": _graph(nodes=[{"id": 0, "bytes": 1}, {"id": 1, "bytes": 1, "made_with": 0, "seconds": 1}], links=[])}),
    "an offload that is none": ("plan g.json", {"g.json": _graph(graph={"offload": {}})}),
    "a solution that is none": ("plan g.json --check s.json", {"g.json": _graph(), "s.json": '{"schedule": 5}'}),
    "no recording": ("report no.lowtide", {}),
    "an empty recording": ("report a.lowtide", {"a.lowtide": ""}),
    "a bundle for a recording": ("report r.zip", _archive),
    "an archive of none": ("predict r.zip --set batch=2", _archive),
    "a damaged archive": ("predict r.zip --set batch=2", functools.partial(_archive, damaged=True)),
    "a damaged recording": ("report a.lowtide", {"a.lowtide": "x" * 4096}),
    "a recording of a later format": ("report a.lowtide", _of_a_later_format),
    "an axis neither on nor off": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + 'framework = "torch"\n[axes]\nonednn = ["maybe"]\n'}),
    "JAX of many threads": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + 'framework = "jax"\n[axes]\nthreads = [4]\n'}),
    "an allocator that is none": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + '[axes]\nallocator = ["none"]\n'}),
    "more cells than end": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + 'repeats = 1000000\n[axes]\nn = {argument = "", values = [1, 2]}\n'}),
    "no axes": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + "[axes]\n"}),
    "no regular expression": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + 'step_line = "("\n[axes]\nn = {argument = "", values = [1, 2]}\n'}),
    "a rule of an unknown axis": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + 'exclude = [{m = 1}]\n[axes]\nn = {argument = "", values = [1, 2]}\n'}),
    "an axis of no values": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + "[axes]\nallocator = []\n"}),
    "steps that are too few": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP.replace("5", "1") + "[axes]\nthreads = [1]\n"}),
    "a command that ends within a quote": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP.replace("train", "'") + "[axes]\nthreads = [1]\n"}),
    "a null byte": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP.replace("train", "\\u0000") + "[axes]\nthreads = [1]\n"}),
    "a value twice": ("sweep s.toml", {**TRAIN, "s.toml": SWEEP + '[axes]\nn = {argument = "", values = [1, 1]}\n'}),
    "results of another sweep": ("sweep s.toml --results r", _swept_otherwise),
    "results that are none": ("sweep s.toml --results r", {**TRAIN, "r": "x" * 4096, "s.toml": SWEEP + '[axes]\nn = {argument = "", values = [1, 2]}\n'}),
}  # fmt: skip


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _resumed(folder: Path) -> None:
    weights = np.zeros(2)
    resume(folder / "c", {"w": weights})
    lowtide.checkpoint(folder / "c", {"w": weights}, save=True)
    resume(folder / "c", {"w": weights, "more": np.zeros(2)})


def _of_another_shape(folder: Path, make: Callable[[int], Any] = np.zeros) -> None:
    lowtide.checkpoint(folder / "c", {"w": make(2)}, save=True)
    resume(folder / "c", {"w": make(3)})


def _in_no_folder(folder: Path) -> None:
    with whole.written(folder / "no" / "c"):
        (folder / "no" / "c").touch()


def _predicted_without_operators(folder: Path) -> None:
    _without_operators(folder)
    recording = lowtide.recording.reader.read(folder / "a.lowtide")
    Model([({"batch": 1.0}, recording), ({"batch": 2.0}, recording)])


def _of_a_later_version(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as later:
        later.setattr(store, "FORMAT", 999)
        store.Store(folder / "c").save({"x": 1})
    store.Store(folder / "c").load()


class _Named(torch.Tensor):
    """A tensor with more than numbers."""

    __module__ = "train"


def _garbage(folder: Path, name: str) -> str:
    (folder / name).write_bytes(b"x" * 1000)
    return str(folder / name)


def _parquet(folder: Path, **columns: Any) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), folder / "x.parquet")
    return str(folder / "x.parquet")


CALLS: dict[str, Callable[[Path], object]] = {
    "a defaultdict of a function's": lambda _: pack({"x": collections.defaultdict(lambda: 1)}),
    "another machine's bytes": lambda _: pack(np.zeros(2, dtype=">f8")),
    "an array of texts": lambda _: pack(np.array(["a"])),
    "an object of its own": lambda _: pack(collections.UserString("x")),
    "what contains itself": lambda _: pack(_itself()),
    "a sparse tensor": lambda _: pack(torch.eye(2).to_sparse()),
    "parts that do not fit": _resumed,
    "a shape that does not fit": _of_another_shape,
    "a checkpoint of a later version": _of_a_later_version,
    "a whole checkpoint in no folder": _in_no_folder,
    "a tensor's shape that does not fit": lambda folder: _of_another_shape(folder, torch.zeros),
    "recordings of no operators": _predicted_without_operators,
    "an object that keeps more than numbers": lambda _: pack(np.ma.zeros(2)),
    "a tensor that keeps more than numbers": lambda _: pack(torch.zeros(2).as_subclass(_Named)),
    "fewer entries than were saved": lambda folder: _of_another_shape(folder, lambda n: [np.zeros(1)] * n),
    "a level that is none": lambda folder: lowtide.record(folder / "a.lowtide", level="all").__enter__(),  # type: ignore[arg-type]
    "a file of an unknown kind": lambda folder: data.open(_garbage(folder, "x.csv"), "a"),
    "a name within an array": lambda folder: data.open(_garbage(folder, "x.npy"), "a"),
    "a file that is no Parquet": lambda folder: data.open(_garbage(folder, "x.parquet"), "a"),
    "a file that is no HDF5": lambda folder: data.open(_garbage(folder, "x.h5"), "a"),
    "a schedule that is none": lambda _: schedule.from_json(graph_json.from_json(NODES), 5),
    "no data": lambda folder: data.open(folder / "none.npy"),
    "data without a name": lambda folder: data.open(_parquet(folder, a=[1, 2])),
    "no type": lambda folder: data.open(_parquet(folder, a=[1, 2]), "a", dtype="nothing"),
    "texts for numbers": lambda folder: data.open(_parquet(folder, a=["x", "y"]), "a").read(0, 1),
    "lists of several lengths": lambda folder: data.open(_parquet(folder, a=[[1.0], [1.0, 2.0]]), "a").read(0, 1),
    "columns of several types": lambda folder: data.open(_parquet(folder, a=[1, 2], b=[1.0, 2.0]), ["a", "b"]).read(0, 1),  # type: ignore[arg-type]
    "an empty batch": lambda _: lowtide.micro_batched(lambda x: x.sum(), model=torch.nn.Linear(2, 2), reduction="sum")(torch.zeros(0, 2)),
}  # fmt: skip


RUNS: dict[str, tuple[int, str, Made]] = {
    "what a quiet guard says": (7, "guard --quiet train.py", {"train.py": "raise SystemExit(7)\n"}),
    "a guard's file that is full": (0, "guard --quiet --json /dev/full train.py", TRAIN),
    "a script that fails at a size": (2, "batch --vary batch=1,2 --predict train.py", {"train.py": "raise SystemExit('no such size')\n"}),
    "a script that fails by itself": (1, "min train.py", {"train.py": "raise SystemExit('no such data')\n"}),
    "a leak of what crashes": (7, "leak --no-who --processes 1 train.py", {"train.py": "import lowtide\nlowtide.step()\nraise SystemExit(7)\n"}),
}  # fmt: skip
"""Exit code, words and files of commands that begin: the last line says what was wrong."""


def _made(folder: Path, files: Made) -> None:
    if callable(files):
        assert forked_call(lambda: files(folder)).returncode == 0
        return
    for name, text in files.items():
        (folder / name).write_text(text)


def _shown(text: str, folder: Path) -> str:
    """The text without what changes from machine to machine."""
    text = text.replace(str(folder), "FOLDER").replace(f"{sys.executable} -B", sys.executable).replace(sys.executable, "PYTHON")
    return re.sub(r"(cannot be read:).*", r"\1 …", re.sub(r"\s+", " ", text)).strip()


def _met() -> Iterator[tuple[str, str]]:
    known: dict[str, str] = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    yield from known.items()


def _same_as_before(name: str, said: str) -> None:
    if os.environ.get("LOWTIDE_SNAPSHOT"):
        SNAPSHOT.write_text(json.dumps(dict(sorted({**dict(_met()), name: said}.items())), indent=1, ensure_ascii=False) + "\n")
    assert dict(_met())[name] == said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_command_says_why_in_one_line(name: str, tmp_path: Path) -> None:
    words, files = COMMANDS[name]
    _made(tmp_path, files)
    done = forked(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("lowtide: error: ")
    assert len(done.stderr.splitlines()) == 1
    _same_as_before(name, _shown(done.stderr, tmp_path))


@pytest.mark.parametrize("name", RUNS)
def test_a_failure_of_a_running_command_is_its_last_line(name: str, tmp_path: Path) -> None:
    code, words, files = RUNS[name]
    _made(tmp_path, files)
    done = lowtide_in(tmp_path, *words.split())
    assert done.returncode == code, done.stderr
    _same_as_before(name, _shown(done.stderr.splitlines()[-1], tmp_path))


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(LowtideError) as raised:
        CALLS[name](tmp_path)
    _same_as_before(name, _shown(str(raised.value), tmp_path))


# --- whether that is all --------------------------------------------------------------------------------------------------

SAYS = {name for name in dir(lowtide.base.errors) if name.endswith("Error")} | {"tell", "fail"}
ELSEWHERE: dict[str, str] = {
    "another rank could not save": "two ranks, of which one fails: tests/process/test_checkpoint.py looks at what is left",
    "ranks, but": "as many processes as saved it: the same",
    "another process has been saving": "a lock that is held for as long as LOCK_SECONDS",
    "build the same model first": "Keras models of two sizes: an environment with Keras",
    "cannot create a cgroup": "a machine on which none can be created",
    "not for lack of memory": "two ranks, of which one fails",
    "before it reads anything, more than its limit": "tests/process/test_data.py looks at what is raised",
    "the script fails without Lowtide": "`lowtide min` says the same",
    "points from": "tests/process/test_every_option.py looks at the points",
    "which was not built": "an installation without a C compiler",
    "no offload tier, or held": "an error of ours, never of input",
    "is never computed": "an error of ours, never of input",
    "the row computes": "an error of ours, never of input",
    "the budget of": "its figures are the machine's: tests/process/test_cli.py",
    "deferred": "tests/torch/test_chunked_loss.py asks for the lever's name",
    "; use group normalisation": "the end of a message whose beginning tests/torch/test_micro_batches.py meets",
    "check that there is memory for": "readers that the kernel kills: tests/process/test_data.py looks at what is raised",
    "no ablation": "tests/slow/test_ablation.py looks at what fails",
    "the data set failed": "an error that no process can be sent: tests/process/test_data.py raises others",
    "no command was given": "click says so before: it is there for callers of the function",
    "the test has no phase": "tests/process/test_pytest_plugin.py looks at what is raised",
    "is not an array with samples": "a group of HDF5 or Zarr: tests/process/test_data.py looks at what is raised",
    "interrupted while the figures were written": "Ctrl-C in the milliseconds in which a file is written",
}
"""Messages that no test meets, by a part of their text, and why."""


def _parts(node: ast.expr) -> list[str]:
    """The texts of a message between its inserted values."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values if isinstance(value, ast.Constant) for part in _parts(value)]
    if isinstance(node, ast.BinOp):
        return [*_parts(node.left), *_parts(node.right)]
    return [*_parts(node.body), *_parts(node.orelse)] if isinstance(node, ast.IfExp) else []


def _messages() -> Iterator[tuple[str, list[str]]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and node.args:
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                parts = [re.sub(r"\s+", " ", part).strip() for part in _parts(node.args[0])]
                if name in SAYS and any(len(part) >= 8 for part in parts):
                    yield f"{file.relative_to(SOURCE)}:{node.lineno}", [part for part in parts if part]


def test_every_message_is_met_by_a_test() -> None:
    """By one of the above, word for word, or by three consecutive words of it in any other test."""
    told = "\n".join(dict(_met()).values())
    others = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in TESTS.rglob("*.py")).replace("\\", "")
    unmet = []
    for where, parts in _messages():
        words = [part.split() for part in parts]
        triples = [" ".join(w[i : i + 3]) for w in words for i in range(max(1, len(w) - 2)) if len(" ".join(w)) >= 8]
        exactly = re.search(".*".join(re.escape(part) for part in parts), told)
        if not (exactly or any(t in others for t in triples) or any(part in " ".join(parts) for part in ELSEWHERE)):
            unmet.append((where, " … ".join(parts)))
    assert not unmet
