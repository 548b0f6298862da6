"""When a page draws."""

from __future__ import annotations

from collections.abc import Callable

from workbench_widgets.pacer import Pacer


class Desk:
    """A pacer with a clock that is set by hand."""

    def __init__(self) -> None:
        self.time, self.drawn = 100.0, 0
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self.pacer = Pacer(self._draw, lambda s, call: self.planned.append((self.time + s, call)), lambda: self.time)

    def _draw(self) -> None:
        self.drawn += 1

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        due = [call for at, call in self.planned if at <= self.time + 1e-9]
        self.planned = [(at, call) for at, call in self.planned if at > self.time + 1e-9]
        for call in due:
            call()


def test_nothing_is_drawn_before_the_browser_is_ready() -> None:
    desk = Desk()
    desk.pacer.want()
    desk.pass_time(5)
    assert desk.drawn == 0
    desk.pacer.shown()
    desk.pass_time(0)
    assert desk.drawn == 1


def test_many_changes_are_one_drawing_and_ten_a_second_at_most() -> None:
    desk = Desk()
    desk.pacer.shown()
    for _ in range(1000):  # 1 s in which everything changes all the time and the browser keeps up
        desk.pacer.want()
        desk.pass_time(0.001)
        desk.pacer.shown()
    assert 9 <= desk.drawn <= 11


def test_a_browser_that_does_not_answer_gets_no_more() -> None:
    desk = Desk()
    desk.pacer.shown()
    desk.pass_time(0)
    for _ in range(100):
        desk.pacer.want()
        desk.pass_time(1)
    assert desk.drawn == 1
    desk.pacer.shown()
    desk.pass_time(0)
    assert desk.drawn == 2  # the newest, at once


def test_without_a_change_nothing_is_planned() -> None:
    desk = Desk()
    desk.pacer.shown()
    desk.pass_time(0)
    desk.pacer.shown()
    assert desk.planned == []


def test_a_closed_page_draws_no_more() -> None:
    desk = Desk()
    desk.pacer.shown()
    desk.pacer.close()
    desk.pass_time(1)
    assert desk.drawn == 0
