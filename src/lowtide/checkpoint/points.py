"""``lowtide.checkpoint(...)`` at a safe point, and ``lowtide.checkpoint.resume(...)`` before the first."""

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
    """The state is saved, and the process ends with exit code 75 so that it is started again."""

    def __init__(self) -> None:
        """With the documented code."""
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
    """Put the newest whole checkpoint back into the script's objects, and every generator of random numbers.

    Call it once everything is built, before the loop.

    Args:
        place: the folder, or a `Store`.
        parts: objects by name: what has ``state_dict`` and ``load_state_dict`` (models, optimizers, schedulers, grad scalers,
            `Batches`), Keras models, generators, arrays and tensors (filled in place), dicts and lists of these.

    Returns:
        The values that `checkpoint` was given; an empty dict where there is no checkpoint.

    Raises:
        StateError: if what was saved does not fit.
        CheckpointError: if it was saved by another number of ranks.
    """
    began = time.monotonic()
    requests()
    found = _store(place).load()
    if found is None:
        return {}
    missing, extra = found["parts"].keys() - parts.keys(), parts.keys() - found["parts"].keys()
    if missing or extra:
        raise StateError(
            f"parts do not fit what was saved: {sorted(missing) or 'none'} missing, {sorted(extra) or 'none'} new; "
            "give the same names, or begin in another folder"
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
    """A safe point: the script can be stopped here, and go on from here.

    Costs microseconds unless something is to be saved: when the guard, SIGUSR1 or SIGTERM asked for a stop, when the guard's
    rule says so, or when ``save`` does. All ranks of ``torch.distributed`` must call it at the same step; one rank's
    request stops all.

    Args:
        place: the folder, or a `Store`.
        parts: objects by name, as for `resume`.
        epoch_end: whether an epoch ends here (``--recycle epoch`` stops there).
        save: whether to save in any case.
        metric: what the store's ``keep_best`` goes by.
        fraction: of the whole work that is done, 0 to 1, for the guard's forecast; at 1 no rule stops the script.
        values: what `resume` is to return: the epoch, running sums.

    Returns:
        Whether it was saved.

    Raises:
        Stop: once the state is saved, where a stop was asked for (a `SystemExit` with code 75).
        CheckpointError: if it cannot be saved; what was saved before is whole.
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
