"""Axes of a sweep: what each value changes about a command, and the lines that would set it permanently."""

from __future__ import annotations

import ctypes.util
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lowtide.base.errors import UsageError
from lowtide.probe.sampler import SETTINGS

Value = str | int | float | bool

DEFAULT: Final = "default"
"""The value that changes nothing, on any axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one value changes.

    Attributes:
        environment: environment variables, set before the process starts; flags in one variable (``XLA_FLAGS``) are joined.
        arguments: arguments appended to the command.
        options: ``-X`` options of a Python command.
        preload: a library for ``LD_PRELOAD``.
        calls: for each module, the calls (dotted path, arguments) to make once it has been imported.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    preload: str = ""
    calls: Mapping[str, Sequence[tuple[str, Sequence[Any]]]] = field(default_factory=dict)


_JOINED: Final = ("XLA_FLAGS", "TF_XLA_FLAGS")
"""Variables that hold several flags, separated by spaces."""


def _on(axis: str, value: Value) -> bool:
    if isinstance(value, str):
        value = {"on": True, "off": False, "true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, bool):
        raise UsageError(f'axis {axis}: {value!r} is not "on", "off" or "{DEFAULT}"')
    return value


def _count(axis: str, value: Value) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f'axis {axis}: {value!r} is not a number above zero or "{DEFAULT}"')
    return str(value)


def _flag(name: str) -> Callable[[str, Value], Setting]:
    return lambda axis, value: Setting(environment={name: "1" if _on(axis, value) else "0"})


def _numbers(*names: str) -> Callable[[str, Value], Setting]:
    return lambda axis, value: Setting(environment=dict.fromkeys(names, _count(axis, value)))


def _arithmetic(axis: str, value: Value) -> Setting:
    options = {"arithmetic_optimization": _on(axis, value)}
    return Setting(calls={"tensorflow": [("config.optimizer.set_experimental_options", [options])]})


def _tensorflow_xla(axis: str, value: Value) -> Setting:
    on = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
    return Setting(environment={"TF_XLA_FLAGS": on if _on(axis, value) else "--tf_xla_auto_jit=-1"})


def _keras_precision(_: str, value: Value) -> Setting:
    return Setting(calls={"keras": [("config.set_dtype_policy", [str(value)])]})


def _torch_onednn(axis: str, value: Value) -> Setting:
    return Setting(calls={"torch": [("backends.mkldnn.set_flags", [_on(axis, value)])]})


def _torch_precision(_: str, value: Value) -> Setting:
    return Setting(calls={"torch": [("set_float32_matmul_precision", [str(value)])]})


def _torch_compile(axis: str, value: Value) -> Setting:
    return Setting(environment={"TORCH_COMPILE_DISABLE": "0" if _on(axis, value) else "1"})


def _jax_jit(axis: str, value: Value) -> Setting:
    return Setting(environment={"JAX_DISABLE_JIT": "0" if _on(axis, value) else "1"})


def _jax_threads(axis: str, value: Value) -> Setting:
    if _count(axis, value) != "1":
        raise UsageError(f'axis {axis}: JAX on a CPU allows only 1 and "{DEFAULT}"')
    return Setting(environment={"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"})


def _allocator(axis: str, value: Value) -> Setting:
    if value == "glibc":
        return Setting()
    if value not in ("jemalloc", "tcmalloc"):
        raise UsageError(f"axis {axis}: {value!r} is not glibc, jemalloc or tcmalloc")
    name = ctypes.util.find_library(str(value)) or ctypes.util.find_library(f"{value}_minimal")
    if name is None:
        raise UsageError(f"axis {axis}: {value} is not installed on this machine (Debian: libjemalloc2, libtcmalloc-minimal4)")
    return Setting(preload=name)


Maker = Callable[[str, Value], Setting]

COMMON: Final[dict[str, Maker]] = {
    "allocator": _allocator,
    "arenas": _numbers("MALLOC_ARENA_MAX"),
    "python_malloc": lambda _, value: Setting(environment={"PYTHONMALLOC": str(value)}),
}
FRAMEWORKS: Final[dict[str, dict[str, Maker]]] = {
    "tensorflow": {
        "onednn": _flag("TF_ENABLE_ONEDNN_OPTS"),
        "threads": _numbers("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"),
        "xla": _tensorflow_xla,
        "arithmetic_optimization": _arithmetic,
        "precision": _keras_precision,
    },
    "torch": {
        "onednn": _torch_onednn,
        "threads": _numbers("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        "compile": _torch_compile,
        "precision": _torch_precision,
    },
    "jax": {
        "threads": _jax_threads,
        "jit": _jax_jit,
        "precision": lambda _, value: Setting(environment={"JAX_DEFAULT_MATMUL_PRECISION": str(value)}),
    },
}
FRAMEWORKS["keras"] = FRAMEWORKS["tensorflow"]


def setting_of(axis: str, value: Value, framework: str) -> Setting:
    """What a value of a built-in axis changes.

    Raises:
        UsageError: if there is no such axis, or it has no such value.
    """
    makers = {**COMMON, **FRAMEWORKS.get(framework, {})}
    if axis not in makers:
        hint = "" if framework else '; framework = "torch", "tensorflow" or "jax" adds its axes'
        raise UsageError(
            f"unknown axis {axis!r}: there are {', '.join(sorted(makers))}; your own axis needs `env`, `argument` or "
            f"`option` besides `values`{hint}"
        )
    return Setting() if value == DEFAULT else makers[axis](axis, value)


def applied(
    settings: Sequence[Setting], command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Apply settings to a command and its environment; returns both."""
    made, words = dict(environment), list(command)
    calls: dict[str, list[Any]] = {}
    options: list[str] = []
    for setting in settings:
        for name, value in setting.environment.items():
            made[name] = f"{made[name]} {value}" if name in _JOINED and made.get(name) else value
        if setting.preload:
            made["LD_PRELOAD"] = ":".join(filter(None, [setting.preload, made.get("LD_PRELOAD", "")]))
        words += setting.arguments
        for option in setting.options:
            options += ["-X", option]
        for module, asked in setting.calls.items():
            calls.setdefault(module, []).extend(asked)
    if calls:
        made[SETTINGS] = json.dumps(calls)
    return [words[0], *options, *words[1:]], made


def pasted(settings: Sequence[Setting]) -> list[str]:
    """Lines that make the same settings permanent: shell first, then Python."""
    shell: list[str] = []
    python: list[str] = []
    for setting in settings:
        shell += [f"export {name}={shlex.quote(value)}" for name, value in setting.environment.items()]
        if setting.preload:
            shell.append(f"export LD_PRELOAD={setting.preload}")
        shell += [f"# append to the command: {shlex.join(setting.arguments)}"] if setting.arguments else []
        shell += [f"# python -X {option} ..." for option in setting.options]
        for module, asked in setting.calls.items():
            python += [f"{module}.{path}({', '.join(map(repr, arguments))})" for path, arguments in asked]
    return [*shell, *([f"# in the script, after `import {python[0].partition('.')[0]}`:", *python] if python else [])]
