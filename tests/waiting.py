"""How tests wait for what has to come: for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(found: Callable[[], T], what: str, timeout: float = 30.0, every: float = 0.02) -> T:
    """Look again and again until something true comes back; fails, with what did not come, after `timeout` s."""
    deadline = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < deadline, f"no {what} within {timeout:g} s"
        time.sleep(every)
    return value
