"""What an exception that leaves a rank's program looks like: to users as `python` shows it, to the agent in words."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

OURS: Final = str(Path(__file__).parent) + os.sep
LONGEST: Final = 64 * 1024  # characters of a traceback that are sent; the log has all of it
LONGEST_ERROR: Final = 2000

# A collective that fails because a peer went away says so only in its text. (name of the exception's class, what its
# message holds); an empty class name matches any.
PEER_LOST: Final = (
    ("DistNetworkError", ""),
    ("DistStoreError", ""),
    ("", "Connection closed by peer"),
    ("", "Connection reset by peer"),
    ("", "gloo/transport"),
    ("", "connectFullMesh failed"),
    ("", "NCCL remote process exited"),
    ("", "ncclRemoteError"),
    ("", "remote process exited or there was a network error"),
    ("", "NCCL communicator was aborted"),
    ("", "Watchdog caught collective operation timeout"),
    ("DistBackendError", ""),
)
OWN_CAUSES: Final = ("DataLoader worker",)  # whatever came before
# These also come from a program's own sockets and files, so they count only inside torch.distributed.
PEER_LOST_IN_TORCH: Final = (
    "Broken pipe",
    "Connection refused",
    "Connection was likely closed",
    "Timed out",
    "timed out",
)


def own_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lie below the user's program."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace


def describe(error: BaseException) -> dict[str, Any]:
    """The exception for the agent: its line, its traceback, whether it tells of a lost peer."""
    text = "".join(traceback.format_exception(error))
    # A SyntaxError's place and source come before its line, and are indented.
    line = "".join(part for part in traceback.format_exception_only(error) if not part.startswith("  ")).strip()
    return {
        "error": line[:LONGEST_ERROR],
        "traceback": text if len(text) <= LONGEST else f"… {len(text) - LONGEST} characters …\n{text[-LONGEST:]}",
        "is_collective": is_peer_lost(error),
    }


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether the exception, or one that it came of, was raised by a collective because a peer went away."""
    while error is not None:
        name, message = type(error).__name__, str(error)
        if message.startswith(OWN_CAUSES):
            return False
        # The interpreter's own errors of sockets say the same of a program's, and of a worker process that is gone.
        is_collectives = not isinstance(error, OSError) or _is_in_torch(error.__traceback__)
        if is_collectives and any(name == kind or (not kind and part in message) for kind, part in PEER_LOST):
            return True
        if any(part in message for part in PEER_LOST_IN_TORCH) and _is_in_torch(error.__traceback__):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_in_torch(trace: TracebackType | None) -> bool:
    return any(f"torch{os.sep}distributed{os.sep}" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))


def show(error: BaseException) -> None:
    """Print the exception as the interpreter does: through `sys.excepthook`, which may be the user's."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def silence() -> None:
    """The exception has been shown: the interpreter is to end with it, but not to print it again."""
    sys.excepthook = lambda kind, error, trace: None
