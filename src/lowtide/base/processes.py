"""Makes the processes that Lowtide starts end with it. Standard library only."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

_LIBC: Final = ctypes.CDLL(None)
_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason; call it in the child before the exec.

    See ``PR_SET_PDEATHSIG`` in ``man 2 prctl``. Does nothing on systems other than Linux.
    """
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
