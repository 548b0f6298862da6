"""The process that serves the live pages, spoken to over its socket as Jupyter's proxy does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from workbench_widgets.address import socket_path
from workbench_widgets.tab import Tab, TabError, open_tab, show_saved

from workbench.pool import local

pytest.importorskip("panel")


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def get(path: Path, address: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = Connection(path)
    try:
        connection.request("GET", address, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def start(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "workbench_widgets.server", "--home", str(home)], cwd="/")


def await_socket(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 40
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(home)
    try:
        await_socket(socket_path(home), process)
        yield process
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def path(server: subprocess.Popen[bytes], home: Path) -> Path:
    return socket_path(home)


def test_only_its_user_can_reach_it_and_there_is_no_port(path: Path, server: subprocess.Popen[bytes]) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == []


def test_health_is_plain_and_names_nothing_of_the_machine(path: Path, home: Path) -> None:
    status, headers, body = get(path, "/healthz")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert json.loads(body)["status"] == "ok"
    assert headers["Cache-Control"] == "no-store"
    assert str(home) not in body


@pytest.mark.parametrize("address", ["/job?id=no-such-job", "/", "/job", "/job?id=%3Cscript%3E&theme=%22%3E"])
def test_pages_ask_no_other_host_and_work_under_any_prefix(path: Path, address: str) -> None:
    status, headers, body = get(path, address)
    assert status == 200
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", body)
    assert addresses and all(not a.startswith(("/", "http", "//")) for a in addresses), addresses
    assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
    assert "<script>&" not in body and "id=<script>" not in body and "<title><script>" not in body
    script = next(a for a in addresses if "bokeh.min.js" in a)
    assert get(path, "/" + script)[0] == 200


def test_jupyters_cookies_are_not_kept_in_the_page(path: Path) -> None:
    _, _, body = get(path, "/job?id=x", Cookie="username-localhost=secret-of-jupyter", Authorization="token geheim")
    assert "secret-of-jupyter" not in body and "geheim" not in body
    tokens = re.findall(r'"token":"([^".]+)', body)
    assert tokens
    for token in tokens:
        payload = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode(errors="replace")
        assert "secret" not in payload and "username-localhost" not in payload


# --- ports ---


@pytest.fixture(scope="module")
def tab(server: subprocess.Popen[bytes], home: Path) -> Tab:
    return open_tab(home)


def by_port(tab: Tab, address: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", tab.port, timeout=20)
    try:
        connection.request("GET", address, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def cookie_of(tab: Tab, link: str) -> str:
    _, _, address = link.partition(str(tab.port))
    status, headers, _ = by_port(tab, address)
    assert status == 303 and tab.act not in headers["Location"] and headers["Cache-Control"] == "no-store"
    return headers["Set-Cookie"].partition(";")[0]


def test_a_port_is_loopbacks_alone_and_one_does_for_all(tab: Tab, server: subprocess.Popen[bytes], home: Path) -> None:
    assert open_tab(home)[:3] == tab[:3]
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", tab.port)]
    assert stat.S_IMODE((home / "dashboard" / "tab.json").stat().st_mode) == 0o600


def test_a_port_shows_pages_to_who_has_a_link(tab: Tab) -> None:
    assert by_port(tab, "/healthz")[0] == 403
    cookie = cookie_of(tab, tab.link())
    status, headers, body = by_port(tab, "/", Cookie=cookie)
    assert status == 200 and "frame-ancestors 'self'" in headers["Content-Security-Policy"]
    assert tab.act not in body and tab.look not in body
    assert json.loads(by_port(tab, "/healthz", Cookie=cookie)[2])["status"] == "ok"
    assert by_port(tab, "/healthz", Cookie=cookie, Host="evil.example")[0] == 403
    assert by_port(tab, "/gate", Cookie=cookie)[0] == 404


def test_a_ticket_is_good_once(tab: Tab, home: Path) -> None:
    made = open_tab(home)
    cookie_of(made, made.link(once=True))
    assert by_port(made, f"/?token={made.ticket}")[0] == 403


def test_what_a_page_may_is_in_its_signed_token(tab: Tab) -> None:
    cookie = cookie_of(tab, tab.link(read_only=True))
    _, _, body = by_port(tab, "/look/job?id=x", Cookie=cookie, **{"Dtrain-Rights": "act"})
    (token,) = re.findall(r'"token":"([^"]+)', body)
    payload, dot, signature = token.partition(".")
    assert dot and signature
    told = urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode(errors="replace")
    assert "dtrain-look" not in told


def test_tokens_are_for_processes_of_this_machine_alone(path: Path) -> None:
    connection = Connection(path)
    for name in ("X-Forwarded-For", "X-ProxyContextPath", "Dtrain-Rights"):
        connection.request("POST", "/gate", '{"port": 0}', {name: "x"})
        answer = connection.getresponse()
        assert answer.status == 403 and "act" not in json.loads(answer.read())
    connection.close()


SAVED = Path(__file__).parents[1] / "data" / "saved_session_v1" / "run.dtrain"


def test_a_saved_session_is_shown_to_who_has_its_key_and_no_page_acts(path: Path, home: Path) -> None:
    assert get(path, "/healthz?file=no-such")[0] == 404
    key = show_saved(home, SAVED)
    assert key == show_saved(home, SAVED) and key.startswith("run.dtrain-") and "/" not in key
    assert get(path, f"/healthz?file={key}")[0] == 200
    status, _, body = get(path, f"/job?id={key}:trial-1")
    assert status == 200 and "<title>trial-1 · dtrain" in body and f'href=".?file={key}' in body
    assert str(SAVED.parent) not in body and str(SAVED.parent) not in get(path, f"/?file={key}")[2]
    with pytest.raises(TabError, match="no saved session"):
        show_saved(home, Path(__file__))
    connection = Connection(path)
    for name in ("X-Forwarded-For", "X-ProxyContextPath", "Dtrain-Rights"):
        connection.request("POST", "/saved", json.dumps({"path": str(SAVED), "guest": 1}), {name: "x"})
        answer = connection.getresponse()
        assert answer.status == 403 and "key" not in json.loads(answer.read())
    connection.close()


def test_a_shell_shows_a_saved_session_until_it_is_interrupted(tmp_path: Path) -> None:
    env = {**os.environ, "DTRAIN_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "workbench", "dashboard", str(SAVED), "--json"]
    process = subprocess.Popen(argv, env=env, cwd="/", stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        assert told["read_only"] and f"127.0.0.1:{told['port']}/look/job/trial-1?token=" in told["url"]
        tab = Tab(told["port"], "no act-token", told["url"].partition("token=")[2])
        cookie = cookie_of(tab, told["url"])
        assert "trial-1 · dtrain" in by_port(tab, "/look/job?id=trial-1", Cookie=cookie)[2]
        assert by_port(tab, "/job?id=trial-1", Cookie=cookie)[0] == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "home" / "pools").exists() and list(tmp_path.glob("dtrain-*")) == []


def test_a_port_that_is_taken_is_told(home: Path, server: subprocess.Popen[bytes]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(TabError, match=f"port {other.getsockname()[1]} cannot be had: Address already in use"):
            open_tab(home, other.getsockname()[1])


def test_a_server_that_is_started_again_opens_the_same_port(tmp_path: Path) -> None:
    processes = [start(tmp_path)]
    try:
        first = open_tab(tmp_path)
        processes[0].kill()
        processes[0].wait(20)
        processes.append(start(tmp_path))
        await_socket(socket_path(tmp_path), processes[1])
        assert open_tab(tmp_path)[:3] == first[:3]
        assert by_port(first, "/healthz", Cookie=cookie_of(first, first.link()))[0] == 200
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
        socket_path(tmp_path).unlink(missing_ok=True)
        socket_path(tmp_path).with_suffix(".lock").unlink(missing_ok=True)


def test_down_leaves_neither_port_nor_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    local.start_dashboard()
    try:
        made = open_tab(tmp_path)
    finally:
        local.stop_dashboard_if_unused()
    assert [path.name for path in (tmp_path / "dashboard").iterdir() if path.suffix == ".json"] == []
    with pytest.raises(ConnectionRefusedError):
        by_port(made, "/")


def test_no_token_reaches_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        argv = [sys.executable, "-m", "workbench_widgets.server", "--home", str(tmp_path)]
        process = subprocess.Popen(argv, cwd="/", stdout=file, stderr=file)
    try:
        made = open_tab(tmp_path)
        cookie = cookie_of(made, made.link())
        by_port(made, f"/no-such-page?token={made.act}", Cookie=cookie)
        by_port(made, "/no-such-page", Cookie=cookie)
        by_port(made, f"/?token={made.look}", Cookie=cookie)
        get(socket_path(tmp_path), "/no-such-page?token=of-jupyter&x=1")
    finally:
        process.terminate()
        process.wait(20)
    told = log.read_text()
    assert "/no-such-page?token=…&x=1" in told
    assert not any(secret in told for secret in (made.act, made.look, made.ticket, "of-jupyter"))


def test_people_write_a_jobs_address_as_a_path(path: Path) -> None:
    status, headers, _ = get(path, "/job/digits-1?rank=2&step=410")
    assert status == 302 and headers["Location"] == "../job?id=digits-1&rank=2&step=410"


def test_an_unknown_address_is_404(path: Path) -> None:
    assert get(path, "/nothing")[0] == 404


def test_a_second_one_leaves_the_first_alone(path: Path, home: Path) -> None:
    inode = path.stat().st_ino
    assert start(home).wait(30) == 0
    assert path.stat().st_ino == inode and get(path, "/healthz")[0] == 200


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_after_its_end_another_can_start(tmp_path: Path, how: signal.Signals) -> None:
    path, first = socket_path(tmp_path), start(tmp_path)
    second = None
    try:
        await_socket(path, first)
        first.send_signal(how)
        first.wait(20)
        assert path.exists() == (how is signal.SIGKILL)
        assert path.with_suffix(".lock").exists() == (how is signal.SIGKILL)
        path.unlink(missing_ok=True)
        second = start(tmp_path)
        await_socket(path, second)
    finally:
        for process in (first, second):
            if process is not None:
                process.terminate()
                process.wait(20)
    assert not path.exists() and not path.with_suffix(".lock").exists()


def test_it_ends_when_its_socket_was_removed(tmp_path: Path) -> None:
    path, process = socket_path(tmp_path), start(tmp_path)
    try:
        await_socket(path, process)
        path.unlink()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)


def test_jupyter_loads_nothing_heavy_for_the_proxy() -> None:
    heavy = "{'panel', 'bokeh', 'torch', 'distributed', 'workbench'}"
    code = f"import sys, workbench_widgets.proxy as p; p.setup(); print(sorted({heavy} & set(sys.modules)))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, env=dict(os.environ), check=True)
    assert done.stdout.strip() == "[]"
