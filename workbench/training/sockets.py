"""The TCP connections of process groups, and how to end them: that frees a thread which waits in a gloo collective.

`abort`, `shutdown` and `destroy_process_group` all leave a hung gloo collective waiting for its timeout; shutting the
process' own connections makes it raise at once. Only connections: gloo aborts the process when its listener is shut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Connection(NamedTuple):
    fd: int
    inode: int  # tells a connection from a later one that has got the same descriptor
    peer_port: int


def connections() -> list[Connection]:
    """Every TCP connection of this process."""
    found = []
    with os.scandir("/proc/self/fd") as entries:
        descriptors = [int(entry.name) for entry in entries]
    for fd in descriptors:
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(fd)) as near:
                    if near.family in (socket.AF_INET, socket.AF_INET6) and near.type == socket.SOCK_STREAM:
                        found.append(Connection(fd, status.st_ino, int(near.getpeername()[1])))
    return found


class GroupSockets:
    """Which connections belong to process groups: those that appeared while a group was made."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._before: set[int] | None = None  # while a group is being made

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        if self._before is not None:  # one within another, which records already
            yield
            return
        self._before = {each.inode for each in connections()}
        try:
            yield
        finally:
            before, self._before = self._before, None
            alive = {each.inode for each in connections()}
            self._inodes = (self._inodes & alive) | (alive - before)

    def shut(self, wanted: Callable[[Connection], bool]) -> int:
        """End those of the groups' connections that are wanted; how many there were."""
        before = self._before
        count = 0
        for each in connections():
            is_group = each.inode in self._inodes or (before is not None and each.inode not in before)
            if is_group and wanted(each):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as near:
                    near.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count
