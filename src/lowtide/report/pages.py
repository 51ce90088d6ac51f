"""HTML pages that need no network: what all of them share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jinja2

from lowtide.base.units import format_bytes, format_seconds

_ASSETS: Final = Path(__file__).parent / "assets"


def render(kind: str, data: Any, **values: Any) -> str:
    """A page from its template and script (``assets/KIND.html.j2``, ``assets/KIND.js``).

    Args:
        kind: of page.
        data: what the script draws, as JSON in the page.
        values: what the template names.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_ASSETS), autoescape=True)
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    return environment.get_template(f"{kind}.html.j2").render(
        data=json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        style=(_ASSETS / "uPlot.min.css").read_text(),
        page_style=(_ASSETS / "page.css").read_text(),
        script=(_ASSETS / "uPlot.iife.min.js").read_text(),
        bytes_script=(_ASSETS / "bytes.js").read_text(),
        own_script=(_ASSETS / f"{kind}.js").read_text(),
        **values,
    )
