"""What processes and devices use. /proc is read directly: one rank costs some 50 µs, where psutil costs 1 ms."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

TICK: Final = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
MOST: Final = 256  # processes looked at in one rank's tree


class Usage(NamedTuple):
    """A process and its descendants: resident bytes; CPU seconds, and bytes from and to disks, since each began."""

    rss: int
    cpu: float
    read: int = 0
    written: int = 0


def tree_usage(pid: int) -> Usage:
    """Of a rank with its DataLoader workers; what has just ended counts no more. Shared pages count in each process."""
    rss, cpu, read, written, todo, seen = 0, 0.0, 0, 0, [pid], 0
    while todo and seen < MOST:
        number = todo.pop()
        seen += 1
        try:
            # After the name, which may hold anything, the fields are numbers: state is the first.
            fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
            todo += [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_bytes().split()]
        except OSError:
            continue
        cpu += (int(fields[11]) + int(fields[12])) * TICK
        rss += int(fields[21]) * PAGE
        with contextlib.suppress(OSError, IndexError, ValueError):  # not every kernel counts it
            counted = Path(f"/proc/{number}/io").read_bytes().split()
            read, written = read + int(counted[9]), written + int(counted[11])
    return Usage(rss, cpu, read, written)


def process_state(pid: int) -> str:
    """The process' letter in /proc: R runs, S sleeps, D waits for I/O, T is stopped, Z has ended; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def own_cpu(pid: int) -> float:
    """CPU seconds that the process itself has used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * TICK


def is_stopped(pid: int) -> bool:
    """Whether the process stands still by SIGSTOP."""
    return process_state(pid) in ("T", "t")


class DeviceUsage(NamedTuple):
    """A device: percent of the last moment in which it was busy, and bytes of its memory in use by anybody."""

    busy: float
    memory: int


class Devices(Protocol):
    """Where `DeviceUsage` comes from."""

    def usage(self, name: str) -> DeviceUsage | None: ...


class NoDevices:
    """A host without GPUs, or without NVML."""

    def usage(self, name: str) -> DeviceUsage | None:
        return None


class NvmlDevices:
    """NVIDIA's devices by their names in CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}

    def usage(self, name: str) -> DeviceUsage | None:
        try:
            handle = self._handles.get(name) or self._open(name)
            busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            return DeviceUsage(float(busy), int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
        except self._nvml.NVMLError:
            return None

    def _open(self, name: str) -> Any:
        by_index = name.isdecimal()
        handle = self._nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else self._by_uuid(name)
        self._handles[name] = handle
        return handle

    def _by_uuid(self, name: str) -> Any:
        return self._nvml.nvmlDeviceGetHandleByUUID(name.encode())


def find_devices() -> Devices:
    """NVML, where it is installed and finds devices."""
    try:
        import pynvml
    except ImportError:
        return NoDevices()
    try:
        pynvml.nvmlInit()
        return NvmlDevices(pynvml) if pynvml.nvmlDeviceGetCount() else NoDevices()
    except pynvml.NVMLError:
        return NoDevices()
