"""Run a script without Lowtide, with the heap counter looking on: ``python plain.py FIGURES.json SCRIPT [arguments]``.

Figures: peak of the tensors in bytes (null where no counter was built), and seconds between optimizer steps.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim import optimizer

from lowtide.runtime.device.heap_meter import counters


def main() -> None:
    """Run the script as ``__main__``."""
    figures, script, *arguments = sys.argv[1:]
    counter = counters()
    ticks = [time.perf_counter()]
    peaks: list[int] = []

    def tick(*_: Any) -> None:
        ticks.append(time.perf_counter())
        if counter is not None:
            peaks.append(counter.tensor_step_peak)
            counter.tensor_step_peak = counter.tensor_live

    optimizer.register_optimizer_step_post_hook(tick)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    if counter is not None:  # Keras steps without torch's optimizers
        peaks.append(counter.tensor_step_peak)
    seconds = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
    Path(figures).write_text(json.dumps({"peak_bytes": max(peaks, default=None), "seconds": seconds}))


if __name__ == "__main__":
    main()
