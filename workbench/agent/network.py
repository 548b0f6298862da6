"""Which of this host's network interfaces ranks are to be reached by.

gloo goes by what the host's name resolves to, which is often 127.0.0.1: ranks on two hosts would wait for each other
for ever. The address at which the worker listens is one that other hosts have reached.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def network_defaults(address: str, nnodes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank of a job over several hosts needs to be told, where the user has not."""
    if nnodes < 2 or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def interface_of(address: str) -> str:
    """The name of the interface that has the address; empty when none has: it is another machine's, or translated."""
    for name, known in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in known):
            return name
    return ""
