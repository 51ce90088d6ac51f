"""Builds the heap counter and the planner's search; where they cannot be built, Lowtide runs without them."""

import sys

from setuptools import Extension, setup

heap = Extension(
    "lowtide._heap",
    ["src/lowtide/native/heap.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden", "-std=gnu11"],
    libraries=["dl", "pthread"],
    optional=True,
)

search = Extension(
    "lowtide._search",
    ["src/lowtide/native/search.c"],
    extra_compile_args=["-O3", "-ffast-math", "-fno-finite-math-only", "-fvisibility=hidden", "-std=gnu11"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[heap, search] if sys.platform == "linux" else [])
