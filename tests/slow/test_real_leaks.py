"""Real cases: an HDF5 reader that leaked in one version and not in the next, convolutions of random lengths, Keras."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "leaks"


def judged(tmp_path, *arguments, **environment):
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "leak", "--quiet", "--json", str(out), *arguments], capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=900, check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "verdict"), [("3.15.1", "leak"), ("3.16.0", "clean")])
def test_the_leaking_hdf5_reader_is_named_down_to_its_call(tmp_path, version, verdict):
    """20 reads per step: 160 blocks and 5 KiB of Python objects in 3.15.1, nothing in 3.16.0."""
    target = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), f"h5py=={version}"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip(f"h5py {version} cannot be installed here")
    found = judged(tmp_path, str(EXAMPLES / "hdf5_reader.py"), PYTHONPATH=str(target))
    assert found["verdict"] == verdict
    if verdict == "leak":
        assert found["kind"] == "python"
        assert found["bytes_per_step"] == pytest.approx(5120, rel=0.05)
        line = next(i for i, text in enumerate((EXAMPLES / "hdf5_reader.py").read_text().splitlines(), 1) if 'file["d"]' in text and "total" in text)
        sources = [s["source"] for s in found["suspects"] if s["kind"] == "line"]
        assert any(source.endswith(f"hdf5_reader.py:{line}") for source in sources)


@pytest.mark.timeout(900)
def test_random_lengths_grow_by_memory_that_malloc_cannot_return(tmp_path):
    """It is free between blocks that oneDNN keeps for each shape; trimming the heap returns more than half of the resident
    bytes.
    """
    found = judged(tmp_path, "--no-who", str(EXAMPLES / "random_lengths.py"))
    assert found["verdict"] == "leak"
    assert found["kind"] == "heap"
    assert found["by_kind"]["heap_free"] > found["by_kind"]["heap_in_use"]
    assert found["by_kind"]["trimmed_bytes"] > found["by_kind"]["resident_bytes"] / 2


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
@pytest.mark.timeout(900)
def test_the_casino_network_in_keras_is_clean_after_its_warm_up(tmp_path):
    """Its step leaves 20 KiB in reference cycles, which Python's collector visits every few hundred steps."""
    script = (str(EXAMPLES / "casino_keras.py"), "--batches", "310", "--batch", "8", "--length", "12")
    found = judged(tmp_path, "--no-who", *script, KERAS_BACKEND="torch")
    assert found["steps_marked_by"] == "keras"
    assert found["verdict"] == "clean"


@pytest.mark.timeout(900)
def test_the_casino_network_in_torch_is_clean_in_every_arm(tmp_path):
    """The same network; no part of it, and no layer, is accused."""
    script = (str(EXAMPLES.parent / "casino_lstm.py"), "--steps", "160", "--batch", "8", "--length", "12")
    found = judged(tmp_path, "--no-who", "--ablate", "--steps", "150", *script)
    assert found["steps_marked_by"] == "optimizer"
    assert found["verdict"] == "clean"
    assert found["ablation"]["culprit"] == ""
    assert {a["name"] for a in found["ablation"]["arms"]} >= {"loop", "forward", "backward", "optimizer"}
