"""What the kernel says of processes that it ended for want of memory, by memory cgroup; and making one.

Both kinds of cgroup: v2 (`memory.events`, one tree) and v1 (`memory.oom_control`, a tree under `memory/`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path("/sys/fs/cgroup")
COUNTS: Final = ("memory.events", "memory.oom_control")
KILLED: Final = re.compile(rb"Killed process (\d+) \(")
INITIAL_PIDS: Final = 0xEFFFFFFC  # the inode of the machine's own PID namespace
LIMITS: Final = ("memory.max", "memory.limit_in_bytes")


class Group(NamedTuple):
    """A memory cgroup that was made for one rank."""

    path: Path

    def remove(self) -> None:
        """Take it away; one in which something still runs is left."""
        with suppress(OSError):
            self.path.rmdir()


def group_of(pid: int | str = "self") -> Path | None:
    """The folder of a process' memory cgroup; None where there is none, or it cannot be seen from here."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    return find_group(lines, ROOT)


def find_group(lines: Iterable[str], root: Path) -> Path | None:
    """From the lines of /proc/PID/cgroup: `4:memory:/a/b` (v1) before `0::/a/b` (v2)."""
    parts = [line.split(":", 2) for line in lines]
    found = [root / "memory" / path.lstrip("/") for _, controllers, path in parts if "memory" in controllers.split(",")]
    found += [root / path.lstrip("/") for number, _, path in parts if number == "0"]
    # In a container that path may be the host's: then its own group is what is mounted at the root.
    found += [root / "memory", root]
    return next((folder for folder in found if any((folder / name).is_file() for name in COUNTS)), None)


def count_kills(group: Path | None) -> int:
    """How often the kernel has ended a process of this group, or of the machine where groups tell nothing."""
    names = [group / name for name in COUNTS] if group else []
    for path in (*names, Path("/proc/vmstat")):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def make_group(name: str, pid: int, limit: int) -> Group:
    """A memory cgroup of `limit` bytes below our own, with this process in it. Raises `OSError` where none can be."""
    parent = group_of()
    if parent is None:
        raise OSError(0, "there is no memory cgroup on this host; use oom")
    group = Group(parent / name)
    group.path.mkdir(exist_ok=True)
    try:
        names = [group.path / limit_name for limit_name in LIMITS if (group.path / limit_name).exists()]
        if not names:
            raise OSError(0, f"{parent} gives no memory limits to groups below it; use oom")
        names[0].write_text(str(limit))
        (group.path / "cgroup.procs").write_text(str(pid))
    except OSError:
        group.remove()
        raise
    return group


class Ledger:
    """Which deaths the kernel's kills explain: each kill counts for one rank. One for all ranks of a host.

    What the kernel logs names the process, where that can be read; else the kills are counted, and go to the ranks in
    the order in which they are found dead.
    """

    def __init__(self) -> None:
        self._own = group_of()
        self._explained = 0  # kills up to this one are accounted for

    def count(self) -> int:
        """Kills so far among this host's processes, ours and those in our memory cgroup."""
        return count_kills(self._own)

    def explains(self, pid: int, before: int, own_group: Group | None = None) -> bool:
        """Whether the kernel ended this rank, which began when it had ended `before`; asked once a rank."""
        if own_group is not None and count_kills(own_group.path):
            return True
        since = max(before, self._explained)
        if self.count() <= since:
            return False
        named = logged_kills()
        if named is not None and pid not in named:
            return False
        self._explained = since + 1
        return True


def logged_kills(path: str = "/dev/kmsg") -> frozenset[int] | None:
    """Processes of which the kernel's log says that they were killed; None where the log cannot be read, or its
    numbers are not ours (in a container).
    """
    try:
        if os.stat("/proc/self/ns/pid").st_ino != INITIAL_PIDS:  # noqa: PTH116 - the link is not to be resolved
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: set[int] = set()
    try:
        while record := os.read(log, 8192):
            found |= {int(pid) for pid in KILLED.findall(record)}
    except BlockingIOError:  # the end of it
        return frozenset(found)
    except OSError:
        return None
    finally:
        os.close(log)
    return frozenset(found)
