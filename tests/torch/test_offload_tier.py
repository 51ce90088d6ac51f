"""Offloaded values are out of memory: not in a file system that is memory itself, and not resident in the process."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lowtide.base import files
from lowtide.runtime.device import accelerator, available_memory, file_tier
from lowtide.runtime.device.available_memory import available_bytes, is_in_memory

MIB = 1 << 20


def _resident_of_files() -> int:
    status = Path("/proc/self/status").read_text()
    return sum(int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10 for name in ("RssFile", "RssShmem"))


def test_offloaded_bytes_are_not_resident_and_come_back():
    moved = file_tier.FileTier()
    source = torch.randn(16 * MIB)
    expected = source.clone()
    before = _resident_of_files()
    ticket = moved.put(source.untyped_storage())
    assert _resident_of_files() - before < MIB
    for _ in range(2):
        back = torch.empty(0).set_(ticket.fetch())
        assert torch.equal(back, expected)
        assert _resident_of_files() - before < MIB
    del ticket
    other = moved.put(torch.ones(16 * MIB).untyped_storage())
    assert torch.equal(torch.empty(0).set_(other.fetch()), torch.ones(16 * MIB))


def test_pages_leave_a_limited_group_piece_by_piece(monkeypatch):
    """Whether written or read. Their write-back starts at once, so that the group never waits for it at its limit."""
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, what: told.append((at, size, what)))
    tier, source = file_tier.FileTier(), torch.randn(10 * MIB)
    tier._limited = True
    ticket = tier.put(source.untyped_storage())
    assert torch.equal(torch.empty(0).set_(ticket.fetch()), source)
    pieces = [(at << 20, min(16, 40 - at) << 20, os.POSIX_FADV_DONTNEED) for at in (0, 16, 32)]
    assert told == pieces * 2


@pytest.mark.parametrize("moved", [1, 4096, 5 * MIB + 3])
def test_what_a_system_writes_and_reads_in_parts_is_whole(monkeypatch, moved):
    """A system may move fewer bytes than it was asked to; signals interrupt it."""
    def partly(real):
        calls = iter(range(10**9))

        def call(file, address, size, at):
            if next(calls) % 3 == 1:
                ctypes.set_errno(errno.EINTR)
                return -1
            return real(file, address, min(size, max(moved, size // 8)), at)

        return call

    libc = files._LIBC
    monkeypatch.setattr(files, "_LIBC", SimpleNamespace(pwrite=partly(libc.pwrite), pread=partly(libc.pread)))
    source = torch.randn(2 * MIB)
    ticket = file_tier.FileTier().put(source.untyped_storage())
    assert torch.equal(torch.empty(0).set_(ticket.fetch()), source)


def test_threads_that_offload_at_once_get_places_of_their_own():
    tier, tickets = file_tier.FileTier(), [[], []]
    start = threading.Barrier(2)

    def put(which: int) -> None:
        start.wait()
        for i in range(12):
            value = torch.full((5 * MIB,), 100 * which + i, dtype=torch.uint8)
            tickets[which].append((100 * which + i, tier.put(value.untyped_storage())))

    threads = [threading.Thread(target=put, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted((t._place.at, t._place.bytes) for which in tickets for _, t in which)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(places))
    for value, ticket in itertools.chain(*tickets):
        assert (torch.empty(0, dtype=torch.uint8).set_(ticket.fetch()) == value).all()


def test_nothing_is_offloaded_and_comes_back():
    assert file_tier.FileTier().put(torch.empty(0).untyped_storage()).fetch().nbytes() == 0


def test_a_lazy_copy_stays_one():
    """Its bytes are allocated only where one of the two is written."""
    source = torch.randn(MIB)
    lazy = torch._lazy_clone(source)
    ticket = file_tier.FileTier().put(lazy.untyped_storage())
    assert torch._C._is_cow_tensor(lazy)
    assert torch.equal(torch.empty(0).set_(ticket.fetch()), source)


def test_a_file_that_ends_too_soon_is_an_error():
    tier = file_tier.FileTier()
    ticket = tier.put(torch.ones(MIB).untyped_storage())
    os.ftruncate(tier._file.fileno(), 4096)
    with pytest.raises(OSError, match="Input/output error"):
        ticket.fetch()


def test_file_systems_in_memory_are_recognized():
    assert is_in_memory("/dev/shm")
    assert not is_in_memory("/proc/self")


def test_another_folder_is_used_if_the_temporary_one_is_in_memory(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/dev/shm")
    monkeypatch.setattr(file_tier, "is_in_memory", lambda folder: str(folder) in ("/dev/shm", "/var/tmp"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_tier._folder() == str(tmp_path)
    assert f"activations are offloaded to {tmp_path} instead" in capsys.readouterr().err


def test_nothing_is_offloaded_if_no_folder_is_on_disk(monkeypatch, capsys):
    import lowtide

    monkeypatch.setattr(file_tier, "is_in_memory", lambda _: True)
    model = torch.nn.Sequential(*(m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())))
    with lowtide.budget("16MiB", keep_going=True) as run:
        for _ in range(4):
            model(torch.randn(2048, 256)).sum().backward()
            model.zero_grad()
    assert not any(s.offloaded_bytes for s in run.outcome.steps)
    assert any(s.recomputed_ops for s in run.outcome.steps)
    assert "is a file system in memory" in capsys.readouterr().err


def test_available_memory_is_less_than_the_machine_has():
    assert 0 < available_bytes(torch.device("cpu")) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


FREES = """
import resource, sys, torch
from pathlib import Path
from lowtide.runtime.device.available_memory import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

torch.empty(4 << 20).fill_(1)  # malloc's heap takes blocks of this size from now on
size = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())["VmSize"]
resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[0]) << 10) + (512 << 20), -1))
told = return_freed_memory(int(sys.argv[1]) << 20)
large, small = [], []
for _ in range(64):
    large.append(torch.ones(512 << 10))
    small.append(torch.ones(4 << 10))  # keeps the heap from shrinking at its top
before = resident()
large.clear()
print(told, (before - resident()) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what malloc keeps is glibc's own")
def test_freed_memory_is_returned_under_a_limit_close_to_the_budget():
    """glibc's malloc keeps freed memory otherwise. A process whose limit leaves far more than the budget is left alone."""
    def ran(budget_mib: int) -> tuple[str, int]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", FREES, str(budget_mib)], env=environment, capture_output=True, text=True, check=True,
        )
        told, returned = done.stdout.split()
        return told, int(returned)

    assert ran(budget_mib=100)[0] == "False"
    told, returned = ran(budget_mib=400)
    assert told == "True"
    assert returned >= 120


def test_malloc_is_unchanged_where_the_budget_may_be_a_devices(monkeypatch):
    monkeypatch.setattr(available_memory, "_left_of_limits", lambda: 0.0)
    monkeypatch.setattr(accelerator, "is_there", lambda: True)
    assert not available_memory.return_freed_memory(1 << 30)


def _child(read: int, write: int, work) -> int:
    """Fork; the child waits for a byte and writes the result of ``work``, eight bytes."""
    number = os.fork()
    if not number:
        try:
            os.read(read, 1)
            os.write(write, int(work()).to_bytes(8, "little"))
        finally:
            os._exit(0)
    return number


def test_a_forked_child_reads_what_was_offloaded_when_it_was_forked():
    """The parent frees the value and offloads others of its size meanwhile; the place is used again once the child has ended."""
    tier, size = file_tier.FileTier(), MIB
    tickets = [tier.put(torch.full((size,), 7, dtype=torch.uint8).untyped_storage())]
    place = tickets[0]._place.at
    (go_read, go_write), (told_read, told_write) = os.pipe(), os.pipe()
    child = _child(go_read, told_write, lambda: torch.empty(0, dtype=torch.uint8).set_(tickets[0].fetch()).sum(dtype=torch.int64))
    tickets.clear()
    others = [tier.put(torch.zeros(size, dtype=torch.uint8).untyped_storage()) for _ in range(3)]
    assert place not in {other._place.at for other in others}
    os.write(go_write, b"x")
    assert int.from_bytes(os.read(told_read, 8), "little") == 7 * size
    os.waitpid(child, 0)
    again = tier.put(torch.zeros(size, dtype=torch.uint8).untyped_storage())
    assert again._place.at == place
    for end in (go_read, go_write, told_read, told_write):
        os.close(end)


def test_a_forked_child_offloads_nothing():
    """Its writes would be seen by the parent, which shares the file."""
    tier, size = file_tier.FileTier(), MIB
    ticket = tier.put(torch.full((size,), 7, dtype=torch.uint8).untyped_storage())

    def refused() -> bool:
        with pytest.raises(OSError, match="belongs to the parent"):
            tier.put(torch.zeros(size, dtype=torch.uint8).untyped_storage())
        return True

    (go_read, go_write), (told_read, told_write) = os.pipe(), os.pipe()
    child = _child(go_read, told_write, refused)
    os.write(go_write, b"x")
    assert int.from_bytes(os.read(told_read, 8), "little") == 1
    os.waitpid(child, 0)
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(ticket.fetch()), torch.full((size,), 7, dtype=torch.uint8))
    for end in (go_read, go_write, told_read, told_write):
        os.close(end)


def test_a_place_is_written_and_read_slice_by_slice():
    tier = file_tier.FileTier()
    source = torch.arange(100, dtype=torch.uint8)
    ticket = tier.empty(100)
    ticket.write(40, source[40:])
    ticket.write(0, source[:40])
    back = torch.empty(30, dtype=torch.uint8)
    ticket.read(35, back)
    assert torch.equal(back, source[35:65])
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(ticket.fetch()), source)


def test_a_ticket_that_a_child_may_read_is_copied_before_it_is_overwritten():
    tier = file_tier.FileTier()
    source = torch.arange(3 * MIB, dtype=torch.int64)
    ticket = tier.put(source.untyped_storage())
    assert ticket.own() is ticket
    end, other = os.pipe()
    child = os.fork()
    if not child:
        os.read(end, 1)
        os._exit(0)
    copied = ticket.own()
    assert copied is not ticket
    copied.write(8, torch.full((8,), 255, dtype=torch.uint8))
    assert torch.equal(torch.empty(0, dtype=torch.int64).set_(ticket.fetch()), source)
    changed = torch.empty(0, dtype=torch.int64).set_(copied.fetch())
    assert changed[1] == -1
    assert torch.equal(changed[2:], source[2:])
    os.write(other, b"!")
    os.waitpid(child, 0)
    assert ticket.own() is ticket
    for number in (end, other):
        os.close(number)


def test_slices_that_follow_are_announced_only_in_a_limited_group(monkeypatch):
    """There they may have left the page cache."""
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, what: told.append((at, size, what)))
    tier = file_tier.FileTier()
    ticket = tier.empty(100)
    tier._limited = False
    ticket.expect(10, 20)
    assert not told
    tier._limited = True
    ticket.expect(10, 20)
    assert told == [(10, 20, os.POSIX_FADV_WILLNEED)]
