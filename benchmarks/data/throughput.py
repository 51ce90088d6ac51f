"""What reading through `lowtide.data` costs against reading directly: same slices, same consumer, side by side, interleaved.

``python throughput.py --json FILE``: a file of 256 MiB in each format (in the page cache), read in batches of 64 samples that
are summed; samples a second of direct reading in order and in random order (what a script's own shuffling does, sample by
sample), of `Blocks`, shuffled within a buffer, and isolated in another process. Ratios are to direct reading in order, those
of shuffled reading to direct reading in random order as well. Row groups of Parquet are not read at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

import lowtide

SAMPLES, SIZE, BATCH = 4096, 8192, 64
AT_RANDOM = "direct, at random"


def write(folder: Path) -> None:
    """The same numbers in every format."""
    whole = np.random.default_rng(0).standard_normal((SAMPLES, SIZE))
    np.save(folder / "x.npy", whole)
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("d", data=whole, chunks=(BATCH, SIZE))
    zarr.open_group(str(folder / "x.zarr"), mode="w").create_array("d", data=whole, chunks=(BATCH, SIZE), compressors=None)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(whole.reshape(-1)), SIZE)
    pq.write_table(pa.table({"d": rows}), folder / "x.parquet", row_group_size=BATCH, compression="none")


def direct(folder: Path, kind: str) -> Iterator[Any]:
    """Batches as a script would read them by itself."""
    if kind == "npy":
        mapped = np.load(folder / "x.npy", mmap_mode="r")
        yield from (np.array(mapped[i : i + BATCH]) for i in range(0, SAMPLES, BATCH))
    elif kind == "hdf5":
        with h5py.File(folder / "x.h5") as file:
            yield from (file["d"][i : i + BATCH] for i in range(0, SAMPLES, BATCH))
    elif kind == "zarr":
        array = zarr.open(str(folder / "x.zarr"), mode="r")["d"]
        yield from (np.asarray(array[i : i + BATCH]) for i in range(0, SAMPLES, BATCH))
    else:
        file = pq.ParquetFile(folder / "x.parquet")
        for i in range(file.num_row_groups):
            column = file.read_row_group(i, columns=["d"]).column("d").combine_chunks()
            yield column.flatten().to_numpy(zero_copy_only=False).reshape(-1, SIZE)


def at_random(folder: Path, kind: str, random: np.random.Generator) -> Iterator[Any]:
    """Batches of samples in random order, by each library's own way to read samples that are not neighbours."""
    orders = random.permutation(SAMPLES).reshape(-1, BATCH)
    if kind == "npy":
        mapped = np.load(folder / "x.npy", mmap_mode="r")
        yield from (mapped[order] for order in orders)
    elif kind == "hdf5":
        with h5py.File(folder / "x.h5") as file:
            yield from (file["d"][np.sort(order)] for order in orders)
    else:
        array = zarr.open(str(folder / "x.zarr"), mode="r")["d"]
        yield from (np.asarray(array.oindex[np.sort(order)]) for order in orders)


def source(folder: Path, kind: str) -> Any:
    """The source of a format."""
    names = {"npy": ("x.npy", None), "hdf5": ("x.h5", "d"), "zarr": ("x.zarr", "d"), "parquet": ("x.parquet", "d")}
    return lowtide.data.open(folder / names[kind][0], names[kind][1])


def ways(folder: Path, kind: str) -> dict[str, Callable[[], Any]]:
    """What is compared."""
    plain = lowtide.data.Blocks(source(folder, kind), batch_size=BATCH)
    shuffled = lowtide.data.Blocks(source(folder, kind), batch_size=BATCH, block=BATCH, shuffle=True, buffer="64MiB")
    isolated = lowtide.data.isolate(lowtide.data.Blocks(source(folder, kind), batch_size=BATCH), memory="2GiB")
    random = np.random.default_rng(0)
    found = {"direct": lambda: direct(folder, kind)}
    if kind != "parquet":
        found[AT_RANDOM] = lambda: at_random(folder, kind, random)
    return found | {"blocks": lambda: plain, "shuffled": lambda: shuffled, "isolated": lambda: isolated}


def seconds(batches: Any, work: float) -> float:
    """Of one epoch; ``work`` seconds of a training step's worth of other things each batch."""
    began = time.perf_counter()
    count = 0
    for batch in batches:
        count += len(batch)
        batch.sum()
        if work:
            time.sleep(work)
    assert count == SAMPLES
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    table: dict[str, Any] = {"samples": SAMPLES, "sample_bytes": SIZE * 8, "batch": BATCH, "turns": args.turns}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for kind in ("npy", "hdf5", "zarr", "parquet"):
            for work in (0.0, 0.005):
                runs = ways(folder, kind)
                times: dict[str, list[float]] = {way: [] for way in runs}
                for turn in range(args.turns + 1):
                    for way, make in runs.items():
                        took = seconds(make(), work)
                        if turn:  # the first warms the page cache, and starts processes
                            times[way].append(took)
                base = times["direct"]
                for way, took in times.items():
                    ratios = sorted(d / t for d, t in zip(base, took, strict=True))
                    alike = [d / t for d, t in zip(times.get(AT_RANDOM, ()), took, strict=False)]
                    table[f"{kind}, {'reading alone' if not work else '5 ms of work a batch'}, {way}"] = {
                        "samples_per_second": SAMPLES / statistics.median(took),
                        "of_direct": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1],
                        "of_direct_at_random": statistics.median(alike) if alike and way == "shuffled" else None,
                    }  # fmt: skip
    for key, row in table.items():
        if isinstance(row, dict):
            spread = f"{row['of_direct']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})"
            if row["of_direct_at_random"] is not None:
                spread += f", of direct at random {row['of_direct_at_random']:.2f}"
            print(f"{key:45s} {row['samples_per_second']:9.0f}/s  {spread}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
