"""Predicted peaks against real ones, at eight times the largest size that was recorded.

Each model is recorded at three batch sizes (four lengths or sides), its peak predicted, and then run for real.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from lowtide.base.errors import RecordingError
from lowtide.recording.reader import read
from lowtide.studies.size.predict import Model
from lowtide.studies.size.trial import Target, TrialRequest, record, run
from lowtide.studies.size.vary import ScriptSetting

MODELS = (
    "mlp",
    "cnn",
    "unet",
    "lstm",
    "gru",
    "encoder",
    "bag",
    "autoencoder",
    "mixer",
    "conv1d",
    "gpt2",
    "gpt2_eager",
    "bert",
    "llama",
    "t5",
    "vit",
    "resnet",
    "convnext",
    "mobilenet",
)
SIZES = {
    "batch": (MODELS, (2, 3, 4), 32, ()),
    "length": (("encoder", "gpt2", "gpt2_eager", "bert", "llama"), (8, 16, 24, 32), 256, ("--batch", "4")),
    "side": (("cnn", "unet", "autoencoder", "resnet"), (32, 48, 64, 80), 256, ("--batch", "4")),
}
SCRIPT = str(Path(__file__).parent / "sizes" / "models.py")


def main() -> None:
    """Predict, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    target = Target(script=SCRIPT, module=False, seconds=600)
    rows: list[dict[str, Any]] = []
    for axis, (models, small, large, more) in SIZES.items():
        for name in models:
            row: dict[str, Any] = {"axis": axis, "model": name, "recorded": list(small), "size": large}
            try:
                row |= _one(target, axis, name, small, large, more)
            except RecordingError as error:
                row["failed"] = str(error)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps({"summary": _summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(_summary(rows), indent=1))


def _one(target: Target, axis: str, name: str, small: tuple[int, ...], large: int, more: tuple[str, ...]) -> dict[str, Any]:
    def setting(size: int) -> ScriptSetting:
        return ScriptSetting(arguments=(name, *more, f"--{axis}", str(size)), sizes={axis: float(size)})

    with tempfile.TemporaryDirectory() as folder:
        found = []
        for size in small:
            file = Path(folder, f"{size}.lowtide")
            record(target, setting(size), 3, file)
            found.append((setting(size).sizes, read(file)))
        model = Model(found)
        guess = model.at({axis: large})
    real = run(target, setting(large), TrialRequest(steps=3))
    straight = _straight([(s[axis], max(x.peak_bytes for x in r.steps)) for s, r in found], large)
    return {
        "predicted_bytes": guess.peak_bytes,
        "at_most_bytes": guess.at_most_bytes,
        "real_bytes": real.peak_bytes,
        "error": guess.peak_bytes / real.peak_bytes - 1,
        "never_short": guess.at_most_bytes >= real.peak_bytes,
        "straight_line_error": straight / real.peak_bytes - 1,
        "predicted_seconds": guess.step_seconds,
        "real_seconds": real.step_seconds,
        "degree": model.degrees[0],
        "aligned": model.aligned,
        "checked": model.checked,
        "left_out": model.left_out,
    }


def _straight(points: list[tuple[float, int]], at: float) -> float:
    """The line through the two largest recorded peaks."""
    (a, x), (b, y) = sorted(points)[-2:]
    return y + (y - x) / (b - a) * (at - b)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [r for r in rows if "error" in r]
    errors = sorted(abs(r["error"]) for r in ran)
    return {
        "models": len(rows),
        "within_1_percent": sum(e <= 0.01 for e in errors),
        "worst_error": errors[-1] if errors else None,
        "median_error": errors[len(errors) // 2] if errors else None,
        "never_short": sum(r["never_short"] for r in ran),
        "straight_line_within_1_percent": sum(abs(r["straight_line_error"]) <= 0.01 for r in ran),
    }


if __name__ == "__main__":
    main()
