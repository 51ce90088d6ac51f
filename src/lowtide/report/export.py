"""Exports a recording to other tools' formats.

* PyTorch's memory snapshot (``snapshot.pickle``): opens in https://pytorch.org/memory_viz and in ``torch.cuda._memory_viz``.
* Chrome's trace format: phases, operators and a counter per role; opens in Perfetto and ``chrome://tracing``.
* speedscope: a flame graph of the bytes at the high-water mark, by role, module and line.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Final

from lowtide.base.files import write_file
from lowtide.recording.explanation.explanation import Explanation
from lowtide.recording.recorded_step import ROLES, Block, RecordedStep

_MICROSECONDS: Final = 1e6
_ALIGNMENT: Final = 512
"""Sizes of blocks are rounded up to a multiple of this, and their made-up addresses are multiples of it."""


# --- PyTorch's snapshot ---------------------------------------------------------------------------------------------------


def snapshot(found: Explanation) -> dict[str, Any]:
    """The structure that ``torch.cuda.memory._snapshot()`` returns: all events, and a segment per block live at the end.

    The events of the recorded steps follow one another. Every block has a made-up address of its own.
    """
    events: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    steps = found.steps
    for step in steps:
        seen: list[tuple[int, int, Block]] = []
        for b in step.blocks:
            if b.counted and b.bytes:
                if b.born >= 0 or step is steps[0]:
                    seen.append((max(b.born, 0), 0, b))
                if b.died < len(step.entries):
                    seen.append((b.died, 1, b))
        for entry, ends, b in sorted(seen, key=lambda x: (x[0], x[1])):
            event = _event(step, b, entry)
            if ends:
                events += [{**event, "action": "free_requested"}, {**event, "action": "free_completed"}]
            else:
                events.append({**event, "action": "alloc"})
    for b in steps[-1].blocks if steps else ():
        if b.counted and b.bytes and b.died >= len(steps[-1].entries):
            segments.append(_segment(b))
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def _address(block: Block) -> int:
    return 0x7F00_0000_0000 + block.number * (1 << 32)


def _event(step: RecordedStep, block: Block, entry: int) -> dict[str, Any]:
    at = min(entry, len(step.entries) - 1)
    return {
        "addr": _address(block), "size": block.bytes, "stream": 0,
        "time_us": round(float(step.entries["time"][at]) * _MICROSECONDS), "frames": _frames(block),
    }


def _frames(block: Block) -> list[dict[str, Any]]:
    file, _, rest = block.source.partition(":")
    line, _, function = rest.partition(" in ")
    found = [{"name": block.title, "filename": block.module or "(no module)", "line": 0}]
    if block.source:
        found.append({"name": function, "filename": file, "line": int(line) if line.isdigit() else 0})
    return found


def _segment(block: Block) -> dict[str, Any]:
    size = -(-block.bytes // _ALIGNMENT) * _ALIGNMENT
    inner = {"address": _address(block), "size": size, "requested_size": block.bytes, "state": "active_allocated",
             "frames": _frames(block)}
    return {
        "device": 0, "address": _address(block), "total_size": size, "allocated_size": size, "active_size": size,
        "requested_size": block.bytes, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": _frames(block), "blocks": [inner],
    }


def write_snapshot(found: Explanation, path: Path) -> None:
    """Write the snapshot as a pickle."""
    write_file(path, pickle.dumps(snapshot(found)))


# --- Chrome and Perfetto --------------------------------------------------------------------------------------------------


def trace_events(found: Explanation) -> dict[str, Any]:
    """Chrome trace events: phases and operators as slices, bytes by role as a counter."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "phases"}},
        {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "operators"}},
    ]
    for row in found.recording.steps:
        events += [
            {"ph": "X", "pid": 1, "tid": 1, "name": p.name, "ts": p.start * _MICROSECONDS, "dur": p.seconds * _MICROSECONDS,
             "args": {"step": row.step, "peak_bytes": p.peak_bytes, "end_bytes": p.end_bytes}}
            for p in row.phases
        ]
    for step in found.steps:
        times = step.entries["time"][step.ops] * _MICROSECONDS
        for k, entry in enumerate(step.entries[step.ops]):
            begins = float(times[k - 1]) if k else step.row.start * _MICROSECONDS
            place = {"module": step.names[entry["b"]], "source": step.names[entry["c"]], "peak_bytes": int(step.peaks[k])}
            events.append({"ph": "X", "pid": 1, "tid": 2, "name": step.names[entry["a"]], "ts": begins,
                           "dur": max(0.0, float(times[k]) - begins), "args": place})
            roles = {r.name.lower(): int(step.at_peak[k][r]) for r in ROLES}
            events.append({"ph": "C", "pid": 1, "name": "bytes by role", "ts": float(times[k]), "args": roles})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# --- speedscope -----------------------------------------------------------------------------------------------------------


def speedscope(found: Explanation) -> dict[str, Any]:
    """The high-water mark of each recorded step as a flame graph in bytes: role, module path, line, block."""
    frames: dict[str, int] = {}

    def frame(name: str) -> int:
        return frames.setdefault(name, len(frames))

    profiles = []
    for step in found.steps:
        entry = int(step.ops[step.peak_op])
        samples, weights = [], []
        for b in step.blocks:
            if b.counted and b.born <= entry < b.died and b.bytes:
                path = [b.role_at(entry).name.lower(), *(b.module.split(".") if b.module else ()), b.source, b.title]
                samples.append([frame(name) for name in path if name])
                weights.append(b.bytes)
        roles = step.at_peak[step.peak_op]
        rest = int(roles.sum()) - sum(weights)
        if rest > 0:
            samples.append([frame("workspace and unknown")])
            weights.append(rest)
        profiles.append({
            "type": "sampled", "name": f"step {step.row.step}: {step.names[step.entries[entry]['a']]}", "unit": "bytes",
            "startValue": 0, "endValue": sum(weights), "samples": samples, "weights": weights,
        })
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json", "name": str(found.meta.get("script", "")),
        "exporter": "lowtide", "activeProfileIndex": 0, "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }


def write_json(exported: dict[str, Any], path: Path) -> None:
    """Write one of the JSON formats."""
    write_file(path, json.dumps(exported, separators=(",", ":")).encode())
