"""Which faults the tests notice: small changes of the code, sampled by package, and the tests of that package run on each.

Cosmic Ray (https://cosmic-ray.readthedocs.io) makes the mutants: another operator, another constant, a condition turned, a
loop that ends at once. A mutant *survives* if every test of its package still passes. Docstrings, annotations and formatted
texts are left out. Everything happens in a copy of the tree, which is mutated in place.

Prints a table by package and, with ``--json FILE``, writes every survivor with its difference.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
TIMES_LONGER, MORE_SECONDS = 4.0, 120.0
"""A mutant whose tests take so many times as long as without it, and so much more, is caught: it hangs."""


@dataclass(frozen=True)
class Package:
    """Code, and the tests that are about it.

    Attributes:
        modules: below ``src/lowtide``.
        tests: files below ``tests``, and options of pytest.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]


PACKAGES = {
    "interception": Package((
        "runtime/intercept/bypass.py", "runtime/device/offload.py", "runtime/intercept/mode_sensitive_backward.py",
        "runtime/intercept/inplace_accumulation.py", "runtime/online/mode.py", "runtime/online/eviction.py",
        "runtime/units/unit_signature.py", "runtime/planned/mode.py", "runtime/storage/ledger.py",
        "runtime/intercept/data_swaps.py", "runtime/planned/retained_graphs.py",
        "runtime/intercept/pointer_escapes.py", "runtime/record/trace_recorder.py", "runtime/units/plan_cache.py",
        "runtime/replay/chain.py", "runtime/units/peak_model.py", "runtime/control/runtime.py",
        "runtime/record/saved_tensors.py", "runtime/units/unit.py", "runtime/control/plan_choice.py",
        "runtime/control/unit_start.py", "runtime/control/unit_review.py", "runtime/control/unit_boundaries.py",
        "runtime/control/interception.py", "runtime/storage/value.py", "runtime/storage/views.py",
        "runtime/monkeypatch.py",
    ), (
        "unit/test_rises.py", "unit/test_crossings.py", "torch/test_runtime.py", "torch/test_retained_graphs.py",
        "torch/test_late_writes.py", "torch/test_overwritten_saves.py", "torch/test_exchanged_data.py",
        "torch/test_backwards_within.py", "torch/test_held_in_backward.py", "torch/test_offload_tier.py",
        "torch/test_derivatives_otherwise.py", "torch/test_derivatives_in_place.py", "torch/test_new_sizes.py",
        "torch/test_settings.py", "torch/test_situations.py", "torch/test_random_programs.py", "process/test_trust.py",
    )),
    "levers": Package((
        "runtime/updates/offloaded_gradients.py", "runtime/levers/deferred_logits.py",
        "runtime/levers/chunked_cross_entropy.py", "runtime/micro_batch.py", "runtime/levers/split_layers.py",
        "runtime/levers/split_backward.py", "runtime/updates/single_update.py", "runtime/updates/sliced_optimizer.py",
        "runtime/updates/optimizer_in_backward.py",
    ), (
        "torch/test_micro_batches.py", "torch/test_chunked_loss.py", "torch/test_split_ops.py",
        "torch/test_split_backwards.py", "torch/test_planned_levers.py", "torch/test_levers.py",
        "process/test_every_option.py",
    )),
    "recording": Package((
        "runtime/record/process_sampler.py", "runtime/intercept/script_frames.py", "runtime/intercept/phases.py",
        "runtime/record/run_recorder.py", "runtime/record/operator_observer.py", "runtime/record/block_table.py",
        "runtime/record/roles.py", "runtime/record/attribution.py", "runtime/record/live_blocks.py",
    ), (
        "torch/test_begun_late.py", "torch/test_frames.py", "torch/test_recorded_graph.py", "torch/test_tracers.py",
        "torch/test_findings.py", "process/test_record.py", "process/test_recorded_peaks.py", "process/test_one_floor.py",
    )),
    "leak": Package(("studies/leak",), (
        "unit/test_trend.py", "unit/test_leak_rules.py", "unit/test_unseen.py", "unit/test_retention.py",
        "unit/test_ablation_rules.py",
        "process/test_leak.py",
    )),
    "guard": Package(("guard",), ("unit/test_guard_rules.py", "process/test_guard.py")),
    "checkpoint": Package(("checkpoint",), ("unit/test_safe_points.py", "process/test_checkpoint.py")),
    "size": Package(("studies/size",), (
        "unit/test_minimum.py", "unit/test_trials.py", "unit/test_fitted_sizes.py", "process/test_size.py",
        "torch/test_predict.py",
    )),
    "store": Package(tuple(f"recording/{m}.py" for m in ("file_format", "journal", "writer", "reader", "summary")), (
        "unit/test_journal.py", "process/test_record.py", "process/test_full_disk.py")),
    "findings": Package(("recording/findings",), (
        "torch/test_findings.py", "torch/test_everyday_findings.py", "torch/test_float64_findings.py",
        "torch/test_post_mortem.py", "process/test_record.py",
    )),
}  # fmt: skip


def _telling(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where texts and annotations begin and end, as (line, column): a change there changes no figure."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        parts: list[ast.expr | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            parts = [node if isinstance(node, ast.JoinedStr) else node.value]
        for part in parts:
            if part is not None:
                found.append(((part.lineno, part.col_offset), (part.end_lineno or part.lineno, part.end_col_offset or 0)))
    return found


def _sampled(session: Path, tree: Path, count: int, seed: int) -> int:
    """Leave so many mutants in a session, drawn at random; how many there were."""
    with sqlite3.connect(session) as base:
        rows = base.execute(
            "SELECT job_id, module_path, operator_name, start_pos_row, start_pos_col FROM mutation_specs ORDER BY job_id"
        ).fetchall()
        telling = {path: _telling(tree / path) for path in {row[1] for row in rows}}
        fit = sorted(
            (path, line, column, name, job) for job, path, name, line, column in rows
            if not any(start <= (line, column) < end for start, end in telling[path])
        )
        kept = {row[-1] for row in random.Random(seed).sample(fit, min(count, len(fit)))}
        for job, *_ in rows:
            if job not in kept:
                base.execute("DELETE FROM mutation_specs WHERE job_id = ?", (job,))
                base.execute("DELETE FROM work_items WHERE job_id = ?", (job,))
    return len(fit)


def measure(name: str, count: int, seed: int) -> dict[str, Any]:
    """Mutants of one package, and what became of them."""
    package = PACKAGES[name]
    with tempfile.TemporaryDirectory(prefix="lowtide-mutants-") as folder:
        tree = Path(folder)
        for part in ("src", "tests", "examples", "benchmarks"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        heap = next((tree / "src/lowtide").rglob("_heap*.so"))
        tests = " ".join(f"tests/{t}" for t in package.tests)
        run = f'{sys.executable} -m pytest -x -q -m "not takes_long and not takes_hours" -p no:cacheprovider {tests}'
        environment = {
            **os.environ, "PYTHONPATH": str(tree / "src"), "LD_PRELOAD": str(heap), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        # where the tests fail as it is, every mutant would be caught
        began = time.monotonic()
        subprocess.run(shlex.split(run), cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        most = TIMES_LONGER * (time.monotonic() - began) + MORE_SECONDS
        (tree / "mutants.toml").write_text("\n".join([
            "[cosmic-ray]", f"module-path = {json.dumps([f'src/lowtide/{m}' for m in package.modules])}",
            f"timeout = {most}", "excluded-modules = []", f"test-command = {json.dumps(run)}",
            "[cosmic-ray.distributor]", 'name = "local"',
        ]))  # fmt: skip
        ray = [str(Path(sys.executable).parent / "cosmic-ray")]
        subprocess.run([*ray, "init", "mutants.toml", "session.sqlite"], cwd=tree, check=True)
        there = _sampled(tree / "session.sqlite", tree, count, seed)
        subprocess.run([*ray, "exec", "mutants.toml", "session.sqlite"], cwd=tree, env=environment, check=True)
        with sqlite3.connect(tree / "session.sqlite") as base:
            rows = base.execute(
                "SELECT module_path, start_pos_row, operator_name, test_outcome, diff "
                "FROM mutation_specs JOIN work_results USING (job_id)"
            ).fetchall()
    survivors = [
        {"module": path, "line": line, "operator": operator, "difference": diff}
        for path, line, operator, outcome, diff in rows
        if str(outcome).lower().endswith("survived")
    ]
    return {"package": name, "there": there, "tried": len(rows), "caught": len(rows) - len(survivors), "survivors": survivors}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--packages", nargs="*", default=list(PACKAGES), choices=list(PACKAGES))
    options.add_argument("--count", type=int, default=25, help="mutants of each package")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows = [measure(name, given.count, given.seed) for name in track(given.packages, "mutants")]
    table = Table("package", "mutants", "tried", "caught", "survive")
    for row in rows:
        caught, survive = f"{row['caught'] / max(1, row['tried']):.0%}", str(len(row["survivors"]))
        table.add_row(row["package"], str(row["there"]), str(row["tried"]), caught, survive)
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "packages": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
