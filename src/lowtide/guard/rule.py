"""After what a guarded process stops and is started again."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from lowtide.base.errors import UsageError


class RecycleWhen(enum.Enum):
    """What the process stops after."""

    NEVER = "never"
    EPOCH = "epoch"
    WATERMARK = "watermark"
    EVERY = "every"
    EXIT = "exit"


WATERMARK: Final = 0.9
"""Share of the cap from which on a stop is asked for."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When to recycle.

    Attributes:
        kind: after what.
        every: safe points, where it is `RecycleWhen.EVERY`.
        watermark: share of the cap at which a stop is asked for, whatever the kind is.
    """

    kind: RecycleWhen = RecycleWhen.WATERMARK
    every: int = 0
    watermark: float = WATERMARK

    @property
    def text(self) -> str:
        """As the process is told."""
        return f"every={self.every}" if self.kind is RecycleWhen.EVERY else self.kind.value


def parse(text: str) -> Rule:
    """A rule as written on the command line: ``epoch``, ``watermark``, ``watermark=80%``, ``every=500``, ``exit``, ``never``.

    Raises:
        UsageError: if it is none of these.
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
