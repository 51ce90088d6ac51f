"""The dishonest casino in Keras: sequences of throws, an LSTM, a dense layer per step; resident memory after each batch.

    lowtide leak --steps 150 examples/leaks/casino_keras.py --batches 160
    lowtide sweep examples/leaks/casino.toml

The network, the data and the measurement are those of a study of TensorFlow's growth per batch. Needs Keras 3 and a backend.
"""

from __future__ import annotations

import argparse
import resource

import keras
import numpy as np

FAIR, LOADED = (0.25, 0.25, 0.25, 0.25), (0.5, 0.3, 0.2, 0.0)


def throws(rng: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Throws as one-hot vectors (batch, length, 4), and which die they came from (batch, length, 1)."""
    faces, dice = np.zeros((batch, length), dtype=np.int64), np.zeros((batch, length), dtype=np.float32)
    die, ones = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
    edges = np.cumsum(np.array([FAIR, LOADED]), axis=1)
    for t in range(length):
        face = (rng.random(batch)[:, None] > edges[die]).sum(axis=1)
        faces[:, t], dice[:, t] = face, die
        ones = np.where(face == 0, ones + 1, 0)
        die = np.where(ones == 2, 1 - die, die)
        ones = np.where(ones == 2, 0, ones)
    return np.eye(4, dtype=np.float32)[faces], dice[..., None]


def model_of(length: int, lstms: int, denses: int) -> keras.Model:
    """LSTM(128) layers, then dense layers per step."""
    layers = [keras.layers.Input((length, 4))]
    layers += [keras.layers.LSTM(128, return_sequences=True) for _ in range(lstms)]
    layers += [keras.layers.TimeDistributed(keras.layers.Dense(16, activation="relu")) for _ in range(denses - 1)]
    layers += [keras.layers.TimeDistributed(keras.layers.Dense(1))]
    model = keras.Sequential(layers)
    model.compile(optimizer="adam", loss="mse")
    return model


def main() -> None:
    """Train, and print what each batch did to resident memory."""
    options = argparse.ArgumentParser()
    options.add_argument("--batches", type=int, default=80)
    options.add_argument("--batch", type=int, default=200)
    options.add_argument("--length", type=int, default=200)
    options.add_argument("--lstms", type=int, default=1)
    options.add_argument("--denses", type=int, default=1)
    given = options.parse_args()
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    model = model_of(given.length, given.lstms, given.denses)
    before = 0
    for step in range(given.batches):
        x, y = throws(rng, given.batch, given.length)
        loss = model.train_on_batch(x, y)
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = f"maximum resident {highest} KB, change {highest - before} KB, loss {float(np.asarray(loss)):.4f}"
        print(f"batch {step}: {figures}", flush=True)
        before = highest


if __name__ == "__main__":
    main()
