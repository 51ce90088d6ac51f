"""A reader that leaked: h5py 3.15.1 keeps about 5 KiB for every 20 samples read one by one; 3.16 does not.

lowtide leak examples/leaks/hdf5_reader.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np

import lowtide

STEPS = 400
BATCH = 20


def main() -> None:
    """Read a data set sample by sample."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "samples.h5")
        with h5py.File(path, "w") as file:
            file["d"] = np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32)
        total = 0.0
        with h5py.File(path, "r") as file:
            for step in range(STEPS):
                for i in range(BATCH):
                    total += float(file["d"][(step * BATCH + i) % 1000].sum())
                lowtide.step()
        print(f"h5py {h5py.__version__}: sum {total:.3f}")


if __name__ == "__main__":
    main()
