"""Law: the seq2seq of 2018, recorded on the CPU, takes the memory that was measured on a GPU then, with the same answers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from lowtide.recording.explanation.explanation import explain
from lowtide.recording.reader import read

import lowtide

SHARE = 0.01
MIB = 1 << 20
EXAMPLE = Path(__file__).parents[2] / "examples" / "seq2seq_2018.py"


@pytest.mark.timeout(900)
def test_the_2018_measurements_and_findings_are_reproduced(tmp_path: Path) -> None:
    """Fifteen pairs of live bytes and high-water marks agree within 1 %, and the findings give the five answers of then."""
    spec = importlib.util.spec_from_file_location("seq2seq_2018", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["seq2seq_2018"] = example
    spec.loader.exec_module(example)
    file = tmp_path / "seq2seq.lowtide"
    with lowtide.record(file):
        example.train()
    rows = example.table(file)
    assert len(rows) == 15
    for phase, step, now, high, then, then_high in rows:
        assert abs(now - then) <= SHARE * then, (phase, step, now, then)
        assert abs(high - then_high) <= SHARE * then_high, (phase, step, high, then_high)
    found = {f.id: f for f in explain(read(file)).findings}
    assert {"loss-block", "backward-extra", "optimizer-states", "zeroed-gradients", "held-result", "second-step"} <= set(found)
    assert abs(found["zeroed-gradients"].saving_bytes / MIB - 280) < 3
    assert abs(found["held-result"].saving_bytes / MIB - 458) < 1
    assert "variable logits (seq2seq_2018.py:" in found["held-result"].text
    assert "optimizer_state" in found["second-step"].text
    assert "gradient" in found["second-step"].text
