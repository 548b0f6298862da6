"""What an exception that leaves a rank's program is told as, and which ones tell of a lost peer."""

from __future__ import annotations

import os
import signal

import pytest

from workbench.agent.excepthook import LONGEST, describe, is_peer_lost
from workbench.agent.words import doing, split_status
from workbench.blackbox import Activity, Snapshot

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234. "
    "This is a common symptom of a remote peer failing"
)
PEER_LOST = [
    RuntimeError(GLOO),
    RuntimeError("[...pair.cc:534] Read error [127.0.0.1]:5: Connection reset by peer"),
    RuntimeError("Gloo connectFullMesh failed with [...]: no error"),
    RuntimeError("NCCL error ... ncclRemoteError: A call failed possibly due to a network error"),
    type("DistBackendError", (RuntimeError,), {})("NCCL error in: ProcessGroupNCCL.cpp"),
    type("DistNetworkError", (RuntimeError,), {})("failed to recv, got 0 bytes"),
]
OWN = [
    ValueError("bad batch"),
    BrokenPipeError(32, "Broken pipe"),
    TimeoutError("timed out"),
    ConnectionRefusedError(111, "Connection refused"),
    RuntimeError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", PEER_LOST, ids=lambda error: str(error)[:30])
def test_a_lost_peer_is_known_by_its_words(error: Exception) -> None:
    assert is_peer_lost(error)


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_a_programs_own_error_is_its_own(error: Exception) -> None:
    assert not is_peer_lost(error)


def test_what_came_of_a_lost_peer_counts_and_what_merely_happened_beside_it_does_not() -> None:
    try:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError as cause:
            raise ValueError("training failed") from cause
    except ValueError as error:
        assert is_peer_lost(error)
    try:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError:
            raise ValueError("mine") from None
    except ValueError as error:
        assert not is_peer_lost(error)


def test_an_error_is_told_in_its_line_and_its_traceback() -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        told = describe(error)
    assert told["error"] == "KeyError: 'x'"
    assert told["traceback"].startswith("Traceback (most recent call last):\n")
    assert not told["is_collective"]


def test_a_syntax_error_is_told_without_its_source() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("if x = 2: pass", "train.py", "exec")
    assert describe(caught.value)["error"].startswith("SyntaxError: invalid syntax")


def test_a_huge_traceback_is_cut() -> None:
    told = describe(ValueError("x" * 1_000_000))
    assert len(told["traceback"]) < LONGEST + 100
    assert len(told["error"]) <= 2000


@pytest.mark.parametrize(
    ("status", "expected"),
    [(None, (None, None)), (3 << 8, (3, None)), (0, (0, None)), (9, (None, 9)), (139, (None, 11))],
)
def test_a_wait_status_is_a_code_or_a_signal(status: int | None, expected: tuple[int | None, int | None]) -> None:
    assert split_status(status) == expected
    assert status is None or os.WIFSIGNALED(status) == (expected[1] is not None)
    assert signal.SIGSEGV == 11


def test_every_activity_has_words() -> None:
    for activity in Activity:
        box = Snapshot(1, 1, activity, 0.0, "all_reduce[8 float32]", 1, None)
        assert doing(box) == ("in all_reduce[8 float32]" if activity is Activity.COLLECTIVE else doing(box))


def test_a_reset_connection_of_the_programs_own_is_no_lost_peer() -> None:
    """As in a rank whose DataLoader worker was killed: the queue to it is reset, then torch tells of the worker."""
    try:
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except OSError as reset:
            assert not is_peer_lost(reset)
            raise RuntimeError("DataLoader worker (pid 41) is killed by signal: Killed. ")  # noqa: B904
    except RuntimeError as error:
        assert not is_peer_lost(error)
    try:
        try:
            raise RuntimeError(GLOO)
        except RuntimeError:
            raise RuntimeError("DataLoader worker (pid(s) 41) exited unexpectedly")  # noqa: B904
    except RuntimeError as error:
        assert not is_peer_lost(error)
