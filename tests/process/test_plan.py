"""``lowtide plan`` as a user runs it: exit codes, files, one-line errors; a recorded step is planned as it was recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from command import TIMEOUT
from patience import PATIENCE
import pytest
from forked import forked

SECONDS = str(PATIENCE)
"""Time limit of a search; on these small graphs it ends earlier by itself."""


def _lowtide(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    if arguments[0] == "plan":
        return forked(*arguments, cwd=cwd)
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A forward of twelve operators and its backward."""
    n = 12
    nodes = [{"id": f"f{i}", "bytes": 10 + i % 3, "seconds": 1 + i % 4} for i in range(n)]
    nodes += [{"id": f"b{i}", "bytes": 10, "seconds": 2} for i in reversed(range(n))]
    links = [{"source": f"f{i - 1}", "target": f"f{i}"} for i in range(1, n)]
    links += [{"source": f"f{i}", "target": f"b{i}"} for i in range(n)]
    links += [{"source": f"b{i + 1}", "target": f"b{i}"} for i in range(n - 1)]
    path = tmp_path / "net.json"
    path.write_text(json.dumps({"nodes": nodes, "links": links, "graph": {"name": "net"}}))
    return path


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_plan_is_written_and_verified_and_refused_once_tampered(graph: Path, tmp_path: Path) -> None:
    """--json, then --check on it, then on tampered copies."""
    done = _lowtide("plan", graph, "--budget", "60%", "--seconds", SECONDS, "--json", "s.json", "--html", "p.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["status"] in ("optimal", "feasible")
    assert found["peak_bytes"] <= found["budget_bytes"] < found["given_peak_bytes"]
    assert found["bound"]["extra_seconds"] <= found["seconds"] - found["base_seconds"] + 1e-9
    assert {m[0] for m in found["schedule"]} <= {"compute", "free", "update", "offload", "fetch"}
    assert found["modules"]
    assert "extra time" in done.stderr
    assert "<script" in (tmp_path / "p.html").read_text()
    assert _lowtide("plan", graph, "--check", "s.json", cwd=tmp_path).returncode == 0
    for change in ({"peak_bytes": found["peak_bytes"] - 1}, {"schedule": found["schedule"][1:]}, {"seconds": 1.0},
                   {"bound": {**found["bound"], "extra_seconds": found["bound"]["extra_seconds"] + 5}}):  # fmt: skip
        (tmp_path / "t.json").write_text(json.dumps(found | change))
        assert _lowtide("plan", graph, "--check", "t.json", cwd=tmp_path).returncode == 1


def test_rounding_counts_whole_blocks_and_is_verified(graph: Path, tmp_path: Path) -> None:
    """--rounding: the bytes of every value are whole blocks, in the plan and in its check."""
    done = _lowtide("plan", graph, "--budget", "70%", "--rounding", "16", "--seconds", SECONDS, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["given_peak_bytes"] % 16 == found["peak_bytes"] % 16 == 0
    assert _lowtide("plan", graph, "--check", "s.json", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("strategy", ["search", "sqrt-n"])
def test_a_budget_below_the_floor_is_infeasible_with_its_proof(graph: Path, tmp_path: Path, strategy: str) -> None:
    """Exit code 1 with a bound above the budget, and the checker agrees."""
    done = _lowtide("plan", graph, "--budget", "5", "--strategy", strategy, "--json", "s.json", cwd=tmp_path)
    found = _read(tmp_path / "s.json")
    assert (done.returncode, found["status"]) == (1, "infeasible")
    assert found["bound"]["peak_bytes"] > 5
    assert _lowtide("plan", graph, "--check", "s.json", cwd=tmp_path).returncode == 0


def test_the_curve_is_monotone_and_no_plan_beats_its_bound(graph: Path, tmp_path: Path) -> None:
    """The curve runs from the given peak to the floor."""
    done = _lowtide("plan", graph, "--budget", "70%", "--curve", "--seconds", SECONDS, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    curve = _read(tmp_path / "s.json")["curve"]
    assert len(curve) >= 12
    shown = [c for c in curve if c["extra_seconds"] is not None]
    assert len(shown) >= 10
    assert [c["extra_seconds"] for c in shown] == sorted(c["extra_seconds"] for c in shown)
    bounds = [c["bound"]["extra_seconds"] for c in curve]
    assert bounds == sorted(bounds)
    assert all(c["bound"]["extra_seconds"] <= c["extra_seconds"] + 1e-9 for c in shown)
    assert all(c["peak_bytes"] <= c["budget_bytes"] for c in shown)


@pytest.mark.parametrize("strategy", ["keep-all", "keep-none", "sqrt-n", "greedy"])
def test_classic_strategies_are_chosen_by_name(graph: Path, tmp_path: Path, strategy: str) -> None:
    """By `--strategy`; the checker accepts each plan."""
    done = _lowtide("plan", graph, "--strategy", strategy, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["strategy"] == strategy
    assert _lowtide("plan", graph, "--check", "s.json", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(("strategy", "peak"), [("best-order", 101), ("worst-order", 102)])
def test_named_orders_count_as_free_order_and_are_verified(tmp_path: Path, strategy: str, peak: int) -> None:
    """Whatever --order says: the given order is not kept, so nothing is claimed about it."""
    nodes = [{"id": i, "bytes": size, "seconds": 1} for i, size in enumerate((50, 1, 50, 1, 1))]
    links = [{"source": a, "target": b} for a, b in ((0, 1), (2, 3), (1, 4), (3, 4), (0, 3))]
    (tmp_path / "net.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    done = _lowtide("plan", "net.json", "--strategy", strategy, "--budget", "100%", "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _read(tmp_path / "s.json")["peak_bytes"] == peak
    assert _read(tmp_path / "s.json")["order"] == "free"
    assert _lowtide("plan", "net.json", "--check", "s.json", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("strategy", ["search", "keep-all", "keep-none", "sqrt-n", "greedy"])
@pytest.mark.parametrize("more", [(), ("--offload", "6GiB", "--overlap", "--curve")])
def test_a_graph_without_operators_has_a_verified_plan(tmp_path: Path, strategy: str, more: tuple[str, ...]) -> None:
    (tmp_path / "net.json").write_text(
        json.dumps({"nodes": [{"id": 0, "bytes": 8, "seconds": 0, "resident": True}], "links": []})
    )
    done = _lowtide("plan", "net.json", "--budget", "8", "--strategy", strategy, *more, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert _lowtide("plan", "net.json", "--check", "s.json", *more[:3], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("none.json",), ("net.json", "--budget", "half"), ("net.json", "--strategy", "magic"), ("net.json", "--step", "1"),
        ("net.json", "--check", "none.json"), ("net.json", "--host", "5MiB"), ("net.json", "--budget", "auto"),
        ("cut.json",), ("net.json", "--json", "no/such/folder.json"), ("net.json", "--seconds", "nan"),
        ("net.json", "--seconds", "inf"), ("net.json", "--rounding", "9" * 20), ("deep.json",), ("long.json",),
        ("net.json", "--check", "deep.json"), ("net.json", "--check", "net.json"),
        ("net.json", "--json", "one.file", "--html", "./one.file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_two(graph: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """No traceback."""
    (tmp_path / "cut.json").write_text(graph.read_text()[:100])
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    nodes = [{"id": i, "bytes": 1, "seconds": 1e308} for i in range(3)]
    (tmp_path / "long.json").write_text(json.dumps({"nodes": nodes, "links": []}))
    done = forked("plan", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lowtide: error: ")
    assert done.stderr.count("\n") == 1


def test_names_that_look_like_markup_are_shown_unchanged(tmp_path: Path) -> None:
    """In the table and in error messages."""
    names = ["[/]", "[red]", "a[/b]", "end"]
    nodes = [{"id": n, "bytes": 0 if n == "end" else 5, "seconds": 1, "module": f"[bold]{n}[/no]"} for n in names]
    links = [{"source": a, "target": b} for a, b in (names[:2], names[1:3], names[2:], (names[0], names[3]))]
    (tmp_path / "m.json").write_text(json.dumps({"graph": {"name": "[/x]"}, "nodes": nodes, "links": links}))
    done = _lowtide("plan", "m.json", "--budget", "12", "--html", "m.html", "--json", "m.s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[bold][/][/no]" in done.stderr
    assert _lowtide("plan", "m.json", "--check", "m.s.json", cwd=tmp_path).returncode == 0
    changed = _read(tmp_path / "m.s.json")
    (tmp_path / "t.json").write_text(json.dumps(changed | {"schedule": [["compute", "nowhere"]]}))
    done = _lowtide("plan", "m.json", "--check", "t.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "it names an unknown node: 'nowhere'" in done.stderr


def test_offload_is_used_where_it_is_cheaper(graph: Path, tmp_path: Path) -> None:
    """A fast offload tier is cheaper than recomputing; one that is almost full is not."""
    done = _lowtide("plan", graph, "--budget", "60%", "--offload", "1000000", "--seconds", SECONDS, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["moved_bytes"] > 0
    assert found["extra_fraction"] < 0.001
    done = _lowtide("plan", graph, "--budget", "60%", "--offload", "1000000", "--host", "11", "--seconds", SECONDS, "--json", "h.json",
                    cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    full = _read(tmp_path / "h.json")
    assert 0 < full["host_peak_bytes"] <= 11
    assert full["extra_fraction"] > 0.05


SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(512, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_recorded_step_is_planned_as_it_was_recorded(tmp_path: Path) -> None:
    """Its peak without a plan is the recorded one, and the plan holds its budget at less than 50 % extra time."""
    (tmp_path / "train.py").write_text(SCRIPT)
    assert _lowtide("record", "--quiet", "-o", "r.lowtide", "--json", "r.json", "train.py", cwd=tmp_path).returncode == 0
    recorded = max(p["peak_bytes"] for s in _read(tmp_path / "r.json")["steps"] for p in s.get("phases", []))
    done = _lowtide("plan", "r.lowtide", "--budget", "75%", "--seconds", SECONDS, "--json", "s.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["given_peak_bytes"] == recorded
    assert found["peak_bytes"] <= found["budget_bytes"]
    assert found["extra_fraction"] < 0.5
    before = _lowtide("plan", "r.lowtide", "--step", "-1", "--budget", "75%", cwd=tmp_path)
    assert before.returncode == 2
    assert "no operators of step -1" in before.stderr


def test_allowed_levers_are_part_of_a_plan_and_of_its_check(tmp_path: Path) -> None:
    """Gradients are most of this step: below its minimum there is a plan with the lever only, and the check refuses it with
    any other set.
    """
    (tmp_path / "train.py").write_text(LARGE_WEIGHTS.format(hooks="", step="optimizer.step(); optimizer.zero_grad()"))
    assert _lowtide("record", "--quiet", "-o", "r.lowtide", "train.py", cwd=tmp_path).returncode == 0
    options = ("plan", "r.lowtide", "--step", "1", "--budget", "12MiB", "--seconds", SECONDS, "--json")
    done = _lowtide(*options, "plain.json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    plain = _read(tmp_path / "plain.json")
    assert plain["status"] == "infeasible"
    assert "with_levers" not in plain
    (update,) = (x for x in plain["levers"] if x["names"] == ["update-in-backward"])
    assert update["status"] == "optimal"
    assert "cannot be held" in done.stderr
    assert "update-in-backward" in done.stderr
    done = _lowtide(*options, "s.json", "--allow", "exact", "--html", "s.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = _read(tmp_path / "s.json")
    assert found["with_levers"] == ["update-in-backward"]
    assert found["peak_bytes"] <= 12 << 20
    assert "update-in-backward</b> (this plan)" in (tmp_path / "s.html").read_text()
    assert _lowtide("plan", "r.lowtide", "--step", "1", "--check", "s.json", cwd=tmp_path).returncode == 0
    for change in ({"with_levers": []}, {"with_levers": ["sliced-update"]}, {"with_levers": ["spare-time"]}):
        (tmp_path / "other.json").write_text(json.dumps(found | change))
        done = _lowtide("plan", "r.lowtide", "--step", "1", "--check", "other.json", cwd=tmp_path)
        assert done.returncode
        assert "Traceback" not in done.stderr


def test_levers_need_a_recording_and_a_budget(graph: Path, tmp_path: Path) -> None:
    for options in (("--budget", "60%"), ()):
        done = _lowtide("plan", graph, *options, "--allow", "all", cwd=tmp_path)
        assert done.returncode == 2
        assert "--allow needs a recording and --budget" in done.stderr


LARGE_WEIGHTS = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
{hooks}
for _ in range(3):
    loss = net(torch.randn(4, 512)).square().mean()
    loss.backward()
    {step}
"""
IN_BACKWARD = """
def update(p):
    with torch.no_grad():
        p.add_(p.grad, alpha=-0.1)
    p.grad = None
end = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
for p in net.parameters():
    p.register_post_accumulate_grad_hook(update)
"""


@pytest.mark.long
def test_update_in_backward_saves_what_the_plan_says(tmp_path: Path) -> None:
    """The lever's saving is that of the script with the change made for real."""
    plain = LARGE_WEIGHTS.format(hooks="", step="optimizer.step(); optimizer.zero_grad()")
    changed = LARGE_WEIGHTS.format(hooks=IN_BACKWARD, step="end.step()")
    peaks = {}
    for name, text in (("plain", plain), ("changed", changed)):
        (tmp_path / f"{name}.py").write_text(text)
        made = _lowtide("record", "--quiet", "-o", f"{name}.lowtide", f"{name}.py", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        done = _lowtide("plan", f"{name}.lowtide", "--step", "1", "--seconds", "0.2", "--json", f"{name}.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        peaks[name] = _read(tmp_path / f"{name}.json")
    (lever,) = (x for x in peaks["plain"]["levers"] if x["names"] == ["update-in-backward"])
    real = peaks["plain"]["given_peak_bytes"] - peaks["changed"]["given_peak_bytes"]
    assert real > 4 << 20
    assert abs(lever["saving_bytes"] - real) <= max(0.02 * real, 64 << 10)
