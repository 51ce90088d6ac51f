"""Where this package lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent.parent
"""The folder of ``lowtide``."""
