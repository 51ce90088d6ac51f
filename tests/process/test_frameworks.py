"""Training frameworks under a budget: DistributedDataParallel, FSDP2, the Hugging Face Trainer, Lightning.

Each script of ``scripts/`` runs in its own processes: without Lowtide, once with room to spare (to learn what it needs), and
at ``SHARE`` of what it needs beyond its resident bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from command import TIMEOUT
import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = {"ddp": 2, "fsdp2": 2, "trainer": 1, "lightning": 1}
NEEDS = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}
TRIES = 3
SHARE = 0.6
ROOMY = 8 << 30


@dataclass(frozen=True)
class Ran:
    """What one launch left behind; one entry per rank."""

    code: int
    errors: str
    results: tuple[dict[str, Any], ...]
    figures: tuple[dict[str, Any], ...]
    plans: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Trio:
    """The three launches of one script."""

    plain: Ran
    roomy: Ran
    tight: Ran


def _ranked(path: Path, ranks: int) -> list[Path]:
    """Where Lowtide writes a file: the first rank to the name itself."""
    return [path, *(path.with_name(f"{path.name}.rank{rank}") for rank in range(1, ranks))]


def _command(name: str, folder: Path, budget: int | str | None, arguments: tuple[str, ...]) -> list[str]:
    """The command line a user would give."""
    prefix = [sys.executable]
    if RANKS[name] > 1:
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])]
    if budget is not None:
        files = ["--json", str(folder / "figures"), "--save-plan", str(folder / "plan")]
        prefix += ["-m", "lowtide", "run", "--quiet", "--budget", str(budget), *files]
    return [*prefix, str(SCRIPTS / f"{name}_train.py"), str(folder / "result"), *arguments]


def _read_json(paths: list[Path]) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(path.read_text()) for path in paths if path.exists())


def _launch(name: str, folder: Path, budget: int | str | None = None, arguments: tuple[str, ...] = ()) -> Ran:
    """Run a script to its end and collect what it left."""
    folder.mkdir()
    ranks = RANKS[name]
    for _ in range(TRIES):
        done = subprocess.run(
            _command(name, folder, budget, arguments), env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        if "address already in use" not in done.stderr.lower():  # torchrun looks for a free port, and others may take it
            break
    result = folder / "result"
    saved = [folder / f"result.rank{rank}" for rank in range(ranks)] if ranks > 1 else [result]
    return Ran(
        done.returncode,
        done.stderr,
        tuple(torch.load(path) for path in saved if path.exists()),
        _read_json(_ranked(folder / "figures", ranks)),
        _read_json(_ranked(folder / "plan", ranks)),
    )


def _budget(figures: tuple[dict[str, Any], ...]) -> int:
    """The resident bytes and ``SHARE`` of the rest, for the rank that needs most."""
    plans = [each["plan"] for each in figures]
    resident = max(plan["resident_bytes"] for plan in plans)
    return int(resident + SHARE * (max(plan["baseline_peak_bytes"] for plan in plans) - resident))


@pytest.fixture(scope="module")
def trio_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trio]:
    """The launches of a script, run once."""

    @cache
    def launches(name: str) -> Trio:
        for module in NEEDS.get(name, ()):
            pytest.importorskip(module)
        folder = tmp_path_factory.mktemp(name)
        plain, roomy = _launch(name, folder / "plain"), _launch(name, folder / "roomy", ROOMY)
        known = roomy.code == 0 and all(each["plan"] is not None for each in roomy.figures)
        return Trio(plain, roomy, _launch(name, folder / "tight", _budget(roomy.figures)) if known else roomy)

    return launches


def _grouped(names: Iterable[str]) -> pytest.MarkDecorator:
    """One worker runs the launches of a script for all its tests (marks of a fixture's parameters do not reach xdist)."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in names])


def _assert_equal(one: Ran, other: Ran, ranks: int) -> None:
    """Losses and weights of every rank agree bit by bit."""
    assert len(one.results) == len(other.results) == ranks
    for mine, theirs in zip(one.results, other.results, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["weights"].keys() == theirs["weights"].keys()
        for key, weight in mine["weights"].items():
            assert torch.equal(weight, theirs["weights"][key]), key


@pytest.mark.long
@_grouped(RANKS)
def test_a_roomy_budget_changes_nothing(name: str, trio_of: Callable[[str], Trio]) -> None:
    """Law: with room to spare the script ends as the baseline does, with the same bits, and its needs are known."""
    trio = trio_of(name)
    assert trio.plain.code == 0, trio.plain.errors
    assert trio.roomy.code == 0, trio.roomy.errors
    assert len(trio.roomy.figures) == RANKS[name]
    assert all(each["plan"] is not None for each in trio.roomy.figures)
    _assert_equal(trio.plain, trio.roomy, RANKS[name])


@pytest.mark.long
@_grouped(RANKS)
def test_a_tight_budget_keeps_the_bits(name: str, trio_of: Callable[[str], Trio]) -> None:
    """Law: under a tight budget the exit code is 0, and every rank's losses and weights are bit-equal to the baseline's."""
    trio = trio_of(name)
    assert trio.tight.code == 0, trio.tight.errors
    assert trio.tight is not trio.roomy, "the roomy run told no plain peak"
    _assert_equal(trio.plain, trio.tight, RANKS[name])


@pytest.mark.long
@_grouped(RANKS)
def test_a_tight_budget_is_held(name: str, trio_of: Callable[[str], Trio]) -> None:
    """Law: no step of any rank exceeds the budget, which is below the baseline's peak."""
    trio = trio_of(name)
    assert trio.tight.code == 0, trio.tight.errors
    assert len(trio.tight.figures) == RANKS[name]
    for tight, roomy in zip(trio.tight.figures, trio.roomy.figures, strict=True):
        budget = tight["budget_bytes"]
        assert budget < roomy["plan"]["baseline_peak_bytes"]
        assert len(tight["steps"]) == len(trio.plain.results[0]["losses"])
        over = [(step["index"], step["peak_bytes"] - budget) for step in tight["steps"] if step["peak_bytes"] > budget]
        assert not over
        assert not any(step["overrun"] for step in tight["steps"])


@pytest.mark.long
@_grouped(("ddp", "fsdp2"))
def test_ranks_share_one_plan(name: str, trio_of: Callable[[str], Trio]) -> None:
    """Law: all ranks run the same decisions."""
    tight = trio_of(name).tight
    assert tight.code == 0, tight.errors
    assert len(tight.plans) == RANKS[name]
    assert all(plan["choices"] for plan in tight.plans)
    assert all(plan["choices"] == tight.plans[0]["choices"] for plan in tight.plans)


@pytest.mark.long
def test_sharded_parameters_count_by_their_shards_with_new_lengths(tmp_path: Path) -> None:
    """Law: a percentage budget of such a script is held from its second step on, with the baseline's bits.

    Steps of new shapes are judged by the resident storages; a ``DTensor``'s own storage has no memory at all.
    """
    plain = _launch("fsdp2", tmp_path / "plain", arguments=("3",))
    tight = _launch("fsdp2", tmp_path / "tight", "60%", ("3",))
    assert (plain.code, tight.code) == (0, 0), plain.errors + tight.errors
    _assert_equal(plain, tight, RANKS["fsdp2"])
    for figures in tight.figures:
        first, *others = figures["steps"]
        assert first["peak_bytes"] > figures["budget_bytes"] >= max(step["peak_bytes"] for step in others)
