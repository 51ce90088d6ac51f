"""``lowtide.checkpoint(...)``, which a script calls at a safe point, and ``lowtide.checkpoint.resume(...)``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lowtide.base.errors import StateError
from lowtide.checkpoint import ranks
from lowtide.checkpoint.parts import put_back, random_state, set_random_state, state_of
from lowtide.checkpoint.request import requests
from lowtide.checkpoint.store import Store
from lowtide.probe import beat

Place = Store | str | os.PathLike[str]


class Stop(SystemExit):
    """The state is saved; the process ends with exit code 75 in order to be restarted."""

    def __init__(self) -> None:
        """Set the exit code."""
        super().__init__(beat.STOPPED)


_stores: dict[Path, Store] = {}


def _store(place: Place) -> Store:
    if isinstance(place, Store):
        return place
    path = Path(place).absolute()
    if path not in _stores:
        _stores[path] = Store(path)
    return _stores[path]


def resume(place: Place, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the newest complete checkpoint into the script's objects, and the state of all global random number generators.

    Call it once everything is built, before the training loop.

    Args:
        place: the folder, or a `Store`.
        parts: objects by name: anything with ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, grad
            scalers, `Batches`), Keras models, generators, arrays and tensors (filled in place), dicts and lists of these.

    Returns:
        The values that `checkpoint` was given; an empty dict if there is no checkpoint.

    Raises:
        StateError: if the saved state does not match `parts`.
        CheckpointError: if another number of ranks saved it, or if it cannot be read.
    """
    began = time.monotonic()
    requests()
    found = _store(place).load()
    if found is None:
        return {}
    missing, extra = found["parts"].keys() - parts.keys(), parts.keys() - found["parts"].keys()
    if missing or extra:
        raise StateError(
            f"the parts do not match the checkpoint: {sorted(missing) or 'none'} missing, {sorted(extra) or 'none'} new; "
            "give the same names, or start in another folder"
        )
    for name, part in parts.items():
        put_back(part, found["parts"][name], name)
    set_random_state(found["random"])
    teller = beat.teller()
    if teller is not None:
        teller.tell(load_seconds=time.monotonic() - began)
    values: dict[str, Any] = found["values"]
    return values


def checkpoint(
    place: Place,
    parts: Mapping[str, Any],
    *,
    epoch_end: bool = False,
    save: bool = False,
    metric: float | None = None,
    fraction: float | None = None,
    **values: Any,
) -> bool:
    """Pass a safe point, at which the script can be stopped and from which it can resume.

    It costs microseconds unless it saves: when the guard, SIGUSR1 or SIGTERM requested a stop, when the guard's rule says so,
    or when ``save`` is set. All ranks of ``torch.distributed`` must call it at the same step; one rank's request stops all.

    Args:
        place: the folder, or a `Store`.
        parts: objects by name, as for `resume`.
        epoch_end: whether an epoch ends here (``--recycle epoch`` stops there).
        save: whether to save even if no stop was requested.
        metric: the figure by which the store's ``keep_best`` ranks checkpoints.
        fraction: share of the whole work that is done, 0 to 1, for the guard's forecast; at 1 only a request stops the
            script, no rule does.
        values: values for `resume` to return: the epoch, running sums.

    Returns:
        Whether the state was saved.

    Raises:
        Stop: once the state is saved, if a stop was requested (a `SystemExit` with code 75).
        StateError: if a part has no state that can be saved.
        CheckpointError: if the state cannot be saved; earlier checkpoints are intact.
    """
    last = fraction is not None and fraction >= 1
    stop = bool(ranks.highest(int(requests().at(epoch=epoch_end, last=last))))
    if stop or save:
        _save(_store(place), parts, values, metric, wait=stop)
    teller = beat.teller()
    if teller is not None:
        teller.passed(fraction)
        teller.tell(stopped=float(stop))
    if stop:
        raise Stop
    return save


def _save(store: Store, parts: Mapping[str, Any], values: Mapping[str, Any], metric: float | None, *, wait: bool) -> None:
    began = time.monotonic()
    states = {name: state_of(part, name) for name, part in parts.items()}
    store.save({"parts": states, "values": dict(values), "random": random_state()}, metric=metric)
    if wait:
        store.wait()
    teller = beat.teller()
    if teller is not None:
        saved = store.saved()
        teller.saved(time.monotonic() - began, saved[-1].bytes if saved else 0)


STOPPED: Final = beat.STOPPED
