"""Ctrl-C before a script begins: the process ends at once, without a traceback of Lowtide's own imports."""

from __future__ import annotations

import signal


def hold() -> None:
    """Let an interrupt end the process as the system does, from here on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody has set it, or it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def allow() -> None:
    """Let an interrupt raise :class:`KeyboardInterrupt` again, unless it was ignored when the process began."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
