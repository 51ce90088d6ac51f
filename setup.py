"""Builds the heap counter and the planner's search; where they cannot be built, Lowtide runs without them."""

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

setup(ext_modules=[heap, search] if sys.platform == "linux" else [])
