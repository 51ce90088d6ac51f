"""Renders HTML pages that need no network; all reports share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jinja2

from lowtide.base.units import format_bytes, format_seconds

_ASSETS: Final = Path(__file__).parent / "assets"


def render(kind: str, data: Any, **values: Any) -> str:
    """Render a page from its template and script (``assets/KIND.html.j2``, ``assets/KIND.js``).

    Args:
        kind: the kind of page.
        data: what the script draws; embedded in the page as JSON.
        values: the variables of the template.
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
