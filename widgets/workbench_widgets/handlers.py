"""What the server answers besides the two pages, and what it sends with everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from tornado.web import OutputTransform, RequestHandler

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob:; frame-ancestors 'self'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class SafeHeaders(OutputTransform):
    def transform_first_chunk(self, status: int, headers: Any, chunk: bytes, finishing: bool) -> Any:
        for name, value in HEADERS.items():
            headers[name] = value
        return status, headers, chunk


class Health(RequestHandler):
    """`/healthz`; with `?file=KEY` only where that saved session is open."""

    def initialize(self, health: Callable[[], dict[str, object]], knows: Callable[[str], bool]) -> None:
        self._health, self._knows = health, knows

    def get(self) -> None:
        self.set_header("Cache-Control", "no-store")
        file = self.get_query_argument("file", "")
        if file and not self._knows(file):
            self.set_status(404)
        self.write(self._health())


class Link(RequestHandler):
    """`/job/ID?rank=2`, as people write it; relative, so that any prefix will do."""

    def get(self, job_id: str) -> None:
        query = [f"id={quote(job_id, safe='')}", *filter(None, [self.request.query])]
        self.redirect(f"../job?{'&'.join(query)}")
