"""Law: an ablation accuses the module whose own code grows, not a module around it, nor one within it whose output is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from lowtide.studies.leak.ablate import HOLDERS, ArmGrowth, Contrast, Failed, _layers, _measured
from lowtide.studies.leak.watch import Module, Run
from lowtide.probe.counters import ABSENT, COLUMNS

RATE = 16_384.0
RESNET = [
    Module("", "Net", True),
    Module("0", "Sequential", True),
    *(m for k in range(3) for m in (
        Module(f"0.{k}", "Block", True), Module(f"0.{k}.conv", "Conv2d"), Module(f"0.{k}.down", "Sequential", True),
        Module(f"0.{k}.down.0", "Conv2d"), Module(f"0.{k}.down.1", "BatchNorm2d"),
    )),
    Module("1", "Linear"),
]


class Bench:
    """Arms of a model that grows as a function says, known but for an error."""

    def __init__(
        self, grows: Callable[[set[str], set[str]], float], modules: Sequence[Module] = RESNET, error: float = 16.0
    ) -> None:
        self.modules, self.tolerance, self._grows, self._error = modules, 1024.0, grows, error

    def arm(self, name: str, *, stub: Sequence[str] = (), twice: Sequence[str] = (), repeats: int = 0) -> ArmGrowth:
        """An arm in which `stub` and what it contains are switched off, and the layers of the types `twice` run twice."""
        off = {m.path for m in self.modules for s in stub if m.path == s or m.path.startswith(f"{s}.")}
        running = {m.path for m in self.modules} - off
        return ArmGrowth(name=name, rate=self._grows(running, set(twice)), error=self._error, curve=np.zeros(2))


def _accused(
    grows: Callable[[set[str], set[str]], float], modules: Sequence[Module] = RESNET, error: float = 16.0
) -> tuple[str, str]:
    bench = Bench(grows, modules, error)
    whole = bench.arm("all")
    worst = Contrast(component="forward", kind="part", change=whole.rate, low=whole.rate - 50, high=whole.rate + 50)
    return _layers(bench, whole, ["Conv2d", "BatchNorm2d", "Linear"], worst, 20, [])[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["0", "0.1", "0.1.down"])
def test_a_growing_container_is_accused_not_its_parents_or_children(path: str) -> None:
    """A container whose own code grows is accused, not the modules around it or within it."""
    culprit, text = _accused(lambda running, _: RATE * (path in running))
    assert culprit == path
    assert "16.0 KiB a step" in text


def test_a_layer_that_leaks_is_accused() -> None:
    """A layer that leaks more when its type runs twice is accused."""
    assert _accused(lambda running, twice: RATE * ("0.2.down.1" in running) * (1 + ("BatchNorm2d" in twice)))[0] == "0.2.down.1"


def test_a_layer_whose_output_another_module_keeps_is_not_accused() -> None:
    """A stubbed layer returns the same output each time, so keeping it costs nothing; run twice, it still has one output that
    is kept. The container that keeps it is accused instead.
    """
    assert _accused(lambda running, _: RATE * ({"0.1", "0.1.conv"} <= running))[0] == "0.1"


def test_growth_of_the_root_forward_is_not_blamed_on_a_layer() -> None:
    """Growth that continues with every layer switched off belongs to the root module's own `forward`."""
    culprit, text = _accused(lambda _, __: RATE)
    assert culprit == "forward"
    assert "the forward of Net itself" in text


def test_noise_does_not_acquit_a_module() -> None:
    """Where the error is too large to tell, the answer says that it is open and does not blame the root module itself."""
    culprit, text = _accused(lambda _, __: RATE, error=RATE / 2)
    assert culprit == "forward"
    assert "is open" in text
    assert "itself" not in text


def test_a_module_not_examined_is_not_acquitted() -> None:
    """With more containers than are tested (`HOLDERS`), the answer says that not all were tested."""
    many = [Module("", "Net", True), *(Module(f"{k}", f"Block{k}", True) for k in range(HOLDERS + 1))]
    culprit, text = _accused(lambda running, _: RATE * ("16" in running), many)
    assert culprit == "forward"
    assert "not all were tested" in text


def seen(steps: int, **rates: float) -> Run:
    """A run whose counters grow by the given number of bytes per step."""
    rows = np.full((steps, len(COLUMNS)), ABSENT, dtype=np.int64)
    for name, rate in {"heap_bytes": 0.0, "peak_bytes": 0.0, "python_bytes": 0.0, **rates}.items():
        rows[:, COLUMNS.index(name)] = 1_000_000 + rate * np.arange(steps)
    return Run(rows=rows, kind=None, audits=(), census=(), code=0, ended="enough", seconds=1.0)


@pytest.mark.parametrize("steps", [3, 20])
def test_an_arm_that_ends_early_fails_instead_of_showing_no_growth(steps: int) -> None:
    """An arm with too few steps raises `Failed` with its name and its number of steps."""
    with pytest.raises(Failed, match=f"'no Linear' ended after {steps} steps"):
        _measured("no Linear", [seen(300), seen(steps)], 1024.0, "held", 0)


def test_an_arm_is_measured_by_the_counter_that_grows() -> None:
    """Each arm's rate is that of the counter under suspicion; an arm without that counter has rate 0."""
    run = seen(300, cuda_allocated_bytes=RATE)
    assert _measured("forward", [run], 1024.0, "cuda_allocated", 0).rate == pytest.approx(RATE)
    assert _measured("forward", [run], 1024.0, "held", 0).rate == pytest.approx(0)
    assert _measured("loop", [seen(300)], 1024.0, "cuda_allocated", 0).rate == 0
