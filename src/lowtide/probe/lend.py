"""How the probe is lent to a Python that starts: its folder in front of the path, nothing installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SITE: Final = Path(__file__).resolve().parent / "site"


def lend(environment: dict[str, str]) -> None:
    """Put the probe's folder first on the path of the environment's Pythons."""
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [environment.get("PYTHONPATH")])])
