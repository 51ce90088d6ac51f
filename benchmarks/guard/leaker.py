"""Leaks at a steady rate: ``python leaker.py FOLDER MIB_PER_SECOND STEP_SECONDS``, with safe points unless FOLDER is ``-``."""

from __future__ import annotations

import sys
import time

import numpy as np

import lowtide

folder, rate, pause = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
state: dict[str, list[float]] = {"log": []}
kept: list[np.ndarray] = []
random = np.random.default_rng()
at = {} if folder == "-" else lowtide.checkpoint.resume(folder, state)
began = time.monotonic()
leaked = 0.0
step = at.get("step", 0)
while True:
    scratch = np.ones(random.integers(1, 500_000))  # what a step needs for a while
    time.sleep(pause)
    owed = (time.monotonic() - began) * rate - leaked
    kept.append(np.ones(max(1, int(owed * 1024**2 / 8))))
    leaked += owed
    step += 1
    if folder == "-":
        lowtide.step()
    else:
        lowtide.checkpoint(folder, state, step=step)
