"""What jupyter-server-proxy makes of our entry point."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

proxy_config = pytest.importorskip("jupyter_server_proxy.config")


def test_the_named_server_goes_to_the_socket_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    (entry,) = [e for e in importlib.metadata.entry_points(group="jupyter_serverproxy_servers") if e.name == "dtrain"]
    process = proxy_config.ServerProcess(name="dtrain", **entry.load()())
    base, _ = process.get_proxy_base_class()
    assert base.__name__ == "NamedLocalProxyHandler"  # the one that does not supervise a command
    assert process.get_proxy_attributes()["unix_socket"].endswith(".sock")
    assert not process.absolute_url
    assert not process.launcher_entry.enabled
