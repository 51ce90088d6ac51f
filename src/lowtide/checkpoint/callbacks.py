"""Callbacks that put safe points into the loops of Lightning, the Hugging Face Trainer and Keras."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lowtide.base.errors import CheckpointError
from lowtide.checkpoint import ranks, whole
from lowtide.checkpoint.parts import random_state, set_random_state
from lowtide.checkpoint.points import Place, Stop, checkpoint, resume
from lowtide.checkpoint.request import requests
from lowtide.probe import beat

KEEP: Final = 2
"""How many of Lightning's checkpoints are kept."""


def _asked(*, epoch: bool, fraction: float) -> bool:
    """Whether to stop at this safe point; all ranks get the same answer. A collective."""
    return bool(ranks.highest(int(requests().at(epoch=epoch, last=fraction >= 1))))


def _told(fraction: float, *, saved: tuple[float, int] | None = None) -> None:
    teller = beat.teller()
    if teller is not None:
        if saved is not None:
            teller.saved(*saved)
        teller.passed(fraction)
        teller.tell(stopped=float(saved is not None))


def _on_the_first(publish: Callable[[], None]) -> None:
    """Have the first rank publish what all ranks have written.

    Raises:
        CheckpointError: on all ranks, if it cannot.
    """
    problem: CheckpointError | None = None
    if ranks.rank() == 0:
        try:
            publish()
        except CheckpointError as error:
            problem = error
    said = ranks.gather(None if problem is None else str(problem))
    if any(said):
        raise problem or CheckpointError(f"another rank could not save: {next(filter(None, said))}")


@contextlib.contextmanager
def _removed_unless_whole(undone: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint if writing it fails, so that it does not fill the disk."""
    try:
        yield
    except CheckpointError:
        with contextlib.suppress(OSError):
            undone.unlink()
        raise


def keras_callback(place: Place, model: Any, parts: Mapping[str, Any] | None = None, *, epochs: int | None = None) -> Any:
    """A Keras callback that makes the end of each epoch a safe point.

    ::

        keeper = lowtide.checkpoint.keras_callback("checkpoints", model)     # after compile
        model.fit(x, y, epochs=20, initial_epoch=keeper.epoch, callbacks=[keeper])

    Restores the weights, the optimizer's variables, the layers' seeds, and the generators of Python, NumPy and torch, but not
    those of TensorFlow's ``tf.random`` and ``tf.data``: for bit-equal results shuffle with NumPy (in a ``PyDataset``).

    Args:
        place: the folder, or a `Store`.
        model: the compiled model.
        parts: more objects to save, as for `resume`.
        epochs: number of epochs of the whole training, for the guard's forecast; by default the number given to ``fit``.
    """
    import keras

    class Keeper(keras.callbacks.Callback):  # type: ignore[misc]
        """Saves at the end of an epoch when asked to."""

        def __init__(self) -> None:
            super().__init__()
            self.state = {"model": model, **(parts or {})}
            self.epoch: int = resume(place, self.state).get("epoch", 0)
            self._resumed = self.epoch > 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            """Restore the state once more at the first epoch: ``fit`` has changed it during its preparations."""
            del epoch, logs
            if self._resumed:
                self._resumed = False
                resume(place, self.state)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Pass a safe point."""
            del logs
            total = epochs or self.params.get("epochs") or 0
            checkpoint(
                place, self.state, epoch_end=True, fraction=(epoch + 1) / total if total else None, epoch=epoch + 1
            )  # fmt: skip

    return Keeper()


def transformers_callback() -> Any:
    """A callback for the Hugging Face Trainer that makes each step a safe point; the Trainer itself saves and resumes.

    ::

        trainer = Trainer(..., callbacks=[lowtide.checkpoint.transformers_callback()])
        trainer.train(resume_from_checkpoint=lowtide.checkpoint.newest(arguments.output_dir))
    """
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):  # type: ignore[misc]
        """Has the Trainer save, marks its checkpoint as complete, and stops the process."""

        def __init__(self) -> None:
            self._stop = False
            self._began = 0.0
            requests()

        def _point(self, state: Any, control: Any, *, epoch: bool) -> Any:
            fraction = state.global_step / max(1, state.max_steps)
            if _asked(epoch=epoch, fraction=fraction):
                self._stop, self._began = True, time.monotonic()
                control.should_save = True
            else:
                _told(fraction)
            return control

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """Pass a safe point."""
            del args, kwargs
            return self._point(state, control, epoch=False)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """Pass a safe point at the end of an epoch."""
            del args, kwargs
            return control if self._stop else self._point(state, control, epoch=True)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """Mark the checkpoint as complete; stop if a stop was requested."""
            del kwargs
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            _on_the_first(lambda: whole.mark(folder) if folder.is_dir() else None)
            if self._stop:
                size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                _told(state.global_step / max(1, state.max_steps), saved=(time.monotonic() - self._began, size))
                raise Stop
            return control

    return Keeper()


@contextlib.contextmanager
def _before_the_epoch(progress: Any) -> Iterator[None]:
    """Set Lightning's epoch counters back to before this epoch became ready: only then does a restart run the whole epoch.

    The end of the previous epoch, where Lightning writes its own checkpoints, will not do: schedulers have not stepped yet.
    """
    for count in (progress.total, progress.current):
        count.ready -= 1
    try:
        yield
    finally:
        for count in (progress.total, progress.current):
            count.ready += 1


def lightning_callback(folder: str | os.PathLike[str]) -> Any:
    """A callback for Lightning that makes the start of every epoch but the first a safe point.

    If the loader's position can be saved (`Batches`), the end of each batch is a safe point too.

    ::

        trainer = Trainer(..., callbacks=[lowtide.checkpoint.lightning_callback("checkpoints")])
        trainer.fit(model, lowtide.checkpoint.Batches(loader), ckpt_path=lowtide.checkpoint.newest("checkpoints"))
    """
    from lightning.pytorch import Callback

    class Keeper(Callback):  # type: ignore[misc]
        """Has Lightning save, marks its checkpoint as complete, and stops the process."""

        def __init__(self) -> None:
            self._folder = Path(folder)
            self._random: Any = None
            self._begun = False
            requests()

        def state_dict(self) -> dict[str, Any]:
            """Return the states of the random number generators, which Lightning does not save."""
            return {"random": random_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Keep the generators' states, to restore them when training resumes."""
            self._random = state_dict["random"]

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            """Pass a safe point, except at the first epoch: Lightning resumes best from an epoch's start."""
            del pl_module
            fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
            if self._random is not None and fetcher is not None:
                self._put_back()
                iter(fetcher)  # make it again: on a restart Lightning made the epoch's iterator before this, from other states
            begun, self._begun = self._begun, True
            if begun:
                with _before_the_epoch(trainer.fit_loop.epoch_progress):
                    self._point(trainer, epoch=True)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Restore the generators if training resumes within an epoch."""
            del trainer, pl_module, batch, batch_idx
            self._put_back()

        def _put_back(self) -> None:
            if self._random is not None:
                set_random_state(self._random)
                self._random = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Pass a safe point if the loader's position can be saved."""
            del pl_module, outputs, batch, batch_idx
            if hasattr(trainer.train_dataloader, "state_dict"):
                self._point(trainer, epoch=False)

        def _point(self, trainer: Any, *, epoch: bool) -> None:
            steps = float(trainer.estimated_stepping_batches)
            fraction = min(1.0, trainer.global_step / steps) if 0 < steps < float("inf") else 0.0
            if not _asked(epoch=epoch, fraction=fraction):
                _told(fraction)
                return
            began = time.monotonic()
            path = self._folder / f"lowtide-{trainer.current_epoch}-{trainer.global_step}.ckpt"
            undone = path.with_suffix(".undone")
            with _removed_unless_whole(undone), whole.written(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                trainer.save_checkpoint(undone)

            def publish() -> None:
                with _removed_unless_whole(undone), whole.written(path):
                    undone.rename(path)
                    whole.mark(path)
                    for old in sorted(self._folder.glob("lowtide-*.ckpt"), key=lambda p: p.stat().st_mtime_ns)[:-KEEP]:
                        whole.forget(old)

            _on_the_first(publish)
            _told(fraction, saved=(time.monotonic() - began, path.stat().st_size))
            raise Stop

    return Keeper()
