"""Safe points within the loops of Lightning, the Hugging Face Trainer and Keras: one callback each."""

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
"""Lightning's checkpoints that stay."""


def _asked(*, epoch: bool, fraction: float) -> bool:
    """Whether to stop at this safe point: all ranks together."""
    return bool(ranks.highest(int(requests().at(epoch=epoch, last=fraction >= 1))))


def _told(fraction: float, *, saved: tuple[float, int] | None = None) -> None:
    teller = beat.teller()
    if teller is not None:
        if saved is not None:
            teller.saved(*saved)
        teller.passed(fraction)
        teller.tell(stopped=float(saved is not None))


def _on_the_first(publish: Callable[[], None]) -> None:
    """Have the first rank publish what all have written.

    Raises:
        CheckpointError: on all of them, if it cannot.
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
    """Leave no half of a checkpoint to fill the disk."""
    try:
        yield
    except CheckpointError:
        with contextlib.suppress(OSError):
            undone.unlink()
        raise


def keras_callback(place: Place, model: Any, parts: Mapping[str, Any] | None = None, *, epochs: int | None = None) -> Any:
    """A Keras callback: each end of an epoch is a safe point.

    ::

        keeper = lowtide.checkpoint.keras_callback("checkpoints", model)     # after compile
        model.fit(x, y, epochs=20, initial_epoch=keeper.epoch, callbacks=[keeper])

    Weights, the optimizer's variables, the layers' seeds and the generators of Python, NumPy and torch are put back. Not
    those of TensorFlow's ``tf.random`` and ``tf.data``: shuffle by NumPy there (a ``PyDataset``) for equal bits.

    Args:
        place: the folder, or a `Store`.
        model: compiled.
        parts: more objects to be saved, as for `resume`.
        epochs: of the whole training, for the forecast; what ``fit`` was given, where it is None.
    """
    import keras

    class Keeper(keras.callbacks.Callback):  # type: ignore[misc]
        """Saves at ends of epochs when asked."""

        def __init__(self) -> None:
            super().__init__()
            self.state = {"model": model, **(parts or {})}
            self.epoch: int = resume(place, self.state).get("epoch", 0)
            self._resumed = self.epoch > 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            """Put back once more what ``fit`` has changed while it made itself ready."""
            del epoch, logs
            if self._resumed:
                self._resumed = False
                resume(place, self.state)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """A safe point."""
            del logs
            total = epochs or self.params.get("epochs") or 0
            checkpoint(
                place, self.state, epoch_end=True, fraction=(epoch + 1) / total if total else None, epoch=epoch + 1
            )  # fmt: skip

    return Keeper()


def transformers_callback() -> Any:
    """A callback of the Hugging Face Trainer: each step is a safe point. The Trainer saves and resumes.

    ::

        trainer = Trainer(..., callbacks=[lowtide.checkpoint.transformers_callback()])
        trainer.train(resume_from_checkpoint=lowtide.checkpoint.newest(arguments.output_dir))
    """
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):  # type: ignore[misc]
        """Has the Trainer save, marks what it saved, and stops it."""

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
            """A safe point."""
            del args, kwargs
            return self._point(state, control, epoch=False)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """A safe point at which an epoch ends."""
            del args, kwargs
            return control if self._stop else self._point(state, control, epoch=True)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """What was saved is whole; stop, if that was asked."""
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
    """Lightning's account of epochs as it was before this one was made ready: only then does it begin a whole one on restart.

    At the end of an epoch, where Lightning's own checkpoints are written, schedulers have not been stepped yet.
    """
    for count in (progress.total, progress.current):
        count.ready -= 1
    try:
        yield
    finally:
        for count in (progress.total, progress.current):
            count.ready += 1


def lightning_callback(folder: str | os.PathLike[str]) -> Any:
    """A callback of Lightning: each batch is a safe point where the loader's position can be saved (`Batches`), and each
    beginning of an epoch after the first.

    ::

        trainer = Trainer(..., callbacks=[lowtide.checkpoint.lightning_callback("checkpoints")])
        trainer.fit(model, lowtide.checkpoint.Batches(loader), ckpt_path=lowtide.checkpoint.newest("checkpoints"))
    """
    from lightning.pytorch import Callback

    class Keeper(Callback):  # type: ignore[misc]
        """Has Lightning save, marks what it saved, and stops it."""

        def __init__(self) -> None:
            self._folder = Path(folder)
            self._random: Any = None
            self._begun = False
            requests()

        def state_dict(self) -> dict[str, Any]:
            """Lightning saves no generators."""
            return {"random": random_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Put them back when training goes on."""
            self._random = state_dict["random"]

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            """A safe point, but for the first: Lightning goes on best from where an epoch begins."""
            del pl_module
            fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
            if self._random is not None and fetcher is not None:
                self._put_back()
                iter(fetcher)  # on restart Lightning has made the epoch's iterator before: it drew from other generators
            begun, self._begun = self._begun, True
            if begun:
                with _before_the_epoch(trainer.fit_loop.epoch_progress):
                    self._point(trainer, epoch=True)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Training goes on within an epoch."""
            del trainer, pl_module, batch, batch_idx
            self._put_back()

        def _put_back(self) -> None:
            if self._random is not None:
                set_random_state(self._random)
                self._random = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """A safe point, if the loader can go on from here."""
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
