"""Law: the page of a recording opens without a network, answers hover and click, and stays fast with a million events."""

from __future__ import annotations

import html as html_text
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from command import TIMEOUT
import numpy as np
import pytest
import torch
from lowtide.recording.explanation.explanation import explain
from lowtide.report.html import page
from lowtide.recording.file_format import CARRIED, ENTRY, PHASES, Flag, EntryKind
from lowtide.recording.reader import read
from lowtide.recording.summary import summarize_step
from lowtide.recording.writer import Writer
from lowtide.base.trace import Phase

import lowtide

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LARGEST_PAGE = 300_000
"""Bytes of a page without its data."""
OPERATORS = 250_000
"""Four entries each: a million."""
MOST_WORK = 500
"""Canvas calls and changed nodes that one move of the mouse may cost: enough for what it shows, not for redrawing the chart."""

PROBE = """
<script>
addEventListener("load", () => setTimeout(async () => {
  const over = document.querySelector("#chart .u-over"), box = over.getBoundingClientRect();
  const move = (x) => over.dispatchEvent(new MouseEvent("mousemove", {clientX: box.left + box.width * x, clientY: box.top + 80, bubbles: true}));
  over.dispatchEvent(new MouseEvent("mouseenter", {clientX: box.left, clientY: box.top + 80}));
  let calls = 0;
  const canvas = CanvasRenderingContext2D.prototype, path = Path2D.prototype;
  for (const owner of [canvas, path]) for (const name of Object.getOwnPropertyNames(owner)) {
    const real = Object.getOwnPropertyDescriptor(owner, name).value;
    if (typeof real === "function" && name !== "constructor") owner[name] = function (...given) { calls++; return real.apply(this, given); };
  }
  const changes = new MutationObserver(() => {});
  changes.observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
  const work = [];
  for (let i = 1; i < 40; i++) { calls = 0; move(i / 40); work.push(calls + changes.takeRecords().length); }
  calls = 0;
  window.lowtideChart().redraw();
  await new Promise((drawn) => setTimeout(drawn));
  const whole = calls;
  const before = document.getElementById("when").textContent;
  move(0.5);
  const tip = document.getElementById("tip").textContent;
  const press = (kind) => (kind === "mouseup" ? document : over).dispatchEvent(
    new MouseEvent(kind, {clientX: box.left + box.width * 0.5, clientY: box.top + 80, bubbles: true, button: 0}));
  ["mousedown", "mouseup", "click"].forEach(press);
  const result = {ready: window.lowtideReady === true, tip, before, after: document.getElementById("when").textContent,
    composition: document.getElementById("composition").textContent, work: Math.max(...work), whole, highest: Math.max(...window.lowtideChart().data.at(-1)),
    outside: performance.getEntriesByType("resource").map((r) => r.name)};
  const out = document.createElement("pre"); out.id = "result"; out.textContent = JSON.stringify(result); document.body.append(out);
}, 50));
</script>
"""


def _opened(text: str, folder: Path, shot: str) -> dict[str, Any]:
    """The page's own report after it was hovered over and clicked; a screenshot is left beside it."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (CI installs it): the page is not opened")
    file = folder / f"{shot}.html"
    file.write_text(text.replace("</body>", PROBE + "</body>"))
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1200", "--virtual-time-budget=20000",
              f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*common, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    subprocess.run([*common, f"--screenshot={folder / f'{shot}.png'}", file.as_uri()], capture_output=True, timeout=TIMEOUT, check=True)
    assert (folder / f"{shot}.png").stat().st_size > 10_000
    told: dict[str, Any] = json.loads(html_text.unescape(found[1]))
    return told


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a small model."""
    file = tmp_path_factory.mktemp("page") / "small.lowtide"
    torch.manual_seed(0)
    with lowtide.record(file):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
    return file


def test_the_page_is_small_and_loads_nothing_from_outside(recording: Path) -> None:
    text = page(explain(read(recording)))
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert len(text) - len(data[1]) < LARGEST_PAGE
    bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)  # uPlot's licence has an address
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest|importScripts", bare)


def test_hover_and_click_show_live_memory(recording: Path, tmp_path: Path) -> None:
    told = _opened(page(explain(read(recording))), tmp_path, "small")
    assert told["ready"]
    assert "aten." in told["tip"]
    assert "test_page.py" in told["tip"]
    assert told["before"].startswith("At the high-water mark")
    assert told["after"].startswith("At ")
    assert told["after"] != told["before"]
    assert "parameter" in told["composition"]
    assert not told["outside"]


def test_a_difference_page_opens_and_names_the_other_recording(recording: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.lowtide"
    with lowtide.record(other):
        torch.nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    text = page(explain(read(recording)), explain(read(other)))
    assert "Compared with other.lowtide" in text
    assert _opened(text, tmp_path, "difference")["ready"]


def test_a_difference_keeps_short_peaks_of_the_other_recording(recording: Path, tmp_path: Path) -> None:
    """The other recording's line used to show one of its many instants for each of the first recording's few, and a short peak
    fell in between.
    """
    few = tmp_path / "few.lowtide"
    with lowtide.record(few):
        torch.nn.Linear(64, 64)(torch.randn(8, 64)).sum().backward()
    other = read(recording)
    told = _opened(page(explain(read(few)), explain(other)), tmp_path, "few")
    peak = max(step.peak_bytes for step in other.steps if step.step >= 0)
    assert abs(told["highest"] - peak) <= 0.01 * peak


def _million(path: Path) -> None:
    """A recording of one step with a million entries: a forward that saves, and a backward that releases."""
    writer = Writer(path, {"script": "million.py", "torch": torch.__version__, "level": "ops", "device": "cpu"})
    for name in ("", "aten.op.default", "Net.block", "net.py:1 in forward", "float32 [256]"):
        writer.name(name)
    n, half = OPERATORS, OPERATORS // 2
    entries = np.zeros(4 * n, dtype=ENTRY)
    entries["time"] = np.arange(4 * n) * 1e-6
    rising = np.minimum(np.arange(n), n - 1 - np.arange(n)).astype(np.int64) * 1024
    entries["phase"] = np.where(np.arange(4 * n) < 4 * half, PHASES.index(Phase.FORWARD), PHASES.index(Phase.BACKWARD))
    op = entries[0::4]
    op["kind"], op["a"], op["b"], op["c"] = EntryKind.OP, 1, 2, 3
    op["size"] = rising + (1 << 20)
    op["live"] = op["peak"] = op["size"] + 1024
    first, second, third = entries[1::4], entries[2::4], entries[3::4]
    blocks = np.arange(1, n + 1)
    first["kind"][:half], first["a"][:half], first["b"][:half] = EntryKind.BORN, blocks[:half], 4
    first["size"][:half], first["flags"][:half] = 1024, Flag.COUNTED
    second["kind"][:half], second["a"][:half] = EntryKind.SAVED, blocks[:half]
    third["kind"][:half], third["a"][:half] = EntryKind.READ, blocks[:half]
    back = blocks[:half][::-1]
    first["kind"][half:], first["a"][half:] = EntryKind.READ, back
    second["kind"][half:], second["a"][half:] = EntryKind.RELEASED, back
    third["kind"][half:], third["a"][half:] = EntryKind.DIED, back
    writer.step(summarize_step(0, 0.0, 1 << 20, 1 << 20, entries, np.zeros(0, dtype=CARRIED), complete=True))
    writer.close()


@pytest.mark.long
def test_hovering_over_a_million_events_does_little_work(tmp_path: Path) -> None:
    """Moving the mouse redraws what it shows and not the whole chart."""
    _million(tmp_path / "million.lowtide")
    text = page(explain(read(tmp_path / "million.lowtide")))
    assert len(text) < 8_000_000
    told = _opened(text, tmp_path, "million")
    assert told["ready"]
    assert 0 < told["work"] < MOST_WORK < told["whole"]
    assert "activation" in told["composition"]
