"""Law: the wheel that users get contains all that is needed, the heap counter included, and works without the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from command import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: str, cwd: Path, **extra: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PYTHONPATH")}
    done = subprocess.run(command, cwd=cwd, env={**environment, **extra}, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_built_wheel_runs_in_a_clean_environment(tmp_path: Path) -> None:
    """The environment sees the dependencies of this one, but not this package's sources."""
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    wheel = next(tmp_path.glob("lowtide-*.whl"))
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    site = next((home / "lib").glob("python*/site-packages"))
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "dependencies.pth").write_text(here + "\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, lowtide\n"
        "model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)])\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(2048, 64)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "print(lowtide.__file__)\n"
    )
    lowtide = str(home / "bin" / "lowtide")
    where = _run(lowtide, "run", "--budget", "60%", "--json", "figures.json", str(script), cwd=tmp_path)
    assert where.strip().startswith(str(home))
    found = _run(python, "-c", "import json; print(json.load(open('figures.json'))['steps'][-1]['policy'])", cwd=tmp_path)
    assert found.strip() == "planned"
    _run(lowtide, "record", "--quiet", "-o", "a.lowtide", str(script), cwd=tmp_path)
    _run(lowtide, "report", "a.lowtide", "--html", "a.html", cwd=tmp_path)
    assert "uPlot" in (tmp_path / "a.html").read_text()
    _run(lowtide, "leak", "--quiet", "--processes", "1", "--json", "leak.json", str(script), cwd=tmp_path)
    seen = _run(python, "-c", "import json; f = json.load(open('leak.json')); print(f['steps'], f['steps_marked_by'])", cwd=tmp_path)
    assert seen.strip() == "4 optimizer"
