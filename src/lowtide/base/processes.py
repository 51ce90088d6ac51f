"""How processes that Lowtide starts end. Standard library only."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """In a new process, before its program begins: have the kernel kill it when whoever started it ends, however that ends.

    See ``PR_SET_PDEATHSIG`` in ``man 2 prctl``; elsewhere than on Linux nothing happens.
    """
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
