"""Captures and restores the state of a run: that of its objects and of all random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from lowtide.base.errors import StateError
from lowtide.checkpoint.tree import loaded_torch, torch


def random_state() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch, including those of CUDA devices in use."""
    found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 - scripts use it
    t = torch()
    if t is not None:
        found["torch"] = t.get_rng_state()
        if t.cuda.is_available() and t.cuda.is_initialized():
            found["cuda"] = t.cuda.get_rng_state_all()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - scripts use it
    if "torch" in state:
        t = loaded_torch()
        t.set_rng_state(state["torch"])
        if "cuda" in state:
            t.cuda.set_rng_state_all(state["cuda"])


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator."""
    t = torch()
    own = isinstance(value, (np.random.Generator, np.random.RandomState, random.Random))
    return own or (t is not None and isinstance(value, t.Generator))


def state_of(part: Any, name: str) -> Any:
    """The state of one of the script's objects.

    Raises:
        StateError: if it has no state that could be restored.
    """
    if _keras(part):  # first, because on the torch backend it is a torch module too
        return [np.array(_host(v)) for v in _variables(part)]
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        return part.state_dict()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, np.random.RandomState):
        return part.get_state()
    if isinstance(part, random.Random):
        return part.getstate()
    t = torch()
    if t is not None and isinstance(part, t.Generator):
        return part.get_state()
    if isinstance(part, np.ndarray) or (t is not None and isinstance(part, t.Tensor)):
        return part
    if isinstance(part, dict):
        return {key: state_of(value, f"{name}[{key!r}]") if _held(value) else value for key, value in part.items()}
    if isinstance(part, list):
        return [state_of(value, f"{name}[{i}]") if _held(value) else value for i, value in enumerate(part)]
    raise StateError(
        f"{name} is of type {type(part).__module__}.{type(part).__qualname__}, which has no state to restore: "
        "give it state_dict() and load_state_dict(), or pass the values to be saved instead"
    )


def put_back(part: Any, state: Any, name: str) -> None:
    """Restore a state into one of the script's objects.

    Raises:
        StateError: if the state does not match the object.
    """
    try:
        _put_back(part, state, name)
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"the saved state does not fit {name}: {error}") from error


def _put_back(part: Any, state: Any, name: str) -> None:
    t = torch()
    if _keras(part):
        variables = _variables(part)
        if len(variables) != len(state):
            raise StateError(f"{name} has {len(variables)} variables, but {len(state)} were saved: build the same model first")
        for variable, value in zip(variables, state, strict=True):
            variable.assign(value)
    elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, np.random.RandomState):
        part.set_state(state)
    elif isinstance(part, random.Random):
        part.setstate(state)
    elif t is not None and isinstance(part, t.Generator):
        part.set_state(state)
    elif isinstance(part, np.ndarray):
        if part.shape != state.shape or part.dtype != state.dtype:
            raise StateError(f"{name} is {part.dtype}{part.shape}, but {state.dtype}{state.shape} was saved")
        part[...] = state
    elif t is not None and isinstance(part, t.Tensor):
        if part.shape != state.shape or part.dtype != state.dtype:
            raise StateError(f"{name} is {part.dtype} {tuple(part.shape)}, but {state.dtype} {tuple(state.shape)} was saved")
        with t.no_grad():
            part.copy_(state)
    elif isinstance(part, dict):
        for key in [key for key in part if key not in state]:
            del part[key]
        for key, value in state.items():
            if key in part and _held(part[key]):
                _put_back(part[key], value, f"{name}[{key!r}]")
            else:
                part[key] = value
    else:
        held = [i for i, value in enumerate(part) if _held(value)]
        if held and len(part) != len(state):
            raise StateError(f"{name} has {len(part)} entries, but {len(state)} were saved: give as many")
        for i in held:
            _put_back(part[i], state[i], f"{name}[{i}]")
        part[:] = [part[i] if i in held else value for i, value in enumerate(state)]


def _held(value: Any) -> bool:
    """Whether a value in a dict or list is restored in place rather than replaced."""
    t = torch()
    return (
        (hasattr(value, "state_dict") and hasattr(value, "load_state_dict"))
        or isinstance(value, (np.ndarray, np.random.Generator, np.random.RandomState, random.Random, dict, list))
        or (t is not None and isinstance(value, (t.Tensor, t.Generator)))
        or _keras(value)
    )


def _keras(part: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(part, keras.Model)


def _variables(model: Any) -> list[Any]:
    """The variables of a Keras model and its optimizer, seeds included, each once; builds the optimizer if needed."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    found = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    seen: set[int] = set()
    return [v for v in found if not (id(v) in seen or seen.add(id(v)))]  # type: ignore[func-returns-value]


def _host(variable: Any) -> Any:
    """A Keras variable's value on the host."""
    keras = sys.modules["keras"]
    return keras.ops.convert_to_numpy(variable)
