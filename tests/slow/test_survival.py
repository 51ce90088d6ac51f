"""A reader that leaks in real life, survived by recycling the run or by replacing the reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lowtide

READS = 160_000


@pytest.fixture(scope="module")
def leaking(tmp_path_factory):
    """The environment with h5py 3.15.1, which keeps at least 256 bytes for each ``f["d"][i]``."""
    target = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), "h5py==3.15.1"]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("h5py 3.15.1 cannot be installed here")
    return {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.timeout(900)
def test_a_run_with_a_leaking_reader_is_recycled_with_equal_bits(tmp_path, leaking):
    path = script(tmp_path, f"""
        import sys
        import h5py, numpy as np
        import lowtide
        assert h5py.__version__ == "3.15.1"
        folder = sys.argv[1]
        with h5py.File("d.h5", "a") as f:
            if "d" not in f:
                f["d"] = np.random.default_rng(0).standard_normal((1000, 64))
        f = h5py.File("d.h5")
        weights, random = np.zeros(64), np.random.default_rng(1)
        state = {{"weights": weights, "random": random}}
        at = lowtide.checkpoint.resume(folder, state)
        for step in range(at.get("step", 0), {READS // 20}):
            for _ in range(20):
                weights += f["d"][int(random.integers(1000))]
            lowtide.checkpoint(folder, state, step=step + 1)
        print(weights.tobytes().hex())
    """)
    plain = subprocess.run([sys.executable, path, tmp_path / "a"], capture_output=True, text=True, check=True, env=leaking, cwd=tmp_path)
    cap = 56 << 20
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "guard", "--memory", str(cap), "--json", tmp_path / "guard.json", path, tmp_path / "b"],
        capture_output=True, text=True, check=False, env=leaking, cwd=tmp_path,
    )
    figures = json.loads((tmp_path / "guard.json").read_text())
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert len(figures["generations"]) >= 2, figures
    assert all(g["peak_bytes"] <= cap for g in figures["generations"])


@pytest.mark.timeout(900)
def test_a_leaking_reader_is_replaced_and_no_sample_is_lost(tmp_path, leaking):
    path = script(tmp_path, f"""
        import sys
        import numpy as np, psutil
        import lowtide.data

        class Samples:
            file = None
            def __len__(self): return {READS}
            def __getitem__(self, i):
                import h5py
                if self.file is None:
                    self.file = h5py.File("d.h5")
                return self.file["d"][i % 1000]

        import h5py
        assert h5py.__version__ == "3.15.1"
        whole = np.arange(64_000.0).reshape(1000, 64)
        with h5py.File("d.h5", "w") as f:
            f["d"] = whole
        data = lowtide.data.isolate(Samples(), memory="58MiB")
        data[0]
        before = psutil.Process().memory_full_info().uss
        for i in range(0, {READS}, 100):
            for k, found in zip(range(i, i + 100), data.__getitems__(list(range(i, i + 100)))):
                assert np.array_equal(found, whole[k % 1000]), k
        print(data.started, data.highest_bytes, psutil.Process().memory_full_info().uss - before)
    """)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, env=leaking, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    started, highest, grown = map(int, done.stdout.split())
    assert started >= 2, highest
    assert highest < 62 << 20
    assert grown < 4 << 20


REAL = {
    "jax": "import jax, jax.numpy as jnp; make = lambda: jnp.zeros((1 << 40,)).block_until_ready(); bug = lambda: jnp.ones(3) @ jnp.ones(4)",
    "tensorflow-cpu": "import tensorflow as tf; make = lambda: tf.zeros([1 << 21, 1 << 21]); bug = lambda: tf.matmul(tf.ones([2, 3]), tf.ones([2, 3]))",
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("package", REAL)
def test_out_of_memory_errors_of_other_frameworks_are_recognized(tmp_path, package):
    """The framework has an environment of its own; the catalogue is lent to it as the probe is. Another error is not taken for
    a shortage.
    """
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    if subprocess.run([python, "-m", "pip", "install", "--quiet", package], capture_output=True, check=False).returncode:
        pytest.skip(f"{package} cannot be installed here")
    path = script(tmp_path, f"""
        import sys
        sys.path.insert(0, {str(Path(lowtide.__file__).parent.parent)!r})
        from lowtide.probe.catalogue import out_of_memory
        {REAL[package]}
        for fails in (make, bug):
            try:
                fails()
            except Exception as error:
                print(out_of_memory(error) is not None)
    """)
    done = subprocess.run([python, path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr
