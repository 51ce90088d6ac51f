"""Builds the heap counter, the planner's search and player, and the gate; Lowtide runs without those that cannot be built."""

import sys

from setuptools import Extension, setup

heap = Extension(
    "lowtide.probe._heap",
    ["src/lowtide/probe/heap.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden", "-std=gnu11"],
    libraries=["dl", "pthread"],
    optional=True,
)

# Sums may be taken in any order. Not -ffast-math: where that reaches the linker, loading the library makes the whole process
# flush subnormal numbers to zero, a training script's among them.
ANY_ORDER = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]

search = Extension(
    "lowtide.planning.search._search",
    ["src/lowtide/planning/search/search.c"],
    extra_compile_args=["-O3", *ANY_ORDER, "-fvisibility=hidden", "-std=gnu11"],
    libraries=["m"],
    optional=True,
)

player = Extension(
    "lowtide.planning.unit._player",
    ["src/lowtide/planning/unit/player.cpp"],
    language="c++",
    extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden"],
    optional=True,
)


def gates() -> list[Extension]:
    """The gate for the torch that is installed here; an isolated build sees none, and builds none."""
    try:
        from torch.utils import cpp_extension

        import torch
    except ImportError:
        return []
    name = f"_gate_{torch.__version__.partition('+')[0].replace('.', '_')}"
    gate = Extension(
        f"lowtide.runtime.{name}",
        ["src/lowtide/runtime/gate.cpp"],
        language="c++",
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch_cpu", "torch", "torch_python"],
        define_macros=[("TORCH_EXTENSION_NAME", name)],
        extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden"],
        optional=True,
    )
    return [gate]


setup(ext_modules=[heap, search, player, *gates()] if sys.platform == "linux" else [])
