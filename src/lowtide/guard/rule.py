"""The rule that says when a guarded process stops and is restarted."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from lowtide.base.errors import UsageError


class RecycleWhen(enum.Enum):
    """The event after which the process stops."""

    NEVER = "never"
    EPOCH = "epoch"
    WATERMARK = "watermark"
    EVERY = "every"
    EXIT = "exit"


WATERMARK: Final = 0.9
"""Share of the cap at which a stop is requested."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When to recycle.

    Attributes:
        kind: the event after which the process stops.
        every: number of safe points between stops, for `RecycleWhen.EVERY`.
        watermark: share of the cap at which a stop is requested, for every kind but `RecycleWhen.NEVER`.
    """

    kind: RecycleWhen = RecycleWhen.WATERMARK
    every: int = 0
    watermark: float = WATERMARK

    @property
    def text(self) -> str:
        """The rule as the process gets it in its environment."""
        return f"every={self.every}" if self.kind is RecycleWhen.EVERY else self.kind.value


def parse(text: str) -> Rule:
    """Parse a rule of the command line: ``epoch``, ``watermark``, ``watermark=80%``, ``every=500``, ``exit``, ``never``.

    Raises:
        UsageError: if the text is none of these.
    """
    name, _, value = text.strip().lower().partition("=")
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)%", value)
    if name in {"epoch", "exit", "never", "watermark"} and not value:
        return Rule(RecycleWhen(name))
    if name == "watermark" and percent and 0 < float(percent[1]) < 100:
        return Rule(RecycleWhen.WATERMARK, watermark=float(percent[1]) / 100)
    if name == "every" and value.isdigit() and int(value) > 0:
        return Rule(RecycleWhen.EVERY, every=int(value))
    raise UsageError(f"--recycle {text!r} is not one of epoch, watermark, watermark=80%, every=N, exit, never")
