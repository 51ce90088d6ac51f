"""Law: training loops written like public example scripts print the same under any budget as without Lowtide.

The Hugging Face Trainer, Lightning, DDP and FSDP2 are in `test_frameworks`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call, lowtide_in

SCRIPT = str(Path(__file__).parent / "scripts" / "third_party.py")
ONE = {"OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.parametrize(("name", "share"), [
    ("word_language_model", 0.7), ("vae", 0.95), ("mnist", 0.9), ("graph_network", 0.5), ("ppo", 0.75),
])
def test_a_public_training_loop_keeps_its_output_and_its_budget(tmp_path: Path, name: str, share: float) -> None:
    plain = call(tmp_path, SCRIPT, name, **ONE)
    assert plain.returncode == 0, plain.stderr
    roomy = lowtide_in(tmp_path, "run", "--budget", "4GiB", "--json", "f.json", SCRIPT, name, **ONE)
    figures = json.loads((tmp_path / "f.json").read_text())
    assert roomy.stdout == plain.stdout
    resident, peak = figures["plan"]["resident_bytes"], max(s["peak_bytes"] for s in figures["steps"])
    budget = str(int(resident + share * (peak - resident)))
    tight = lowtide_in(tmp_path, "run", "--budget", budget, "--json", "f.json", SCRIPT, name, **ONE)
    assert tight.stdout == plain.stdout, tight.stderr
    assert tight.returncode == 0, tight.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["held"]
    assert any(s["recomputed_ops"] or s["offloaded_bytes"] for s in figures["steps"])
