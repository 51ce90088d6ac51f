"""The folder in which this package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent.parent
"""The folder of ``lowtide``."""
