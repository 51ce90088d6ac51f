"""Laws: a compiled script runs under any budget as without: the same losses, graphs and breaks, and no warning by Dynamo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call, lowtide_in, script_in

SCRIPT = str(Path(__file__).parent / "scripts" / "compiled_forms.py")
FORMS = ("module", "full", "inplace", "blocks", "blocks-inplace", "function", "step", "optimize", "breaks", "reduce")


@pytest.mark.slow("inductor-2", "breaks-aot_eager-1", "reduce-aot_eager-1", "blocks-aot_eager-1", "blocks-inplace-aot_eager-1",
                  "optimize-aot_eager-1", "function-aot_eager-1")
@pytest.mark.long("inductor", "blocks", "breaks", "reduce", "aot_eager-1", "optimize", "function", "inplace-aot_eager-2", "full",
                  "module-aot_eager-2", "step-aot_eager-2")
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_dynamo_traces_the_same_graphs_as_without_lowtide(tmp_path: Path, form: str, backend: str, backwards: int) -> None:
    """The script prints its losses, graphs and breaks: its output is the same, and standard error has as many lines."""
    arguments = (SCRIPT, form, backend, str(backwards))
    plain = call(tmp_path, *arguments, OMP_NUM_THREADS="1")
    assert plain.returncode == 0, plain.stderr
    ours = lowtide_in(
        tmp_path, "run", "--budget", "100GiB", "--quiet", "--json", "f.json", *arguments, OMP_NUM_THREADS="1"
    )
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert ours.stderr.count("\n") == plain.stderr.count("\n"), ours.stderr
    assert len(json.loads((tmp_path / "f.json").read_text())["steps"]) == 4


@pytest.mark.parametrize("words", [("run", "--budget", "1GiB"), ("record", "--quiet", "-o", "r.lowtide")], ids=lambda w: w[0])
def test_a_script_that_compiles_nothing_does_not_import_dynamo(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Dynamo takes most of a second to import."""
    text = "import sys, torch; torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward(); print('torch._dynamo' in sys.modules)"
    done = lowtide_in(tmp_path, *words, script_in(tmp_path, text))
    assert done.stdout == "False\n", done.stderr


KEYWORDS = """
import sys, torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return self.inner(x) * scale

torch.manual_seed(0)
net = torch.compile(Scaled(), backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = net(x=torch.randn(4, 8), scale=2.0).sum() + net(torch.randn(4, 8), scale=3.0).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
"""A compiled model that is called by keywords, as language models are."""


@pytest.mark.long("run")
@pytest.mark.parametrize("words", [("run", "--budget", "1GiB"), ("record", "--quiet", "-o", "r.lowtide")], ids=lambda w: w[0])
def test_a_compiled_model_may_be_called_by_keywords(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Under ``record`` that used to be a TypeError in Lowtide, which ended the run."""
    script = script_in(tmp_path, KEYWORDS)
    plain = call(tmp_path, script, OMP_NUM_THREADS="1")
    done = lowtide_in(tmp_path, *words, script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
