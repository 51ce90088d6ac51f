"""Reports of `lowtide batch`: a table, a page and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowtide.base.units import format_bytes
from lowtide.report.pages import render
from lowtide.report.size import new_table, number
from lowtide.report.terminal import console
from lowtide.studies.size.throughput import SizeStudy, to_json


def batch_json(study: SizeStudy) -> dict[str, Any]:
    """The whole study as JSON."""
    best, plain, held = study.knee, study.largest, study.largest_under_budget
    return {
        "axes": [{"name": n, "kind": a.kind} for n, a in zip(study.vary.names, study.vary.axes, strict=True)],
        "points": [to_json(p) for p in study.points],
        "knee": None if best is None else to_json(best)["value"],
        "largest": None if plain is None else to_json(plain)["value"],
        "largest_under_budget": None if held is None else to_json(held)["value"],
    }


def _rows(study: SizeStudy) -> list[list[str]]:
    best = study.knee if study.per_sample else None
    rows = []
    for p in study.points:
        name = ", ".join(p.values)
        if p.rate is None:
            rows.append([name, p.how, p.ended, "", "", "", ""])
            continue
        spread = f"{number(p.rate.low)}-{number(p.rate.high)}"
        peaks = [format_bytes(b or 0) for b in (p.cold_peak_bytes, p.peak_bytes)]
        rows.append([name, p.how, number(p.rate.median), spread, *peaks, "knee" if p is best else ""])
    return rows


def _heads(study: SizeStudy) -> tuple[str, ...]:
    what = "samples" if study.per_sample else "steps"
    return (", ".join(study.vary.names), "how", f"{what}/s", "quartiles", "peak, first step", "peak", "")


def show_batch(study: SizeStudy) -> None:
    """Print the table and, if every size was run, the knee and the largest size that fits."""
    table = new_table("throughput and peak by size", *_heads(study))
    for row in _rows(study):
        table.add_row(*row)
    out = console()
    out.print(table)
    name = ", ".join(study.vary.names)
    best, plain, held = study.knee, study.largest, study.largest_under_budget
    if best is not None and study.per_sample:
        what = "the smallest with at least 95 % of the highest throughput"
        out.print(f"knee: {name} {', '.join(best.values)}, {what}", markup=False)
    if plain is not None:
        out.print(f"largest that fits: {', '.join(plain.values)}", markup=False)
    if held is not None and held is not plain:
        means = f", with {', '.join(held.optimizations)}" if held.optimizations else ""
        out.print(f"largest that fits under the budget: {', '.join(held.values)}{means}", markup=False)
    for p in study.points:
        if p.message:
            out.print(f"{', '.join(p.values)} ({p.how}): {p.message}", markup=False)


def batch_page(study: SizeStudy) -> str:
    """The HTML page, with throughput and peak by size."""
    best, vary, points, per_sample = study.knee, study.vary, study.points, study.per_sample
    x = {"kind": "number", "label": vary.names[0]}
    log = len(points) > 2 and all(float(p.values[0]) > 0 for p in points)

    def lines(of: Any) -> list[dict[str, Any]]:
        groups: dict[str, list[tuple[float, float]]] = {}
        for p in points:
            if p.fits:
                others = ", ".join(f"{n} {v}" for n, v in zip(vary.names[1:], p.values[1:], strict=True))
                groups.setdefault(" ".join(filter(None, [p.how, others])), []).append((float(p.values[0]), of(p)))
        return [{"name": name, "points": sorted(found), "dash": name.startswith("budget")} for name, found in groups.items()]

    plots = [
        {"title": "Throughput", "text": "median over the steps after the warm-up", "x": x, "log": log,
         "y": {"kind": "number", "label": "samples per second" if per_sample else "steps per second"},
         "series": lines(lambda p: p.rate.median)},
        {"title": "Peak", "text": "of torch's allocator, over all steps", "x": x, "log": log,
         "y": {"kind": "bytes", "label": "peak"}, "series": lines(lambda p: p.peak_bytes)},
    ]
    summary = "each size ran in its own process"
    if best is not None and per_sample:
        what = "the smallest with at least 95 % of the highest throughput"
        summary += f"; the knee is at {', '.join(best.values)}, {what}"
    shown = [p for p in plots if p["series"]]
    return render("size", shown, title=f"Sizes of {Path(study.script).name}", summary=summary, plots=shown,
                  head=_heads(study), rows=_rows(study))
