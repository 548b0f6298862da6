"""The Python stacks of running ranks, from outside, by py-spy: also where one hangs, holds the GIL or is stopped."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from workbench.agent.usage import is_stopped

AT_ONCE: Final = 8  # py-spy takes some 50 ms of a core for each
NONE: Final = "no stack: "  # how a reason begins
LINE: Final = "workbench/training/control.py:"
OURS: Final = tuple(f"workbench/agent/{name}.py:" for name in ("bootstrap", "tasks", "zygote", "rank", "programs"))


def dump_stacks(pids: Mapping[int, int], timeout: float) -> dict[int, str]:
    """Text by rank, within `timeout` s; for a rank that cannot be read, the reason."""
    spy = find_spy()
    if spy is None:
        return dict.fromkeys(pids, f"{NONE}py-spy is not installed where this worker runs (pip install py-spy)")
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(pids, pool.map(lambda pid: dump_stack(spy, pid, deadline), pids.values()), strict=True))


def find_spy() -> str | None:
    """py-spy's binary: beside this interpreter, else on the PATH."""
    own = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(own) if own.exists() else shutil.which("py-spy")


def dump_stack(spy: str, pid: int, deadline: float, options: tuple[str, ...] = ()) -> str:
    """One process' stack. py-spy stops the process while it looks, which one that is stopped already cannot be."""
    stopped = is_stopped(pid)
    left = deadline - time.monotonic()
    if left <= 0:
        return f"{NONE}no time was left for it"
    command = [spy, "dump", "--pid", str(pid), *options, *(["--nonblocking"] if stopped else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return f"{NONE}py-spy took more than {left:.1f} s"
    except OSError as error:
        return f"{NONE}{spy} cannot be started: {error.strerror}"
    if done.returncode:
        return f"{NONE}{_reason(done.stderr)}"
    return ("stopped by a signal (SIGSTOP)\n" if stopped else "") + tidy(done.stdout)


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = "; ".join(lines[:3]) or "py-spy failed and did not say why"
    if "permission" in text.lower() or "not permitted" in text.lower():
        return f"{text} (the container or system forbids ptrace)"
    return text


def tidy(text: str) -> str:
    """py-spy's text without its header, the rank's line to us, and our own frames below the program's."""
    _, *threads = re.split(r"^(?=Thread )", text, flags=re.MULTILINE)
    shown = [thread for thread in threads if LINE not in thread] or [text]
    lines = (line for thread in shown for line in thread.splitlines())
    return "\n".join(line for line in lines if not any(own in line for own in OURS))
