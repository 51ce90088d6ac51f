"""Recycling under Keras, the Hugging Face Trainer, Lightning and torchrun: final weights are those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

from command import TIMEOUT
import psutil
from patience import until
import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}

KERAS = """
    import sys
    import numpy as np
    import keras
    import lowtide
    keras.utils.set_random_seed(1)
    x, y = np.random.rand(64, 6).astype("float32"), np.random.rand(64, 1).astype("float32")
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    keeper = lowtide.checkpoint.keras_callback(sys.argv[1], model)
    model.fit(x, y, batch_size=16, epochs=3, initial_epoch=keeper.epoch, shuffle=True, verbose=0, callbacks=[keeper])
    print([float(np.asarray(v, dtype="float64").sum()) for v in [*model.weights, *model.optimizer.variables]])
"""

TRAINER = """
    import sys
    import torch
    from transformers import Trainer, TrainingArguments, set_seed
    import lowtide
    set_seed(1)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        def forward(self, x, labels=None):
            out = self.net(x)
            return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}
    model = Model()
    data = [{"x": torch.rand(6), "labels": torch.rand(1)} for _ in range(48)]
    arguments = TrainingArguments(output_dir=sys.argv[1], num_train_epochs=3, per_device_train_batch_size=8, learning_rate=1e-2, save_strategy="no",
                                  report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no")
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[lowtide.checkpoint.transformers_callback()])
    trainer.train(resume_from_checkpoint=lowtide.checkpoint.newest(sys.argv[1]))
    print([p.double().sum().item() for p in model.parameters()], trainer.state.global_step)
"""

LIGHTNING = """
    import sys
    import torch
    import lightning.pytorch as pl
    import lowtide
    pl.seed_everything(1)
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    data = torch.utils.data.TensorDataset(torch.rand(48, 6), torch.rand(48, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    if sys.argv[2] == "batches":
        loader = lowtide.checkpoint.Batches(loader)
    model = Model()
    trainer = pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                         callbacks=[lowtide.checkpoint.lightning_callback(sys.argv[1])])
    trainer.fit(model, loader, ckpt_path=lowtide.checkpoint.newest(sys.argv[1]), weights_only=False)
    print([t.double().sum().item() for t in model.state_dict().values()], trainer.global_step)
"""


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def guarded(tmp_path, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "guard", "--json", tmp_path / "guard.json", *map(str, arguments)], capture_output=True, text=True,
        timeout=TIMEOUT, check=False, env=ENVIRONMENT, cwd=tmp_path,
    )
    return done, json.loads((tmp_path / "guard.json").read_text())


def last(text):
    return text.strip().splitlines()[-1]


CASES = {"keras, epochs": (KERAS, "epoch", 3, ()), "trainer, steps": (TRAINER, "every=11", 2, ()), "lightning, steps": (LIGHTNING, "every=11", 2, ("batches",))}
if os.environ.get("LOWTIDE_FULL"):
    CASES |= {
        "trainer, few steps": (TRAINER, "every=7", 3, ()), "trainer, epochs": (TRAINER, "epoch", 3, ()),
        "lightning, few steps": (LIGHTNING, "every=7", 3, ("batches",)), "lightning, epochs": (LIGHTNING, "epoch", 3, ("plain",)),
    }


@pytest.mark.slow("trainer", "epochs")
@pytest.mark.long
@pytest.mark.parametrize(("text", "rule", "generations", "more"), CASES.values(), ids=CASES)
def test_recycled_weights_equal_those_of_an_uninterrupted_run(tmp_path, text, rule, generations, more):
    path = script(tmp_path, text)
    plain = subprocess.run([sys.executable, path, tmp_path / "a", *more], capture_output=True, text=True, timeout=TIMEOUT, check=False, env=ENVIRONMENT)
    assert plain.returncode == 0, plain.stderr[-3000:]
    done, figures = guarded(tmp_path, "--recycle", rule, path, tmp_path / "b", *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert last(done.stdout) == last(plain.stdout)
    assert [g["reason"] for g in figures["generations"]] == ["recycled"] * (generations - 1) + ["finished"]
    assert all(g["steps"] > 0 for g in figures["generations"])


RANKS = """
    import os, sys, time
    import torch, torch.distributed as dist
    import lowtide
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)))
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    at = lowtide.checkpoint.resume(sys.argv[1], state)
    kept = []
    for step in range(at.get("step", 0), 60):
        optimizer.zero_grad()
        model(torch.rand(8, 6)).square().mean().backward()
        optimizer.step()
        if rank == 1 and sys.argv[2] == "leak":
            kept.append(torch.ones(4 << 20))     # 16 MiB a step, in one rank alone
        if sys.argv[2] != "plain":
            time.sleep(0.2)                      # so that the guard, which looks now and then, sees it grow
        if sys.argv[2] == "pids":
            os.write(1, f"pid {rank} {os.getpid()}\\n".encode())
        lowtide.checkpoint(sys.argv[1], state, step=step + 1, fraction=(step + 1) / 60)
    if rank == 0:
        os.write(1, f"sum {[p.double().sum().item() for p in model.parameters()]}\\n".encode())
"""
TORCHRUN = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
def test_one_leaking_rank_recycles_all_ranks_with_equal_weights(tmp_path):
    path = script(tmp_path, RANKS)
    plain = subprocess.run([*TORCHRUN[1:], path, tmp_path / "a", "plain"], capture_output=True, text=True, timeout=TIMEOUT, check=False, env=ENVIRONMENT)
    assert plain.returncode == 0, plain.stderr[-3000:]
    done, figures = guarded(tmp_path, "--memory", "1300MiB", "--enforce", "watch", *TORCHRUN, path, tmp_path / "b", "leak")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [x for x in done.stdout.splitlines() if x.startswith("sum")] == [x for x in plain.stdout.splitlines() if x.startswith("sum")]
    assert len(figures["generations"]) >= 2
    assert {g["reason"] for g in figures["generations"]} == {"recycled", "finished"}
    assert sum(g["safe_points"] for g in figures["generations"]) == 60


@pytest.mark.long
def test_a_rank_that_is_killed_is_noticed(tmp_path):
    """The reason names the rank, the exit code is not 0 or 75, and no process is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "guard", "--json", tmp_path / "guard.json", *TORCHRUN, script(tmp_path, RANKS), tmp_path / "c", "pids"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )
    for line in process.stdout:
        if line.startswith("pid 1"):
            os.kill(int(line.split()[2]), signal.SIGKILL)
            break
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode not in {0, 75}
    figures = json.loads((tmp_path / "guard.json").read_text())
    assert [g["reason"] for g in figures["generations"]] == ["a rank was killed"], err
    assert "rank 1" in figures["text"]
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])])
