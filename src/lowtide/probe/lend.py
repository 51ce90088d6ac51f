"""Injects the probe into a Python process about to start, through its path; nothing is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SITE: Final = Path(__file__).resolve().parent / "site"


def lend(environment: dict[str, str]) -> None:
    """Put the probe's ``site`` folder first on ``PYTHONPATH`` in an environment."""
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [environment.get("PYTHONPATH")])])
