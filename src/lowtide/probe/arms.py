"""Runs one arm of an ablation: a script with some parts switched off, or a layer's work doubled. Standard library only.

This module is for torch; ``keras_arms`` is for Keras. When switched off, a module returns its first output for arguments of
the same shapes, the backward makes gradients of zeros, the optimizer does not step (it finds no gradients), and saving and
logging do nothing. So any training loop keeps running, and what still grows does so without that part.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, final

from lowtide.probe.keras_arms import KerasArm
from lowtide.probe.marks import WhenImported

PARTS: Final = ("loop", "forward", "backward", "optimizer", "checkpointing", "logging")
"""Parts of a training script, in the order in which arms add them; ``loop`` is never switched off: data, loss, the script's
own code."""
TEMPLATES: Final = 32
"""Most outputs kept per process; beyond that, a module runs without a graph and its output is not kept."""


@final
class Arm:
    """Switches off parts of this process's training script."""

    def __init__(self, task: dict[str, Any], folder: str) -> None:
        """Read the task; nothing is switched off yet.

        Args:
            task: ``parts``, those that stay on; ``stub``, paths of modules to switch off; ``twice``, types of layers whose
                work is doubled.
            folder: where the model's modules are listed.
        """
        self._parts, self._stub, self._twice = set(task["parts"]), set(task["stub"]), set(task["twice"])
        self._folder = folder
        self._depth = 0
        self._paths: dict[int, str] = {}
        self._leaves: set[int] = set()
        self._roots: set[int] = set()
        self._models: list[weakref.ref[Any]] = []
        self._templates: dict[Any, Any] = {}
        self._aside: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Switch off the parts outside the arm, each as soon as its library has been imported."""
        WhenImported("torch", self._torch)
        WhenImported("keras", KerasArm(self._parts, self._stub, self._twice, self._folder, note_modules).install)
        WhenImported("torch.optim.optimizer", self._optimizers)
        if "checkpointing" not in self._parts:
            WhenImported("safetensors.torch", functools.partial(_silence, "save_file"))
        if "logging" not in self._parts:
            builtins.print = _nothing  # type: ignore[assignment]
            logging.Logger.handle = _nothing  # type: ignore[method-assign]
            WhenImported("torch.utils.tensorboard.writer", self._tensorboard)
            WhenImported("wandb", functools.partial(_silence, "log"))
            WhenImported("mlflow", functools.partial(_silence, "log_metric", "log_metrics"))

    def _torch(self, torch: Any) -> None:
        if "checkpointing" not in self._parts:
            torch.save = _nothing
        if "backward" not in self._parts:
            torch.autograd.backward = torch.Tensor.backward = lambda *_, **__: self._no_backward(torch)
            torch.autograd.grad = _zeros
        elif self._stub or "forward" not in self._parts:
            original = torch.Tensor.backward

            @functools.wraps(original)
            def backward(*args: Any, **kwargs: Any) -> None:
                original(*args, **kwargs)
                self._no_backward(torch)  # no gradient gets through a module that is switched off

            torch.Tensor.backward = backward
        call_module = torch.nn.Module.__call__

        @functools.wraps(call_module)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(torch, call_module, module, args, kwargs)

        torch.nn.Module.__call__ = call

    def _optimizers(self, module: Any) -> None:
        if "optimizer" not in self._parts:
            module.register_optimizer_step_pre_hook(self._without_gradients)
            module.register_optimizer_step_post_hook(self._with_gradients)

    def _no_backward(self, torch: Any) -> None:
        """Set gradients that the backward did not make to zeros: the script may read them."""
        for model in (found for ref in self._models if (found := ref()) is not None):
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _without_gradients(self, optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._aside = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _grad in self._aside:
            parameter.grad = None

    def _with_gradients(self, *_: Any) -> None:
        for parameter, grad in self._aside:
            parameter.grad = grad
        self._aside = []

    @staticmethod
    def _tensorboard(module: Any) -> None:
        for name in [n for n in dir(module.SummaryWriter) if n.startswith("add_")]:
            setattr(module.SummaryWriter, name, _nothing)

    # --- modules -----------------------------------------------------------------------------------------------------

    def _call(self, torch: Any, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if self._depth == 0 and id(module) not in self._roots:
            self._enter(module)
        off = self._depth == 0 and "forward" not in self._parts
        self._depth += 1
        try:
            if off or self._paths.get(id(module)) in self._stub:
                return self._template(torch, original, module, args, kwargs)
            result = original(module, *args, **kwargs)
            if type(module).__name__ in self._twice and id(module) in self._leaves:
                again = original(module, *args, **kwargs)
                result = _mapped(torch, lambda a, b: (a + b) / 2 if a.is_floating_point() else a, result, again)
            return result
        finally:
            self._depth -= 1

    def _enter(self, root: Any) -> None:
        """Assign paths to the modules of a model on its first call, and list them for the parent process."""
        self._roots.add(id(root))
        self._models.append(weakref.ref(root))
        prefix = f"{len(self._roots) - 1}:" if len(self._roots) > 1 else ""
        found = [(path, m, any(True for _ in m.children())) for path, m in root.named_modules()]
        self._paths.update({id(m): prefix + path for path, m, holds in found if path or not holds})
        self._leaves.update(id(m) for _, m, holds in found if not holds)
        note_modules(self._folder, [(prefix + path, type(m).__name__, holds) for path, m, holds in found])

    def _template(self, torch: Any, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        shapes: list[Any] = []
        _mapped(torch, lambda t, _: shapes.append(tuple(t.shape)), (args, kwargs), (args, kwargs))
        key = (id(module), tuple(shapes), module.training)
        if key in self._templates:
            return self._templates[key]
        with torch.no_grad():
            found = original(module, *args, **kwargs)
        found = _mapped(torch, lambda t, _: t.detach().clone().requires_grad_(t.is_floating_point()), found, found)
        if len(self._templates) < TEMPLATES:
            self._templates[key] = found
        return found


def note_modules(folder: str, modules: list[tuple[str, str, bool]]) -> None:
    """List a model's modules for the parent process: path, type, whether it holds others; the model itself has no path."""
    with contextlib.suppress(OSError), open(f"{folder}/modules-{os.getpid()}", "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"path": p, "type": kind, "holds": holds}) + "\n" for p, kind, holds in modules)


def _mapped(torch: Any, change: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Merge two structures of tensors: `change` combines each pair of tensors, everything else comes from the first."""
    tree = torch.utils._pytree
    left, shape = tree.tree_flatten(first)
    right, _ = tree.tree_flatten(second)
    made = [change(a, b) if isinstance(a, torch.Tensor) else a for a, b in zip(left, right, strict=False)]
    return tree.tree_unflatten(made, shape)


def _zeros(_: Any, inputs: Any, *__: Any, **___: Any) -> Any:
    torch: Any = sys.modules["torch"]
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(torch.zeros_like(t) for t in given)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a function that is switched off."""


def _silence(*names: Any) -> None:
    *functions, module = names
    for name in functions:
        setattr(module, name, _nothing)
