"""Simulated hosts: a network namespace of this machine for each, joined by a bridge in one more. Not for anything else.

Traffic stays inside; addresses are 10.78.0.1, .2, …, the interface is `e0`. Whatever runs in a host when the network is
closed is killed, and everything is removed. What a killed test left is removed by the next one.

Needs root, `ip`, `tc` and `nft`; kernels without netem cannot delay packets, so bandwidth and loss are what there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

PREFIX: Final = "dtlab"
CLONE_NEWNET: Final = 0x40000000
# Of what comes and goes through the uplink; the host's own loopback loses nothing.
LOSS: Final = """
table inet loss {{
  chain in {{ type filter hook input priority 0; iifname "e0" numgen random mod 100 < {percent} drop; }}
  chain out {{ type filter hook output priority 0; oifname "e0" numgen random mod 100 < {percent} drop; }}
}}
"""


def missing() -> str:
    """Why there can be no such network here; empty: there can."""
    if os.geteuid() != 0:
        return "simulated hosts need root"
    if lacking := [tool for tool in ("ip", "tc", "nft", "unshare") if shutil.which(tool) is None]:
        return f"simulated hosts need {', '.join(lacking)}"
    try:
        with Network(1) as net:
            net.lose(0, 1)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class Network:
    """`hosts` of them, numbered from 0, with unlimited links. A context manager."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._tag = f"{PREFIX}{os.getpid()}"
        self._bridge = f"{self._tag}-b"

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _sh("ip", "netns", "add", self._bridge)
        _sh("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _sh("ip", "-n", self._bridge, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, outer = self.namespace(host), f"y{host}"
            _sh("ip", "netns", "add", name)
            _sh("ip", "-n", name, "link", "add", "e0", "type", "veth", "peer", "name", outer, "netns", self._bridge)
            _sh("ip", "-n", self._bridge, "link", "set", outer, "master", "br0", "up")
            _sh("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "e0")
            for device in ("e0", "lo"):
                _sh("ip", "-n", name, "link", "set", device, "up")

    def close(self) -> None:
        for host in range(self.hosts):
            _remove(self.namespace(host))
        _remove(self._bridge)

    def namespace(self, host: int) -> str:
        return f"{self._tag}-{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.78.0.{host + 1}"

    # --- what runs there ---

    def popen(self, host: int, argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process there, in a session of its own; what it writes goes to the end of `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def pids(self, host: int) -> list[int]:
        """All processes of the host."""
        return _pids(self.namespace(host))

    def kill(self, host: int) -> None:
        """SIGKILL to all of it, as when its power goes; only the kernel's farewells (RST, FIN) are still sent."""
        _kill_all(self.namespace(host))

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """This thread, and those that it starts meanwhile, are on that host's network."""
        with Path("/proc/thread-self/ns/net").open() as here, Path("/run/netns", self.namespace(host)).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    # --- what happens to its network ---

    def cut(self, host: int) -> None:
        """Part the host from the others, silently: packets vanish and no connection closes."""
        _sh("ip", "-n", self._bridge, "link", "set", f"y{host}", "nomaster")

    def heal(self, host: int) -> None:
        _sh("ip", "-n", self._bridge, "link", "set", f"y{host}", "master", "br0")

    def slow_down(self, host: int, rate: str) -> None:
        """Limit the host's link in both directions, in tc's words: "10mbit"."""
        for space, device in ((self.namespace(host), "e0"), (self._bridge, f"y{host}")):
            limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
            _sh("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *limit)

    def lose(self, host: int, percent: int) -> None:
        """Drop that many of a hundred packets, each way."""
        _sh("ip", "netns", "exec", self.namespace(host), "nft", "-f", "-", text=LOSS.format(percent=percent))

    def repair(self, host: int) -> None:
        """Undo `slow_down` and `lose`."""
        for space, device in ((self.namespace(host), "e0"), (self._bridge, f"y{host}")):
            _try("tc", "-n", space, "qdisc", "del", "dev", device, "root")
        _try("ip", "netns", "exec", self.namespace(host), "nft", "delete", "table", "inet", "loss")


def _sh(*argv: str, text: str = "") -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, input=text).stdout


def _try(*argv: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _sh(*argv)


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _sh("ip", "netns", "pids", namespace).split() if int(pid) != os.getpid()]


def _kill_all(namespace: str, patience: float = 10.0) -> None:
    """Again and again until nothing is left: what is killed may be starting something."""
    deadline = time.monotonic() + patience
    while (pids := _living(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _living(namespace: str) -> list[int]:
    return [pid for pid in _pids(namespace) if not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _remove(namespace: str) -> None:
    if Path("/run/netns", namespace).exists():
        _kill_all(namespace)
        _try("ip", "netns", "del", namespace)


def _sweep() -> None:
    """What tests left that were killed themselves."""
    folder = Path("/run/netns")
    for path in sorted(folder.glob(f"{PREFIX}*-*")) if folder.is_dir() else ():
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(path.name)
