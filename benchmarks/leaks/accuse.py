"""How often an ablation accuses rightly: ``python accuse.py --seeds 1 --json FILE`` on ``planted.py``, one leak each,
and none.

One line per run goes into ``FILE.lines`` as it comes; a run that is there is not done again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import time
from pathlib import Path
from typing import Any

from lowtide.base.processes import python
from lowtide.studies.leak.ablate import Failed, ablate
from lowtide.studies.leak.watch import Watch

HERE = Path(__file__).parent
PARTS = ("loop", "forward", "backward", "optimizer", "checkpointing", "logging")
MODULES = ("module:0.1", "module:1.3", "module:2.1", "module:3.3", "module:1", "module:3")
CLEAN = 120
"""Clean runs: three wrong accusations in a hundred would show in all but 3 % of such rows."""


def once(leak: str, seed: int) -> dict[str, Any]:
    """One ablation."""
    began = time.perf_counter()
    command = python(str(HERE / "planted.py"), module=False, arguments=(leak, str(seed)))
    try:
        found = ablate(command, Watch(steps=150), tolerance=1024, repeats=1)
        culprit, text = found.culprit, found.text
    except Failed as error:
        culprit, text = "failed", str(error)
    expected = "" if leak == "none" else leak.removeprefix("module:")
    return {
        "leak": leak,
        "seed": seed,
        "culprit": culprit,
        "right": culprit == expected,
        "text": text,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--clean", type=int, default=CLEAN)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    journal = args.json.with_suffix(".lines")
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    done = {(x["leak"], x["seed"]) for x in lines}
    todo = [(leak, seed) for seed in range(args.seeds) for leak in (*PARTS, *MODULES)]
    todo += [("none", 1000 + k) for k in range(args.clean)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(once, *x) for x in todo if x not in done]):
            lines.append(future.result())
            with journal.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    planted = [x for x in lines if x["leak"] != "none"]
    clean = [x for x in lines if x["leak"] == "none"]
    table = {
        "planted": len(planted),
        "right": sum(x["right"] for x in planted),
        "clean": len(clean),
        "accused": sum(x["culprit"] != "" for x in clean),
        "runs": lines,
    }
    args.json.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps({k: v for k, v in table.items() if k != "runs"}))


if __name__ == "__main__":
    main()
