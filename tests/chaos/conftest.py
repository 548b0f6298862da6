"""A pool that faults may harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.session import Session, stop_pool


@pytest.fixture
def session(dtrain_home: Path) -> Iterator[Session]:
    """A pool of 2 slots in a home of its own."""
    session = Session(slots=2, timeout=60)
    yield session
    session.close()
    stop_pool()
