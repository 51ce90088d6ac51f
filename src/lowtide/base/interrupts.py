"""Makes Ctrl-C before the script begins end the process at once, without a traceback from Lowtide's imports."""

from __future__ import annotations

import signal


def hold() -> None:
    """Restore the system's default action for SIGINT: from here on Ctrl-C kills the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise a handler is set, or SIGINT is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def allow() -> None:
    """Have SIGINT raise :class:`KeyboardInterrupt` again, unless it was ignored when the process began."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
