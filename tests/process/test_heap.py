"""The heap counter (probe/heap.c) in separate processes: exact, capped, safe to fork, compatible with other preloaded
libraries.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from command import TIMEOUT
import pytest
from forked import forked_call
from lowtide.runtime.device.heap_meter import counters

import lowtide

LIBRARY = next(iter(sorted(Path(lowtide.__file__).parent.glob("probe/_heap*.so"))), None)

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the heap counter was not built")

PRELUDE = """
import ctypes, os, sys, threading
from lowtide.runtime.device.heap_meter import HeapMeter, counters
import torch
torch.set_num_threads(1)
c = counters()
assert c is not None
MIB = 1 << 20
torch.empty(64)
"""


def _python(code: str, *, preload: str | None = None) -> str:
    """Run code under the counter and return its output; in a fork if this process is already under it."""
    if preload is None and counters() is not None:
        return _in_a_fork(PRELUDE + textwrap.dedent(code))
    return _alone(code, preload=preload)


def _alone(code: str, *, preload: str | None = None) -> str:
    """Run code in a new process."""
    environment = {**os.environ, "LD_PRELOAD": preload or str(LIBRARY)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _in_a_fork(code: str) -> str:
    def body() -> None:
        signal.alarm(TIMEOUT)
        gc.disable()  # what the test process holds is not to be counted
        exec(compile(code, "<heap>", "exec"), {"__name__": "__main__"})

    done = forked_call(body)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tensor_counts_by_exactly_its_bytes() -> None:
    """torch.empty(n) raises tensor_live by 4 n bytes and one block; freeing it takes both back."""
    _python("""
        for n in (1, 7, 1000, 1 << 18, (1 << 20) + 3):
            live, blocks = c.tensor_live, c.tensor_blocks
            t = torch.empty(n)
            assert c.tensor_live - live == 4 * n, (n, c.tensor_live - live)
            assert c.tensor_blocks - blocks == 1
            del t
            assert c.tensor_live == live and c.tensor_blocks == blocks
    """)


def test_views_cost_nothing() -> None:
    """A view shares its storage: only the storage counts."""
    _python("""
        t = torch.empty(1000, 100)
        live = c.tensor_live
        views = [t[i:] for i in range(100)] + [t.t(), t.view(-1)]
        assert c.tensor_live == live
        del t
        assert c.tensor_live == live
        del views
        assert c.tensor_live == live - 400_000
    """)


def test_the_peaks_are_the_highest_point_of_their_window() -> None:
    """tensor_peak never falls; the operator's and the step's peaks start from the current bytes when they are reset."""
    _python("""
        m = HeapMeter(c)
        m.reset_op_peak(); m.begin_span()
        live = c.tensor_live
        a = torch.empty(MIB); b = torch.empty(MIB)
        del a
        m.reset_op_peak()
        assert m.op_peak() == c.tensor_live == live + 4 * MIB
        assert m.span_peak() == live + 8 * MIB <= c.tensor_peak
        del b
        m.begin_span()
        assert m.span_peak() == m.live() == live
        assert c.tensor_peak >= live + 8 * MIB
    """)


def test_the_process_cap_refuses_and_the_process_survives() -> None:
    """Above the cap torch raises RuntimeError and the counts are unchanged; smaller tensors, and a lifted cap, still work."""
    _python("""
        live, denied = c.tensor_live, c.denied
        c.cap = live + 10 * MIB
        try:
            torch.empty(11 * MIB, dtype=torch.uint8)
        except RuntimeError as error:
            assert "allocate memory" in str(error), error
        else:
            raise SystemExit("not refused")
        assert (c.denied, c.denied_bytes, c.tensor_live) == (denied + 1, 11 * MIB, live)
        t = torch.empty(10 * MIB, dtype=torch.uint8)
        assert c.tensor_live == live + 10 * MIB
        del t
        c.cap = 0
        assert torch.empty(11 * MIB, dtype=torch.uint8).numel() == 11 * MIB
    """)


def test_the_thread_cap_holds_for_its_own_thread_only() -> None:
    """A cap set by one thread refuses requests of that thread; another thread allocates freely."""
    _python("""
        m = HeapMeter(c)
        m.cap(c.tensor_live + MIB)
        got = []
        def other():
            got.append(torch.empty(8 * MIB, dtype=torch.uint8).numel())
        thread = threading.Thread(target=other)
        thread.start(); thread.join()
        assert got == [8 * MIB]
        try:
            torch.empty(8 * MIB, dtype=torch.uint8)
        except RuntimeError:
            pass
        else:
            raise SystemExit("not refused")
        m.cap(0)
        torch.empty(8 * MIB, dtype=torch.uint8)
    """)


def test_a_capped_operator_fails_as_a_whole() -> None:
    """An operator whose output does not fit raises; its inputs are as they were."""
    _python("""
        a = torch.ones(MIB)
        c.cap = c.tensor_live + MIB
        try:
            a + a
        except RuntimeError:
            pass
        else:
            raise SystemExit("not refused")
        c.cap = 0
        assert (a == 1).all()
    """)


def test_fork_while_threads_allocate_does_not_deadlock() -> None:
    """Both sides of 60 forks keep allocating and counting exactly while six threads allocate."""
    _alone("""
        import signal, time, warnings
        warnings.simplefilter("ignore")
        stop = False
        def churn():
            while not stop:
                ts = [torch.empty(n) for n in range(1, 60)]
                del ts
        threads = [threading.Thread(target=churn, daemon=True) for _ in range(6)]
        for t in threads: t.start()
        for _ in range(60):
            child = os.fork()
            if child == 0:
                live = c.tensor_live
                t = torch.empty(1000)
                os._exit(0 if c.tensor_live - live == 4000 else 9)
            deadline = time.monotonic() + 900
            while True:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid: break
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    raise SystemExit("the child hangs")
                time.sleep(0.001)
            assert status == 0, status
        stop = True
        for t in threads: t.join()
        assert not any(t.is_alive() for t in threads)
    """)


STRESS = """
    import random
    libc = ctypes.CDLL(None)
    for name in ("malloc", "calloc", "realloc", "aligned_alloc", "memalign"):
        getattr(libc, name).restype = ctypes.c_void_p
    S, P = ctypes.c_size_t, ctypes.c_void_p
    libc.malloc.argtypes, libc.calloc.argtypes, libc.realloc.argtypes = [S], [S, S], [P, S]
    libc.aligned_alloc.argtypes = libc.memalign.argtypes = [S, S]
    libc.posix_memalign.argtypes = [ctypes.POINTER(P), S, S]
    libc.free.argtypes = [P]
    def aligned(alignment, size):
        out = P()
        assert libc.posix_memalign(ctypes.byref(out), alignment, size) == 0
        return out.value
    makers = [
        lambda n: libc.malloc(n),
        lambda n: libc.calloc(3, n),
        lambda n: libc.aligned_alloc(64, (n + 63) // 64 * 64),
        lambda n: libc.memalign(256, n),
        lambda n: aligned(64, n),
        lambda n: aligned(16, n),
        lambda n: libc.realloc(None, n),
    ]
    def work(seed):
        rng = random.Random(seed)
        held = {}
        for i in range(3000):
            n = rng.choice([1, 24, 100, 5000, 70000, 300000])
            block = rng.choice(makers)(n)
            assert block
            ctypes.memset(block, seed, 1)
            held[i] = block
            if rng.random() < 0.3:
                key = rng.choice(list(held))
                first = ctypes.string_at(held[key], 1)
                held[key] = libc.realloc(held[key], rng.choice([8, 999, 200000]))
                assert ctypes.string_at(held[key], 1) == first == bytes([seed])
            while len(held) > 40:
                libc.free(held.pop(next(iter(held))))
        for block in held.values(): libc.free(block)
    def run():
        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
        for t in threads: t.start()
        for t in threads: t.join()
    run()
"""


def test_the_books_balance_after_a_stress_of_all_allocation_functions() -> None:
    """Four threads of malloc, calloc, realloc, memalign and others: heap_live returns to its value, the tensor counts to the
    byte.
    """
    _python(
        STRESS
        + """
    before, tensors, blocks, library = c.heap_live, c.tensor_live, c.tensor_blocks, c.library_live
    run()
    assert abs(c.heap_live - before) < 2 * MIB, c.heap_live - before
    assert (c.tensor_live, c.tensor_blocks, c.library_live) == (tensors, blocks, library)
    """
    )


def test_a_resized_library_block_leaves_the_tensor_count() -> None:
    """realloc of a library's 64-byte aligned block: it leaves the tensor count and stays in the heap's; freed, it leaves both.
    """
    _python(
        STRESS
        + """
    tensors, library, heap = c.tensor_live, c.library_live, c.heap_live
    block = aligned(64, 8 * MIB)
    assert (c.tensor_live - tensors, c.library_live - library) == (8 * MIB, 8 * MIB)
    block = libc.realloc(block, 16 * MIB)
    assert (c.tensor_live, c.library_live) == (tensors, library)
    assert abs(c.heap_live - heap - 16 * MIB) < MIB
    libc.free(block)
    assert abs(c.heap_live - heap) < MIB
    """
    )


def test_an_aligned_block_of_zero_bytes_is_harmless() -> None:
    """posix_memalign of zero bytes, and calloc whose size overflows, behave like libc's own."""
    _python(
        STRESS
        + """
    tensors = c.tensor_live
    libc.free(aligned(64, 0))
    assert c.tensor_live == tensors
    assert not libc.calloc(1 << 40, 1 << 40)
    out = P()
    assert libc.posix_memalign(ctypes.byref(out), 3, 100) == 22
    assert libc.posix_memalign(ctypes.byref(out), 65, 100) == 22
    assert libc.posix_memalign(ctypes.byref(out), 64, 1 << 62) == 12
    assert c.tensor_live == tensors
    """
    )


def test_numpy_arrays_leave_the_heap_count_unchanged() -> None:
    """Threads of NumPy arrays, grown and copied, leave heap_live where it was."""
    _python("""
        import numpy as np
        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(300):
                a = rng.random(int(rng.integers(1, 30000)))
                b = np.concatenate([a, a]); b.resize(len(b) * 2, refcheck=False)
                assert np.isfinite(b).all()
        def run():
            ts = [threading.Thread(target=work, args=(k,)) for k in range(4)]
            for t in ts: t.start()
            for t in ts: t.join()
        run()
        before = c.heap_live
        run()
        assert abs(c.heap_live - before) < 2 * MIB, c.heap_live - before
    """)


NEIGHBOUR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdatomic.h>
_Atomic long neighbour_count;
void *malloc(size_t bytes) {
  static void *(*next)(size_t);
  if (!next) next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
  atomic_fetch_add(&neighbour_count, 1);
  return next(bytes);
}
"""


@pytest.mark.parametrize("first", [True, False], ids=["counter-first", "neighbour-first"])
def test_another_preloaded_library_counts_too(tmp_path: Path, first: bool) -> None:  # noqa: FBT001
    """A second interposer of malloc stays in the chain, before or behind: both count every malloc."""
    (tmp_path / "neighbour.c").write_text(NEIGHBOUR)
    other = tmp_path / "neighbour.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", other, tmp_path / "neighbour.c", "-ldl"], check=True)
    order = (LIBRARY, other) if first else (other, LIBRARY)
    _python(
        f"""
        count = ctypes.c_long.in_dll(ctypes.CDLL({str(other)!r}), "neighbour_count")
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        mine, theirs = c.heap_requests, count.value
        blocks = [libc.malloc(100) for _ in range(1000)]
        assert c.heap_requests - mine >= 1000
        assert count.value - theirs >= 1000
        for b in blocks: libc.free(b)
        """,
        preload=":".join(map(str, order)),
    )


def test_programs_without_torch_run_under_the_counter() -> None:
    """Plain programs, also ones that fork and exec many others, behave as usual."""
    environment = {**os.environ, "LD_PRELOAD": str(LIBRARY)}
    done = subprocess.run(
        ["sh", "-c", "for i in 1 2 3 4 5; do echo $i | cat | sort; done"],  # noqa: S607
        env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n2\n3\n4\n5\n", "")


def test_what_the_solver_prints_stays_off_standard_output() -> None:
    """Law: standard output is the script's: HiGHS prints one line there although its output is off, and only that is left out."""
    said = _python("""
import ctypes
library = ctypes.CDLL(None)
library.puts(b"one")
library.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
library.puts(b"Highs of mine")
library.fflush(None)
""")
    assert said.split("\n")[:2] == ["one", "Highs of mine"]
