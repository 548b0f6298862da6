"""What a cell's value looks like, by MIME type: the rich representations that IPython asks for. Pure."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from typing import Any, Final

RICH: Final = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
LIMIT: Final = 2**20  # characters of one representation


def bundle(value: Any) -> dict[str, str]:
    """`text/plain` always; bytes as base64, JSON as text; a rich one over the limit is left out, the plain one cut."""
    found = {"text/plain": _plain(value)}
    if isinstance(value, type):  # its methods are for its instances
        return found
    with contextlib.suppress(Exception):
        made = value._repr_mimebundle_(include=None, exclude=None)
        found.update(_texts(made[0] if isinstance(made, tuple) else made))
    for method, mime in RICH.items():
        with contextlib.suppress(Exception):
            made = getattr(value, method)()
            found.update(_texts({mime: made[0] if isinstance(made, tuple) else made}))
    with contextlib.suppress(Exception):
        found.update(_texts({"image/png": _figure(value)}))
    return {mime: text for mime, text in found.items() if len(text) <= LIMIT}


def _plain(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}: {error}>"
    return text if len(text) <= LIMIT else f"{text[: LIMIT - 100]}… {len(text) - LIMIT + 100} characters left out"


def _texts(made: dict[Any, Any]) -> dict[str, str]:
    found = {}
    for mime, data in made.items():
        if not isinstance(mime, str):
            continue
        if isinstance(data, bytes):
            found[mime] = base64.b64encode(data).decode()
        elif isinstance(data, str):
            found[mime] = data
        elif data is not None:
            found[mime] = json.dumps(data)
    return found


def _figure(value: Any) -> bytes | None:
    """A matplotlib figure as PNG; such a one has no rich representation of its own."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, figures.Figure):
        return None
    buffer = io.BytesIO()
    value.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()
