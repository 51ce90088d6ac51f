"""Predictions of a step's peak and time at sizes that were not run, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lowtide.base.errors import UsageError
from lowtide.recording.reader import Recording
from lowtide.studies.size.vary import option_of

HOPELESS: Final = 1.0
"""Relative doubt from which on no step is said to fit, or not to fit."""


Sizes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for a step at sizes that were not run.

    Attributes:
        sizes: the sizes.
        cold_peak_bytes: peak of the first step.
        peak_bytes: peak of all steps.
        doubt: relative error that these peaks may have.
        step_seconds: seconds of a warm step, roughly.
        far: whether the sizes lie so far beyond the recorded ones that the time is little more than a guess.
        op: operator and module at the peak; empty if unknown.
        checked: whether recordings were left to check the degrees with.
    """

    sizes: Sizes
    cold_peak_bytes: int
    peak_bytes: int
    doubt: float
    step_seconds: float
    far: bool
    op: str
    checked: bool

    @property
    def at_most_bytes(self) -> int:
        """Upper end of the peak's range of doubt."""
        return int(self.peak_bytes * (1 + self.doubt))

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether the step fits into this memory; None if that is within the doubt."""
        if self.doubt >= HOPELESS:
            return None
        if self.at_most_bytes <= memory_bytes:
            return True
        return None if self.peak_bytes * (1 - self.doubt) <= memory_bytes else False


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The predictions of ``lowtide batch --predict`` and ``lowtide predict`` for sizes that were not run.

    Attributes:
        degrees: for each size, by name, the degree with which the peak grows with it.
        aligned: whether recordings run the same operators, so that every instant was fitted.
        checked: whether a recording was left to check the degrees with.
        left_out: number of recordings that run other operators than the largest one.
        points: one prediction for each combination of sizes.
        memory_bytes: the memory available; 0 if it was not given.
        steps: number of first steps that are predicted.
    """

    degrees: Mapping[str, int]
    aligned: bool
    checked: bool
    left_out: int
    points: tuple[Prediction, ...]
    memory_bytes: int
    steps: int


def sizes_of(recording: Recording, names: Sequence[str]) -> dict[str, float]:
    """The sizes of one recording, as it states them or as the script's arguments show.

    Raises:
        UsageError: if neither gives one of the sizes.
    """
    told: dict[str, Any] = recording.meta.get("sizes") or {}
    arguments = recording.meta.get("arguments") or []
    found = {}
    for name in names:
        value = told.get(name, option_of(arguments, name))
        if value is None:
            known = f" (it has: {', '.join(sorted(told))})" if told else ""
            raise UsageError(
                f"a recording has no value for {name}{known}: record with "
                f"`lowtide batch --predict --vary {name}=...`"
            )
        found[name] = float(value)
    return found
