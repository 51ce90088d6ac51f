"""Recognizes out-of-memory errors of any framework by type name and message, without importing the framework."""

from __future__ import annotations

import enum
import errno
import re
from dataclasses import dataclass
from typing import Final


class Where(enum.Enum):
    """Which memory ran out: the host's or an accelerator's."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of error.

    Attributes:
        types: full names of exception types; the error must be an instance of one, subclasses included.
        words: regular expression to be found in its message; empty if the type is enough.
        where: which memory ran out.
        source: the software that raises it.
    """

    types: tuple[str, ...]
    words: str
    where: Where
    source: str


CATALOGUE: Final = (
    Entry(("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"), "", Where.DEVICE, "torch, accelerators"),
    Entry(("builtins.RuntimeError",), r"DefaultCPUAllocator: (can't allocate|not enough) memory", Where.HOST, "torch, CPU"),
    Entry(("builtins.RuntimeError",), r"\b(CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory", Where.DEVICE,
          "torch, older or other accelerators"),
    Entry(("builtins.RuntimeError",), r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED",
          Where.DEVICE, "CUDA libraries"),
    Entry(("builtins.RuntimeError",), r"unable to (mmap|open shared memory object|allocate shared memory).*"
          r"(Cannot allocate memory|No space left|\(12\))", Where.HOST, "torch, shared memory"),
    Entry(("builtins.RuntimeError", "builtins.SystemError"), r"std::bad_alloc|could not create a memory object|out of memory",
          Where.HOST, "native code"),
    Entry(("builtins.MemoryError",), "", Where.HOST, "Python and NumPy"),
    Entry(("tensorflow.python.framework.errors_impl.ResourceExhaustedError",), "", Where.DEVICE, "TensorFlow"),
    Entry(("jaxlib._jax.XlaRuntimeError", "jaxlib.xla_extension.XlaRuntimeError", "jax.errors.JaxRuntimeError"),
          r"RESOURCE_EXHAUSTED|[Oo]ut of memory|[Ff]ailed to allocate", Where.DEVICE, "JAX"),
    Entry(("builtins.ValueError", "builtins.RuntimeError"), r"^RESOURCE_EXHAUSTED: ", Where.DEVICE, "XLA, through a wrapper"),
    Entry(("cupy.cuda.memory.OutOfMemoryError",), "", Where.DEVICE, "CuPy"),
)  # fmt: skip
"""Known out-of-memory errors, the most certain first."""


def out_of_memory(error: BaseException) -> Entry | None:
    """The kind of out-of-memory error that this error is or was raised from; None if there is none.

    An error raised while an out-of-memory error was being handled counts only if it was raised *from* that one
    (``__cause__``): a bug in a handler of out-of-memory errors is a bug.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = _entry(current)
        if found is not None:
            return found
        current = current.__cause__
    return None


def _entry(error: BaseException) -> Entry | None:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Entry(("builtins.OSError",), "", Where.HOST, "the system")
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    text = str(error)
    for entry in CATALOGUE:
        if names.intersection(entry.types) and (not entry.words or re.search(entry.words, text, re.DOTALL)):
            return entry
    return None
