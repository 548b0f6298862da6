"""What an agent holds for the next generation of a job's ranks: counted descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from workbench.agent.snapshots import Kept
from workbench.agent.wire import MAX_FDS, Frame


class Rank:
    """A rank's process, as far as `Kept` knows it."""

    def __init__(self, rank: int = 0, job_id: str = "job") -> None:
        self.rank, self.job_id = rank, job_id
        self.told: list[dict[str, Any]] = []
        self.fds: list[int] = []

    def tell(self, header: dict[str, Any], payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        self.told.append(header)
        self.fds += fds


def memory(text: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def text(fd: int) -> str:
    return os.pread(fd, 100, 0).decode()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.close()


def say(kept: Kept, process: Rank, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
    kept.on_frame(process, Frame({"op": op, **fields}, fds=fds))  # type: ignore[arg-type]


def test_a_slot_is_held_until_the_job_has_ended(kept: Kept) -> None:
    fds = [memory("a"), memory("b"), memory("c")]
    say(kept, Rank(0), "keep", (fds[0],), slot=0)
    say(kept, Rank(1), "keep", (fds[1],), slot=0)
    say(kept, Rank(0, "other"), "keep", (fds[2],), slot=0)
    assert {name: text(fd) for name, fd in kept.of("job").items()} == {(0, 0): "a", (1, 0): "b"}
    kept.forget("job")
    assert [is_open(fd) for fd in fds] == [False, False, True]
    assert kept.of("job") == {}
    kept.forget("job")


def test_a_slot_that_is_sent_again_replaces_the_old_one(kept: Kept) -> None:
    old, new = memory("old"), memory("new")
    for fd in (old, new):
        say(kept, Rank(0), "keep", (fd,), slot=1)
    assert not is_open(old)
    assert {name: text(fd) for name, fd in kept.of("job").items()} == {(0, 1): "new"}


def test_ranks_that_are_no_more_are_dropped(kept: Kept) -> None:
    for rank in range(4):
        say(kept, Rank(rank), "keep", (memory("x"),), slot=0)
    say(kept, Rank(0), "drop", keep=[0, 2])
    assert sorted(kept.of("job")) == [(0, 0), (2, 0)]


def test_a_rank_gets_duplicates_over_as_many_frames_as_they_need(kept: Kept) -> None:
    count = MAX_FDS + 3
    for rank in range(count):
        say(kept, Rank(rank), "keep", (memory(str(rank)),), slot=0)
    asking = Rank(0)
    say(kept, asking, "kept")
    assert [len(header["slots"]) for header in asking.told] == [MAX_FDS, 3]
    assert [header["is_last"] for header in asking.told] == [False, True]
    names = [name for header in asking.told for name in header["slots"]]
    assert [text(fd) for fd in asking.fds] == [str(rank) for rank, _ in names] == list(map(str, range(count)))
    kept.forget("job")
    assert all(map(is_open, asking.fds))
    for fd in asking.fds:
        os.close(fd)


def test_who_has_nothing_here_is_told_so(kept: Kept) -> None:
    asking = Rank(0)
    say(kept, asking, "kept")
    assert asking.told == [{"op": "kept", "slots": [], "is_last": True}]


@pytest.mark.parametrize("op", ["keep", "nonsense"])
def test_descriptors_that_nobody_wants_are_closed(kept: Kept, op: str) -> None:
    fds = (memory("a"), memory("b"))
    say(kept, Rank(0), op, fds, slot=0)
    assert not any(map(is_open, fds))
