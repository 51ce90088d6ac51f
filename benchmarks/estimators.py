"""How much memory will this batch take, and which batch fits? What others answer beside `lowtide predict`.

First question: for each model at batch 32, a real run's peak against
  accelerate   what `accelerate estimate-memory` prints for training with Adam (its own functions, on the model itself: the
               command would fetch it by name), which is four times the parameters' bytes at any batch;
  torchinfo    `summary`'s "Estimated Total Size": parameters, input and twice all module outputs;
  lowtide      `lowtide predict` from recordings at batch 2, 3 and 4.
torchinfo is given a model that is called with one tensor; of others it says nothing here.

Second question: the largest batch within a cap on torch's allocator, by Lightning's BatchSizeFinder (which runs ever larger
batches until one fails) and by the same three recordings. Which batches run is found out by running them under that cap.

Every run has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lowtide.recording.reader import read
from lowtide.studies.size.predict import Model
from lowtide.studies.size.trial import Target, TrialRequest, record, run
from lowtide.studies.size.vary import ScriptSetting

BATCH = 32
SMALL = (2, 3, 4)
STEPS = 3
CAPPED = ("mlp", "cnn", "gpt2", "vit", "lstm")
CAP_SHARE = 1.02
"""Of the peak at the batch that is to be found; both finders are given the same cap."""
FOUND_AT = 96
SIZES = Path(__file__).parent / "sizes"
SCRIPT = str(SIZES / "models.py")


def _setting(name: str, batch: int) -> ScriptSetting:
    return ScriptSetting(arguments=(name, "--batch", str(batch)), sizes={"batch": float(batch)})


def _recorded(target: Target, name: str, folder: str) -> tuple[Model, float]:
    """What small recordings tell, and how long they took."""
    start, found = time.perf_counter(), []
    for batch in SMALL:
        file = Path(folder, f"{name}-{batch}.lowtide")
        record(target, _setting(name, batch), STEPS, file)
        found.append((_setting(name, batch).sizes, read(file)))
    return Model(found), time.perf_counter() - start


def _others(name: str) -> dict[str, int | None]:
    """What accelerate and torchinfo say, in a process of their own."""
    told = subprocess.run(
        [sys.executable, __file__, "--estimate", name], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    found: dict[str, int | None] = json.loads(told)
    return found


def _estimate(name: str) -> dict[str, int | None]:
    sys.path.insert(0, str(SIZES))
    import models
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    given = argparse.Namespace(batch=BATCH, side=0, length=0)
    model, loss_of = models.MODELS[name](given)
    size, _ = calculate_maximum_sizes(model)
    found: dict[str, int | None] = {"accelerate": max(estimate_training_usage(size, "float32").values()), "torchinfo": None}
    seen: list[tuple[Any, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    loss_of()
    hook.remove()
    args, kwargs = seen[0]
    try:
        from torchinfo import summary

        told = summary(model, input_data=list(args) if args else kwargs, verbose=0, mode="train", device="cpu")
    except (ImportError, RuntimeError):
        return found
    found["torchinfo"] = int(told.total_input + told.total_output_bytes + told.total_param_bytes)
    return found


def _peaks(target: Target, name: str, folder: str) -> dict[str, Any]:
    model, seconds = _recorded(target, name, folder)
    real = run(target, _setting(name, BATCH), TrialRequest(steps=STEPS)).peak_bytes
    said = {"lowtide": model.at({"batch": float(BATCH)}).peak_bytes, **_others(name)}
    return {
        "model": name, "batch": BATCH, "real_bytes": real, "said_bytes": said, "recording_seconds": seconds,
        "error": {who: None if bytes_ is None else bytes_ / real - 1 for who, bytes_ in said.items()},
    }


def _runs(target: Target, name: str, batch: int, cap: int) -> bool:
    ran = run(target, _setting(name, batch), TrialRequest(steps=STEPS, cap_bytes=cap))
    return ran.ended == "ok"


def _largest(target: Target, name: str, folder: str) -> dict[str, Any]:
    """Both finders under one cap, and what is true of their answers."""
    model, seconds = _recorded(target, name, folder)
    cap = int(run(target, _setting(name, FOUND_AT), TrialRequest(steps=STEPS)).peak_bytes * CAP_SHARE)
    start = time.perf_counter()
    ours = max((b for b in range(1, 4 * FOUND_AT) if model.at({"batch": float(b)}).fits(cap)), default=0)
    seconds += time.perf_counter() - start
    start = time.perf_counter()
    told = subprocess.run(
        [sys.executable, __file__, "--find", name, "--cap", str(cap)], capture_output=True, text=True, check=False
    )
    answer = re.findall(r'\{"batch.*\}', told.stdout)
    theirs = json.loads(answer[-1]) if answer else {"batch": None, "tries": None}
    took = time.perf_counter() - start
    return {
        "model": name, "cap_bytes": cap,
        "lowtide": {"batch": ours, "seconds": seconds, "largest_run": max(SMALL), "runs": _runs(target, name, ours, cap)},
        "lightning": {
            **theirs, "seconds": took, "exit_code": told.returncode,
            "runs": None if theirs["batch"] is None else _runs(target, name, theirs["batch"], cap),
        },
        "one_more_runs": _runs(target, name, max(ours, theirs["batch"] or 0) + 1, cap),
    }


def _find(name: str, cap: int) -> dict[str, Any]:
    """Lightning's own search, under the cap."""
    sys.path.insert(0, str(SIZES))
    import lightning
    import models
    from lightning.pytorch.tuner import Tuner

    import torch
    from lowtide.runtime.device.heap_meter import counters

    counter = counters()
    assert counter is not None
    given = argparse.Namespace(batch=2, side=0, length=0)
    tried: list[int] = []

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            torch.manual_seed(0)
            self.model, self.loss_of = models.MODELS[name](given)

        def training_step(self, *_: Any) -> Any:
            given.batch = self.batch_size
            tried.append(self.batch_size)
            return self.loss_of()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(1 << 16), batch_size=self.batch_size)

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = Trained()
    counter.cap = cap
    batch = Tuner(trainer).scale_batch_size(module, mode="binsearch", init_val=2, steps_per_trial=STEPS)
    counter.cap = 0
    return {"batch": batch, "tries": len(set(tried)), "largest_run": max(tried)}


def main() -> None:
    """Measure, print, write."""
    from predict import MODELS

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--capped", default=",".join(CAPPED))
    options.add_argument("--estimate", help=argparse.SUPPRESS)
    options.add_argument("--find", help=argparse.SUPPRESS)
    options.add_argument("--cap", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.estimate:
        print(json.dumps(_estimate(given.estimate)))
        return
    if given.find:
        from process import with_counter

        with_counter()
        print(json.dumps(_find(given.find, given.cap)))
        return
    target = Target(script=SCRIPT, module=False, seconds=600)
    names, capped = given.models.split(","), [n for n in given.capped.split(",") if n]
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(names) + len(capped))
        peaks, finds = [], []
        for name in names:
            peaks.append(_peaks(target, name, folder))
            progress.advance(task)
        for name in capped:
            finds.append(_largest(target, name, folder))
            progress.advance(task)
    _show(peaks, finds)
    if given.json:
        Path(given.json).write_text(json.dumps({"peaks": peaks, "largest": finds}, indent=1) + "\n")


def _show(peaks: list[dict[str, Any]], finds: list[dict[str, Any]]) -> None:
    said = Table(title=f"Peak of training at batch {BATCH}: said / real - 1")
    for column in ("model", "real MiB", "lowtide predict", "accelerate", "torchinfo"):
        said.add_column(column, justify="right")
    for row in peaks:
        errors = ("-" if (e := row["error"][who]) is None else f"{e:+.1%}" for who in ("lowtide", "accelerate", "torchinfo"))
        said.add_row(row["model"], f"{row['real_bytes'] / 2**20:.1f}", *errors)
    largest = Table(title="Largest batch under a cap on torch's allocator")
    columns = ("model", "lowtide", "runs", "seconds", "BatchSizeFinder", "runs", "batches tried", "seconds", "one more runs")
    for column in columns:
        largest.add_column(column, justify="right")
    for row in finds:
        ours, theirs = row["lowtide"], row["lightning"]
        largest.add_row(
            row["model"], str(ours["batch"]), str(ours["runs"]), f"{ours['seconds']:.0f}", str(theirs["batch"]),
            str(theirs["runs"]), str(theirs["tries"]), f"{theirs['seconds']:.0f}", str(row["one_more_runs"]),
        )
    console = Console(width=150)
    console.print(said)
    console.print(largest)


if __name__ == "__main__":
    main()
