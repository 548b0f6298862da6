"""Who may reach the pages over TCP: a port of this machine's loopback, for a browser that has a link.

A link holds a random token. It is asked for once, given back as a cookie that no script can read, and taken out of the
address. There are two: one for everything, and one whose pages (all under `/look/`) show and never act. A ticket is a
token that is good once, and soon: a browser that is started with an address shows it to everybody in the list of
processes. Decisions are pure; what is refused reaches no page, no file and no websocket, and no token reaches a log.

The port listens on 127.0.0.1 alone. `Host` must name this machine, so that a foreign name which resolves to 127.0.0.1
(DNS rebinding) gets nothing; where a browser says which page asks (`Origin`), it must be one of this very address.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from tornado.httputil import (
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)

HOSTS: Final = ("127.0.0.1", "localhost")  # a tunnel may end at any port, so that it does not matter
LOOK: Final = "/look"  # what the addresses of pages that only show begin with
RIGHTS: Final = "Dtrain-Rights"  # the header by which a page hears that it may only look
HIDDEN: Final = ("/gate", "/saved")  # for this user's own processes, over the unix socket
BYTES: Final = 32  # of a token


class Keys(NamedTuple):
    """The tokens of the two links."""

    act: str
    look: str

    @classmethod
    def new(cls) -> Keys:
        return cls(secrets.token_urlsafe(BYTES), secrets.token_urlsafe(BYTES))


class Asked(NamedTuple):
    """What of a request matters here."""

    target: str  # path and query
    host: str = ""
    origin: str = ""
    cookies: str = ""


class Ticket(NamedTuple):
    """Good until `until`, for the pages that the link `name` of `Keys` opens."""

    token: str
    name: str
    until: float


class Passed(NamedTuple):
    """It goes on to the pages as `target`; `may_act` False: only to look."""

    target: str
    may_act: bool


class Answer(NamedTuple):
    """It goes no further."""

    status: int
    text: str = ""
    headers: Mapping[str, str] = {}
    used: str = ""  # the token of a ticket that is good no longer


def decide(asked: Asked, keys: Keys, port: int, tickets: Iterable[Ticket] = ()) -> Passed | Answer:
    """What becomes of a request that came to `port`; `tickets` are those that are good now."""
    if _host_name(asked.host) not in HOSTS:
        return Answer(403, "This server answers to 127.0.0.1 and localhost only.")
    if asked.origin and asked.origin != f"http://{asked.host}":
        return Answer(403, "Another page asked for this; it is not allowed to.")
    path, _, query = asked.target.partition("?")
    is_look = path == LOOK or path.startswith(f"{LOOK}/")
    right = "look" if is_look else "act"
    key, name = getattr(keys, right), f"dtrain-{right}-{port}"
    pairs = parse_qsl(query, keep_blank_values=True)
    given = [value for name, value in pairs if name == "token"]
    used = next((t.token for t in tickets if given and t.name == right and _same(given[0], t.token)), "")
    if given and (used or _same(given[0], key)):
        pairs = [pair for pair in pairs if pair[0] != "token"]
        return _entered(path, pairs, f"{name}={_cookie(key)}", is_look)._replace(used=used)
    if given or not _same(_cookies(asked.cookies).get(name, ""), _cookie(key)):
        return Answer(403, "This link is not valid (any more). For a new one: dtrain dashboard")
    target = path.removeprefix(LOOK) or "/" if is_look else path
    if target in HIDDEN:
        return Answer(404, "There is no such page.")
    return Passed(f"{target}?{query}" if query else target, may_act=not is_look)


def _entered(path: str, pairs: list[tuple[str, str]], cookie: str, is_look: bool) -> Answer:
    """On to the same address without the token, with a cookie in its place."""
    path = f"{path}/" if path == LOOK else path
    where = f"{path}?{urlencode(pairs)}" if pairs else path
    where = "/" + where.lstrip("/")  # "//host/" would be another host's
    kept = f"{cookie}; Path={f'{LOOK}/' if is_look else '/'}; HttpOnly; SameSite=Lax"
    return Answer(303, headers={"Location": where, "Set-Cookie": kept})


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _cookie(key: str) -> str:
    """What the cookie holds: it opens the pages, but no link can be made of it."""
    return hmac.new(key.encode(), b"cookie", hashlib.sha256).hexdigest()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


class Gate(HTTPServerConnectionDelegate):
    """Stands before the application `pages` and decides on every request by its head."""

    def __init__(self, pages: Any, keys: Keys, port: int, *, tickets: list[Ticket], headers: Mapping[str, str]) -> None:
        self._pages, self._keys, self._port = pages, keys, port
        self._tickets, self._headers = tickets, headers

    def start_request(self, server_conn: object, request_conn: Any) -> HTTPMessageDelegate:
        return _Request(self, server_conn, request_conn)

    def on_close(self, server_conn: object) -> None:
        self._pages.on_close(server_conn)

    def decide(self, target: str, headers: HTTPHeaders) -> Passed | Answer:
        hosts = headers.get_list("Host")
        if len(hosts) != 1:
            return Answer(400, "A request names one host.")
        origin, cookies = headers.get("Origin", ""), headers.get("Cookie", "")
        asked = Asked(target, hosts[0].lower(), origin.lower(), cookies)
        good = [ticket for ticket in self._tickets if ticket.until > time.monotonic()]
        decision = decide(asked, self._keys, self._port, good)
        used = decision.used if isinstance(decision, Answer) else ""
        self._tickets[:] = [ticket for ticket in good if ticket.token != used]
        return decision

    def go_on(self, server_conn: object, request_conn: Any) -> HTTPMessageDelegate:
        made: HTTPMessageDelegate = self._pages.start_request(server_conn, request_conn)
        return made

    def answer(self, request_conn: Any, answer: Answer) -> None:
        body = f"{answer.text}\n".encode() if answer.text else b""
        headers = HTTPHeaders({**self._headers, **answer.headers, "Cache-Control": "no-store"})
        headers["Content-Type"], headers["Content-Length"] = "text/plain; charset=utf-8", str(len(body))
        request_conn.write_headers(ResponseStartLine("HTTP/1.1", answer.status, ""), headers, body)
        request_conn.finish()


class _Request(HTTPMessageDelegate):
    def __init__(self, gate: Gate, server_conn: object, request_conn: Any) -> None:
        self._gate, self._server_conn, self._request_conn = gate, server_conn, request_conn
        self._inner: HTTPMessageDelegate | None = None
        self._answer: Answer | None = None

    def headers_received(self, start_line: Any, headers: HTTPHeaders) -> Any:
        assert isinstance(start_line, RequestStartLine)
        decision = self._gate.decide(start_line.path, headers)
        if isinstance(decision, Answer):
            self._answer = decision
            return None
        for name in ("Cookie", RIGHTS):
            headers.pop(name, None)
        headers[RIGHTS] = "act" if decision.may_act else "look"
        self._inner = self._gate.go_on(self._server_conn, self._request_conn)
        return self._inner.headers_received(start_line._replace(path=decision.target), headers)

    def data_received(self, chunk: bytes) -> Any:
        return self._inner.data_received(chunk) if self._inner is not None else None

    def finish(self) -> None:
        if self._inner is not None:
            self._inner.finish()
        elif self._answer is not None:
            self._gate.answer(self._request_conn, self._answer)

    def on_connection_close(self) -> None:
        if self._inner is not None:
            self._inner.on_connection_close()
