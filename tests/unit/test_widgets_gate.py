"""Which requests a port lets through to the pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from workbench_widgets.gate import Answer, Asked, Keys, Passed, Ticket, decide
from workbench_widgets.tab import Tab

KEYS = Keys("act-token", "look-token")
PORT = 4321
HOST = "127.0.0.1:4321"


def ask(target: str, **other: Any) -> Passed | Answer:
    return decide(Asked(target, **{"host": HOST, **other}), KEYS, PORT)


def enter(target: str) -> str:
    """The cookie that a link is answered with."""
    found = ask(target)
    assert isinstance(found, Answer) and found.status == 303
    return found.headers["Set-Cookie"].partition(";")[0]


def test_a_link_becomes_a_cookie_and_leaves_the_address() -> None:
    found = ask("/job/a%20b?rank=2&token=act-token&step=410")
    assert isinstance(found, Answer) and found.status == 303
    assert found.headers["Location"] == "/job/a%20b?rank=2&step=410"
    kept = found.headers["Set-Cookie"]
    assert "HttpOnly" in kept and "SameSite=Lax" in kept and "token" not in kept.partition(";")[0]
    passed = ask("/job/a%20b?rank=2&step=410", cookies=f"other=1; {kept.partition(';')[0]}")
    assert passed == Passed("/job/a%20b?rank=2&step=410", may_act=True)


@pytest.mark.parametrize(
    "target",
    [
        "/", "/job?id=x", "/?token=", "/?token=look-token", "/?token=ACT-TOKEN", "/healthz", "/job/ws", "/look",
        "/look/?token=act-token", "/static/js/bokeh.min.js", "/lookout?token=look-token", "/?token=x&token=act-token",
    ],
)  # fmt: skip
def test_without_its_token_nothing_is_shown(target: str) -> None:
    found = ask(target)
    assert isinstance(found, Answer) and found.status == 403
    assert "token" not in found.text and not found.headers


@pytest.mark.parametrize("cookies", ["dtrain-act-4321=", "dtrain-act-4321=act-token", "dtrain-act-1=x", ";;=", "\x00"])
def test_a_cookie_that_is_not_ours_opens_nothing(cookies: str) -> None:
    assert isinstance(ask("/", cookies=cookies), Answer)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4321", "", "127.0.0.1.evil.example", "[::1", "10.0.0.1"]
)
def test_a_foreign_name_of_this_machine_gets_nothing(host: str) -> None:
    assert isinstance(ask("/?token=act-token", host=host), Answer)
    assert ask("/?token=act-token", host=host).status == 403  # type: ignore[union-attr]


@pytest.mark.parametrize("host", ["127.0.0.1:4321", "localhost:9999", "localhost"])
def test_tunnels_end_at_other_ports(host: str) -> None:
    cookie = enter("/?token=act-token")
    assert isinstance(ask("/job/ws", host=host, origin=f"http://{host}", cookies=cookie), Passed)


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1:4321", "null"])
def test_another_page_may_not_ask(origin: str) -> None:
    found = ask("/job/ws", origin=origin, cookies=enter("/?token=act-token"))
    assert isinstance(found, Answer) and found.status == 403


def test_a_link_to_look_at_opens_only_pages_that_show() -> None:
    look = enter("/look/?token=look-token")
    assert ask("/look/job/ws?x=1", cookies=look) == Passed("/job/ws?x=1", may_act=False)
    assert ask("/look/", cookies=look) == Passed("/", may_act=False)
    for target in ("/", "/job/ws", "/look/../job/ws", "/LOOK/job"):
        found = ask(target, cookies=look)
        assert isinstance(found, Answer) or not found.may_act
    assert isinstance(ask("/", cookies=look.replace("look", "act")), Answer)


@pytest.mark.parametrize("target", ["/gate", "/look/gate", "/gate?x=1", "/saved", "/look/saved"])
def test_tokens_are_not_given_through_a_port(target: str) -> None:
    cookies = f"{enter('/?token=act-token')}; {enter('/look/?token=look-token')}"
    found = ask(target, cookies=cookies)
    assert isinstance(found, Answer) and found.status == 404


def test_a_redirect_stays_here() -> None:
    found = ask("//evil.example/?token=act-token")
    assert isinstance(found, Answer)
    assert urlsplit(found.headers["Location"]).netloc == ""


def test_a_ticket_is_good_for_its_pages_and_is_told_to_be_used() -> None:
    ticket = Ticket("once", "look", 0.0)
    found = decide(Asked("/look/job/a?token=once", host=HOST), KEYS, PORT, [ticket])
    assert isinstance(found, Answer) and found.status == 303 and found.used == "once"
    assert decide(Asked("/?token=once", host=HOST), KEYS, PORT, [ticket]).status == 403  # type: ignore[union-attr]
    assert decide(Asked("/look/?token=once", host=HOST), KEYS, PORT).status == 403  # type: ignore[union-attr]


def test_links() -> None:
    tab = Tab(PORT, "a", "l", "t")
    assert tab.link() == "http://127.0.0.1:4321/?token=a"
    assert tab.link("a b", read_only=True) == "http://127.0.0.1:4321/look/job/a%20b?token=l"
    assert tab.link("x-1", once=True) == "http://127.0.0.1:4321/job/x-1?token=t"
