"""Runs one arm of an ablation in Keras on TensorFlow: layers and parts of ``train_step`` are switched off.

TensorFlow runs a traced graph, so parts are switched off during tracing. A layer returns zeros of its output's shape, which
depend on its input and weights so that gradients can flow; without a backward the tape returns no gradients; without an
optimizer they are computed and discarded. Keras on torch needs nothing here: the arms for torch serve it. Keras on JAX is not
supported. Standard library only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, final


@final
class KerasArm:
    """Switches off parts of Keras."""

    def __init__(self, parts: set[str], stub: set[str], twice: set[str], folder: str, note: Callable[..., None]) -> None:
        """Take the task of :class:`lowtide.probe.arms.Arm`; ``note`` lists a model's layers for the parent process."""
        self._parts, self._stub, self._twice, self._folder, self._note = parts, stub, twice, folder, note
        self._depth = 0
        self._paths: dict[int, str] = {}
        self._leaves: set[int] = set()
        self._roots: set[int] = set()

    def install(self, keras: Any) -> None:
        """Switch off the parts outside the arm, once Keras has been imported."""
        if keras.backend.backend() != "tensorflow":
            return
        if "checkpointing" not in self._parts:
            for name in ("save", "save_weights", "export"):
                setattr(keras.Model, name, _nothing)
        if "logging" not in self._parts:
            keras.utils.Progbar.update = _nothing
            for kind in (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard):
                for name in [n for n in dir(kind) if n.startswith("on_")]:
                    setattr(kind, name, _nothing)
        if "backward" not in self._parts:
            import tensorflow as tf  # type: ignore[import-not-found,import-untyped,unused-ignore]

            tf.GradientTape.gradient = _no_gradients
            keras.optimizers.Optimizer.apply = _nothing
        elif "optimizer" not in self._parts:
            keras.optimizers.Optimizer.apply = functools.partialmethod(_compute_only, keras)
        original = keras.layers.Layer.__call__

        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(keras, original, layer, args, kwargs)

        keras.layers.Layer.__call__ = call

    def _call(self, keras: Any, original: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
        given = keras.tree.flatten((args, kwargs))
        if any(isinstance(item, keras.KerasTensor) for item in given):  # the model is being constructed, or built
            return original(layer, *args, **kwargs)
        root = self._depth == 0 and isinstance(layer, keras.Model)
        if root and id(layer) not in self._roots:
            self._enter(keras, layer)
        self._depth += 1
        try:
            if (root and "forward" not in self._parts) or self._paths.get(id(layer)) in self._stub:
                return _zeros(keras, original, layer, args, kwargs)
            result = original(layer, *args, **kwargs)
            if type(layer).__name__ in self._twice and id(layer) in self._leaves:
                again = original(layer, *args, **kwargs)
                result = keras.tree.map_structure(lambda a, b: (a + b) / 2 if a.dtype.is_floating else a, result, again)
            return result
        finally:
            self._depth -= 1

    def _enter(self, keras: Any, root: Any) -> None:
        """Assign paths to the layers of a model on its first call, and list them for the parent process."""
        self._roots.add(id(root))
        prefix = f"{len(self._roots) - 1}:" if len(self._roots) > 1 else ""
        found = [(x, holds) for x, holds in _layers(keras, root) if type(x).__name__ != "InputLayer"]
        self._paths.update({id(x): prefix + (x.path or x.name) for x, _ in found})
        self._leaves.update(id(x) for x, holds in found if not holds)
        self._note(self._folder, [(self._paths[id(x)], type(x).__name__, holds) for x, holds in found])
        self._note(self._folder, [(prefix, type(root).__name__, True)])


def _layers(keras: Any, layer: Any) -> list[tuple[Any, bool]]:
    """All layers within a layer, and whether each holds others; a recurrent layer and its cell count as one layer."""
    found = []
    for one in layer._layers:
        inner = [] if isinstance(one, keras.layers.RNN) else _layers(keras, one)
        found += [(one, bool(inner)), *inner]
    return found


def _zeros(keras: Any, original: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Zeros with the shapes and dtypes of a layer's output, which depend on its inputs and weights."""
    ops = keras.ops
    given = [item for item in keras.tree.flatten((args, kwargs)) if hasattr(item, "shape")]
    x = given[0]
    tie = 0.0
    for tensor in (*given, *layer.trainable_weights):
        tie += 0.0 * ops.sum(ops.cast(tensor, "float32"))
    if not layer.built:
        original(layer, *args, **kwargs)

    def shown(item: Any) -> Any:
        return keras.KerasTensor(item.shape, item.dtype.name) if hasattr(item, "shape") else item

    def made(spec: Any) -> Any:
        known = [ops.shape(x)[i] if size is None else size for i, size in enumerate(spec.shape)]
        return ops.cast(ops.zeros(known, dtype="float32") + tie, spec.dtype)

    taken = inspect.signature(layer.call).parameters.values()  # pass only what the layer accepts: `training`, say
    open_ended = any(p.kind is p.VAR_KEYWORD for p in taken)
    wanted = kwargs if open_ended else {p.name: kwargs[p.name] for p in taken if p.name in kwargs}
    like_args, like_kwargs = keras.tree.map_structure(shown, (args, wanted))
    return keras.tree.map_structure(made, layer.compute_output_spec(*like_args, **like_kwargs))


def _compute_only(optimizer: Any, keras: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Compute gradients and discard them; the update counter depends on their sum, or TensorFlow would prune them."""
    ops = keras.ops
    if not optimizer.built:
        optimizer.build(trainable_variables)
    total = 0.0
    for grad in grads:
        if grad is not None:
            total += ops.sum(ops.cast(getattr(grad, "values", grad), "float32"))
    optimizer.iterations.assign_add(ops.cast(ops.isfinite(total), optimizer.iterations.dtype))


def _no_gradients(_: Any, __: Any, sources: Any, *___: Any, **____: Any) -> Any:
    return [None] * len(sources)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function that is switched off."""
