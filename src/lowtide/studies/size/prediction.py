"""What a step is predicted to take at other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lowtide.base.errors import UsageError
from lowtide.recording.reader import Recording
from lowtide.studies.size.vary import option_of

HOPELESS: Final = 1.0
"""A doubt from which on nothing is said to fit."""


Sizes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step at a size that was not run.

    Attributes:
        sizes: what was asked.
        cold_peak_bytes: of the first step.
        peak_bytes: of all.
        doubt: share of these that they may be off.
        step_seconds: of a warm step, roughly.
        far: whether the sizes lie so far beyond the recorded ones that its time is little more than a guess.
        op: where the peak is: operator and module.
        checked: whether recordings were left over to check the degree with.
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
        """The peak with its doubt."""
        return int(self.peak_bytes * (1 + self.doubt))

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether the step fits; None where that is within the doubt."""
        if self.doubt >= HOPELESS:
            return None
        if self.at_most_bytes <= memory_bytes:
            return True
        return None if self.peak_bytes * (1 - self.doubt) <= memory_bytes else False


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What ``lowtide batch --predict`` says of sizes that were not run.

    Attributes:
        degrees: by the name of each size, the degree in which the peak grows with it.
        aligned: whether recordings run the same operators, so that every instant was fitted.
        checked: whether a recording was left to check the degrees with.
        left_out: recordings that run other operators than the largest does.
        points: one for each size that was asked.
        memory_bytes: what there is; 0 where that was not said.
        steps: so many first steps are predicted.
    """

    degrees: Mapping[str, int]
    aligned: bool
    checked: bool
    left_out: int
    points: tuple[Prediction, ...]
    memory_bytes: int
    steps: int


def sizes_of(recording: Recording, names: Sequence[str]) -> dict[str, float]:
    """What was varied, in one recording: as it says itself, or by the script's arguments.

    Raises:
        UsageError: if it does not say.
    """
    told: dict[str, Any] = recording.meta.get("sizes") or {}
    arguments = recording.meta.get("arguments") or []
    found = {}
    for name in names:
        value = told.get(name, option_of(arguments, name))
        if value is None:
            known = f" (it says: {', '.join(sorted(told))})" if told else ""
            raise UsageError(
                f"a recording does not say what {name} was{known}: make recordings by "
                f"`lowtide batch --predict --vary {name}=...`"
            )
        found[name] = float(value)
    return found
