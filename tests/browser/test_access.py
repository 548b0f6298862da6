"""Who gets at the live pages: through Jupyter's login, from Jupyter's own origin, and nobody else."""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from urllib.parse import urlsplit

import pytest
from lab import Lab, wait_for
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from workbench.session import Session


def status_of(lab: Lab, path: str, **headers: str) -> tuple[int, str]:
    """A request that follows no redirect: status and where it is sent."""
    parts = urlsplit(lab.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request("GET", f"{parts.path}{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Location", "")
    finally:
        connection.close()


def open_websocket(lab: Lab, **headers: str) -> None:
    async def attempt() -> None:
        url = f"{lab.url}dtrain/job/ws".replace("http", "ws", 1)
        connection = await websocket_connect(HTTPRequest(url, headers=headers), subprotocols=["bokeh", "x"])
        connection.close()

    asyncio.run(asyncio.wait_for(attempt(), 10))


@pytest.mark.parametrize("path", ["dtrain/", "dtrain/job?id=x", "dtrain/healthz", "dtrain/static/js/bokeh.min.js"])
def test_without_login_there_is_only_the_login(lab: Lab, session: Session, path: str) -> None:
    status, where = status_of(lab, path)
    assert status == 302 and "/login" in where


def test_with_login_it_answers(lab: Lab, session: Session) -> None:
    login = {"Authorization": f"token {lab.token}"}
    wait_for(lambda: status_of(lab, "dtrain/healthz", **login)[0] == 200, "the live pages are served")


def test_a_websocket_without_login_is_refused(lab: Lab, session: Session) -> None:
    with pytest.raises(HTTPClientError) as refused:
        open_websocket(lab, Origin=lab.url.rstrip("/"))
    assert refused.value.code == 403


def test_a_websocket_from_another_site_is_refused_although_logged_in(lab: Lab, session: Session) -> None:
    cookies = _log_in(lab)
    with pytest.raises(HTTPClientError) as refused:
        open_websocket(lab, Origin="http://evil.example", Cookie=cookies)
    assert refused.value.code == 403
    open_websocket(lab, Origin=f"http://{urlsplit(lab.url).netloc}", Cookie=cookies)  # the test can fail


def _log_in(lab: Lab) -> str:
    """A browser's cookies after it has come with the token once."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    opener.open(f"{lab.url}lab?token={lab.token}", timeout=20).close()
    (jar,) = [h.cookiejar for h in opener.handlers if isinstance(h, urllib.request.HTTPCookieProcessor)]
    return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
