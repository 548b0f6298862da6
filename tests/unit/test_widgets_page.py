"""The page around the panels."""

from __future__ import annotations

import re

import pytest
from workbench_widgets.handlers import HEADERS
from workbench_widgets.page import COMPARE_BODY, JOB_BODY, LIST_BODY, argument, number, template, variables


@pytest.mark.parametrize("body", [JOB_BODY, COMPARE_BODY, LIST_BODY])
def test_it_names_no_other_host_and_no_absolute_address(body: str) -> None:
    html = template(body).replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
    assert not re.search(r"https?://|//[a-z]", html.replace("location.origin", ""))
    assert not re.search(r"""(src|href|fetch\()=?["']/""", html)
    assert not re.search(r"\b(PAGE|BODY|SCRIPT|TALLEST)\b", html)


def test_only_the_page_around_it_may_change_its_theme() -> None:
    assert "event.origin===location.origin&&event.source===parent" in template(JOB_BODY)


def test_a_theme_from_the_address_cannot_become_markup() -> None:
    assert variables('dark" onload="x', "…")["html_attrs"] == 'data-theme="light" data-auto="1"'
    assert variables("dark", "…")["html_attrs"] == 'data-theme="dark"'  # none in the address: the system's


def test_arguments_are_text_and_short() -> None:
    assert argument({"id": [b"a\xff", b"b"]}, "id") == "a�"
    assert argument({}, "id", "none") == "none" and argument(None, "id") == ""
    assert len(argument({"id": [b"x" * 10_000]}, "id")) == 300
    assert number({"rank": [b"12"], "step": ["²".encode()]}, "rank") == 12
    assert number({"step": ["²".encode()]}, "step") is None and number({"rank": [b"-1"]}, "rank") is None


def test_a_page_may_be_framed_by_its_own_origin_and_reach_nothing_else() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "frame-ancestors 'self'" in policy and "default-src 'self'" in policy and "connect-src 'self'" in policy
    assert "http" not in policy and "*" not in policy
