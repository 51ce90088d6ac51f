"""Breaks down growth of resident memory into buckets that are measured one by one, and an unexplained residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.studies.leak.watch import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Growth of resident memory between two audits of one process.

    Attributes:
        first, last: steps of the audits.
        resident_bytes: growth of resident memory.
        buckets: growth in bytes by name, in the order in which it is shown: Python's arenas; malloc's blocks in use; memory
            that malloc holds free; other anonymous mappings; files; shared memory; stacks.
        residual_bytes: growth that no bucket explains; negative if memory in use was never touched.
        trimmed_bytes: bytes that malloc returned to the system at the end, when asked to.
        files: the mapped files that grew most, with their growth in bytes, largest first.
    """

    first: int
    last: int
    resident_bytes: int
    buckets: dict[str, int]
    residual_bytes: int
    trimmed_bytes: int
    files: tuple[tuple[str, int], ...]

    @property
    def dominant(self) -> str:
        """The bucket that grew most."""
        return max(self.buckets, key=lambda name: self.buckets[name])


def close(run: Run) -> Books | None:
    """The books of a process between its first audit and its last; None if there are fewer than two audits.

    Malloc's blocks in use come from the preloaded counter if it is loaded, else from malloc; the memory that malloc has from
    the system comes from the pages of its own mappings. Python's arenas come from CPython's account, files and shared memory
    from the kernel's. Anonymous mappings are the remainder of the kernel's anonymous pages, up to the address space that was
    mapped for them; what exceeds that is residual.
    """
    if len(run.audits) < 2:
        return None
    a, b = run.audits[0], run.audits[-1]

    def grown(name: str) -> int:
        return int(b[name] - a[name]) if min(a[name], b[name]) >= 0 else 0

    def pages(name: str) -> int:
        return int(b["books"][name] - a["books"][name])

    used = grown("heap_bytes") if a["heap_bytes"] >= 0 else grown("used_bytes")
    direct = grown("private_bytes") - grown("system_bytes") - grown("arena_bytes")
    left = pages("anonymous") - grown("touched_bytes") - grown("mapped_bytes")
    buckets = {
        "python": grown("touched_bytes"),
        "heap_in_use": used,
        "heap_free": pages("heap") + grown("mapped_bytes") - used,
        "anonymous_maps": min(max(left, min(0, direct)), max(0, direct)),
        "files": pages("files"),
        "shared": pages("shared"),
        "stacks": pages("stack"),
    }
    resident = sum(pages(name) for name in ("heap", "anonymous", "stack", "files", "shared"))
    return Books(
        first=a["step"],
        last=b["step"],
        resident_bytes=resident,
        buckets=buckets,
        residual_bytes=resident - sum(buckets.values()),
        trimmed_bytes=int(b.get("trimmed_bytes", 0)),
        files=_files(a, b),
    )


def _files(a: dict[str, Any], b: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    old, new = a["books"]["paths"], b["books"]["paths"]
    found = [(path, size - old.get(path, 0)) for path, size in new.items() if size > old.get(path, 0)]
    return tuple(sorted(found, key=lambda x: -x[1])[:8])
