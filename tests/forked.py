"""A verb in a fork of the test's own process: a command that is refused at once need not wait for an interpreter to start."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess


def forked(*words: str | Path, cwd: Path, columns: int | None = None) -> CompletedProcess[str]:
    """Run ``lowtide WORDS`` in a folder, on a terminal of `columns` columns: exit code and output."""
    from lowtide.cli.main import main

    def body() -> None:
        os.chdir(cwd)
        if columns is not None:
            os.environ["COLUMNS"] = str(columns)
        main([str(w) for w in words])

    return forked_call(body)


def forked_call(body: Callable[[], None]) -> CompletedProcess[str]:
    """Run a function in a fork: exit code and output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:  # nothing of the test's may run in here, whatever happens
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                body()
                code = 0
            except SystemExit as end:
                if isinstance(end.code, str):
                    sys.stderr.write(end.code)
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return CompletedProcess([], os.waitstatus_to_exitcode(status), out.read(), err.read())
