"""Law: a leak planted in one part of a Keras model on TensorFlow is found by experiment, down to the layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import keras
import numpy as np
import tensorflow as tf

KEPT = []

def keep():
    KEPT.append(bytearray(20_000))
    return np.int32(0)

class Leaky(keras.layers.Layer):
    def call(self, x):
        zero = tf.numpy_function(keep, [], tf.int32)
        zero.set_shape([])
        return x + keras.ops.cast(zero, x.dtype)

class GrowingAdam(keras.optimizers.Adam):
    def apply(self, grads, trainable_variables=None):
        tf.numpy_function(keep, [], tf.int32)
        super().apply(grads, trainable_variables)

where = sys.argv[1]
layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu")]
layers += [Leaky(name="sieve")] if where == "sieve" else []
layers += [keras.layers.Dense(16), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(optimizer=GrowingAdam() if where == "optimizer" else "adam", loss="mse")
rng = np.random.default_rng(0)
for _ in range(160):
    if where == "loop":
        keep()
    model.train_on_batch(rng.random((16, 8), dtype=np.float32), rng.random((16, 1), dtype=np.float32))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with TensorFlow."""
    folder = tmp_path_factory.mktemp("tensorflow")
    found = folder / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    if subprocess.run([found, "-m", "pip", "install", "--quiet", "tensorflow-cpu"], capture_output=True, check=False).returncode:
        pytest.skip("TensorFlow cannot be installed here")
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["sieve", "loop"])
def test_the_planted_part_of_a_keras_model_is_the_culprit(where: str, python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lowtide", "leak", "--ablate", "--steps", "150", "--json", "leak.json", "--",
               str(python), "train.py", where]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "leak.json").read_text())
    assert found["verdict"] == "leak"
    assert where in found["ablation"]["culprit"], found["ablation"]["text"]
