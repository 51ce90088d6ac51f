"""An ablation names the part or the layer that grows, and accuses none where nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.studies.leak.ablate import ablate
from lowtide.base.processes import python
from lowtide.studies.leak.watch import Watch

PLANTED = Path(__file__).parents[2] / "benchmarks" / "leaks" / "planted.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("leak", "culprit"), [
    ("none", ""), ("loop", "loop"), ("optimizer", "optimizer"), ("module:1.3", "1.3"), ("module:2", "2"), ("forward", "forward"),
])
def test_the_component_that_leaks_is_the_culprit(leak, culprit):
    """Without a leak no component is accused."""
    found = ablate(python(str(PLANTED), module=False, arguments=(leak, "5")), Watch(steps=150), tolerance=1024, repeats=1)
    assert found.culprit == culprit, found.text
    assert found.contrasts
    accused = {c.component for c in found.contrasts if c.low > 1024}
    assert culprit.partition(":")[0].partition(".")[0] in accused if culprit else not accused
