"""Law: standard output is the script's: what a solver prints there is left out, and nothing else is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = r"""
import ctypes, os
from lowtide.base.outputs import without_solver_output

libc = ctypes.CDLL(None)
libc.printf(b"one\n")  # the C library holds it back, because standard output is a pipe
print("two", flush=True)
with without_solver_output():
    libc.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n")
    os.write(1, b"three, from another thread\n")
print("four", flush=True)
"""
CLOSED = r"""
import os
from lowtide.base.outputs import without_solver_output

os.close(1)
with without_solver_output():
    print("no one hears this", file=open(os.devnull, "w"))
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_what_highs_prints_is_left_out() -> None:
    done = _run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["four", "one", "three, from another thread", "two"]
    assert done.stdout.splitlines()[-1] == "four"


def test_a_closed_standard_output_is_no_error() -> None:
    assert _run(CLOSED).returncode == 0
