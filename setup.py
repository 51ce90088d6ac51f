"""Builds the heap counter; where it cannot be built, Lowtide runs without it."""

import sys

from setuptools import Extension, setup

heap = Extension(
    "lowtide._heap",
    ["src/lowtide/native/heap.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden", "-std=gnu11"],
    libraries=["dl", "pthread"],
    optional=True,
)

setup(ext_modules=[heap] if sys.platform == "linux" else [])
