"""Pools on this machine: detached scheduler and worker processes that outlive whoever started them.

A pool is a private directory `pools/<name>/` with a mark file for each process (pid and start time: a reused pid is not
taken for ours), the TLS key, and the processes' logs. A mark of another boot, or of a process that is gone, is stale:
it is recognised and cleaned away. But a worker that lives while the scheduler's mark is stale, and does not say that
it was to end, waits for another scheduler: whoever first looks for the pool, mostly that worker, starts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from workbench import __version__
from workbench.errors import PoolError, PoolUnavailableError, UsageError
from workbench.policy.comeback import Comeback, died_again
from workbench.spec import NAME_PATTERN
from workbench.store.home import atomic_write, home_dir, pools_dir, private_dir

START_TIMEOUT: Final = 60.0
STOP_TIMEOUT: Final = 15.0
# What a notebook kernel or a launcher put into its own environment and a pool must not inherit.
FOREIGN: Final = ("JPY_", "MPLBACKEND", "TORCHELASTIC_", "PYDEVD_")


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a pool, as it described itself."""

    role: str  # "scheduler" | "worker" | "dashboard"
    pid: int
    created: float  # psutil's create_time: with the pid, this process and no other
    boot: str
    version: str = __version__
    # The scheduler's:
    address: str = ""
    argv: tuple[str, ...] = ()  # how it was started
    deaths: tuple[float, ...] = ()  # epoch s: when those before it, of late, were killed
    is_closing: bool = False  # it ends because it was told to

    @property
    def is_alive(self) -> bool:
        if self.boot != boot_id():
            return False
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def boot_id() -> str:
    """Differs after each start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def pool_dir(name: str) -> Path:
    """The private directory of the pool called `name`, there once the pool was started."""
    if not NAME_PATTERN.match(name):
        raise UsageError(f"{name!r} cannot be a pool name", hint="use letters, digits, '.', '_' and '-'")
    return pools_dir() / name


def write_mark(directory: Path, role: str, address: str = "", pid: int | None = None, **more: Any) -> Mark:
    """Leave a mark for a process, this one by default; `more` are fields of the mark."""
    process = psutil.Process(pid)
    mark = Mark(
        role=role,
        pid=process.pid,
        created=process.create_time(),
        boot=boot_id(),
        address=address,
        version=__version__,
        **more,
    )
    put_mark(directory, mark)
    return mark


def put_mark(directory: Path, mark: Mark) -> None:
    atomic_write(directory / f"{mark.role}.json", msgspec.json.encode(mark))


def read_marks(directory: Path) -> dict[str, Mark]:
    """The marks in a pool's directory by role, stale ones too; a torn file counts as none."""
    marks = {}
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            mark = msgspec.json.decode(path.read_bytes(), type=Mark)
            marks[mark.role] = mark
    return marks


def find_pool(name: str, *, patience: float = START_TIMEOUT, brings_back: bool = True) -> Mark | None:
    """The scheduler of a running pool, or None. Leftovers of a dead pool are cleaned away.

    A pool whose scheduler was killed is brought back first, if `brings_back`. Waits `patience` s for others that start
    or stop it; with none, raises `BlockingIOError` while they do.
    """
    directory = pool_dir(name)
    found = running(directory)
    if found is None and read_marks(directory):
        with _locked(directory, patience) as lock:
            found = running(directory)  # another process may have started it while we waited
            if found is None and brings_back:
                found = _bring_back(directory, lock)
            if found is None:
                sweep(directory)
    return found


def _bring_back(directory: Path, lock: int) -> Mark | None:
    """Another scheduler for a worker whose own was killed; None where there is none, or it has died too often."""
    found = None
    while found is None:
        dead = read_marks(directory).get("scheduler")
        if dead is None or dead.is_closing or not dead.argv or running(directory, "worker") is None:
            return None
        _reap(dead.pid)
        deaths = died_again(dead.deaths, time.time())
        put_mark(directory, msgspec.structs.replace(dead, deaths=deaths))  # first: a start that fails counts as well
        scheduler = spawn(dead.argv, directory / "scheduler.log", lock)
        try:
            if Comeback(deaths=deaths).is_given_up:  # it only tells the jobs so
                scheduler.wait(START_TIMEOUT)
                return None
            with contextlib.suppress(PoolError):  # then it has died again
                found = _await_scheduler(directory, scheduler=scheduler)
        finally:
            if found is None:
                scheduler.kill()
            disown(scheduler)
    return found


def running(directory: Path, role: str = "scheduler") -> Mark | None:
    """The live process of that role that left its mark in the directory."""
    mark = read_marks(directory).get(role)
    return mark if mark is not None and mark.is_alive else None


def list_pools() -> list[tuple[str, Mark | None]]:
    """Every pool of this home with its scheduler's mark, None when it does not run."""
    root = pools_dir()
    if not root.is_dir():
        return []
    return [(path.name, running(path)) for path in sorted(root.iterdir()) if path.is_dir()]


def start_pool(name: str, slots: int, service: str, preload: Sequence[str] = ()) -> tuple[Mark, bool]:
    """Start the pool `name`, or find it running: `(scheduler, whether it was started now)`.

    `service` is the runner as `module:function`. Raises `PoolError` with the last words of what did not start.
    """
    directory = private_dir(pool_dir(name))
    with _locked(directory) as lock:
        if found := running(directory) or _bring_back(directory, lock):
            return found, False
        sweep(directory)
        make_certificates(directory)
        like = directory, name, slots, ",".join(preload), service
        scheduler = spawn(command("scheduler", *like), directory / "scheduler.log", lock)
        worker = spawn(command("worker", *like), directory / "worker.log")
        write_mark(directory, "worker", pid=worker.pid)
        try:
            return _await_scheduler(directory, scheduler=scheduler, worker=worker), True
        except BaseException:
            scheduler.kill()  # it may have left no mark yet
            sweep(directory)
            raise
        finally:
            for process in (scheduler, worker):
                disown(process)


def command(role: str, directory: Path, name: str, slots: int, preload: str, service: str) -> tuple[str, ...]:
    """How a process of a pool is started; the scheduler has to know the worker's options to start another one."""
    where = ("--pool", name, "--dir", str(directory), "--slots", str(slots), "--preload", preload, "--service", service)
    return (sys.executable, "-m", "workbench.pool.process", role, *where)


def _await_scheduler(directory: Path, **processes: subprocess.Popen[bytes]) -> Mark:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if mark := running(directory):
            return mark
        for role, process in processes.items():
            if process.poll() is not None:
                log = directory / f"{role}.log"
                raise PoolError(f"the pool's {role} ended: {_last_words(log)}", hint=f"see {log}")
        time.sleep(0.02)
    raise PoolUnavailableError(
        f"the pool's scheduler was not ready within {START_TIMEOUT:.0f} s", hint=f"see {directory / 'scheduler.log'}"
    )


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:300] if lines else "it left no word"


def spawn(argv: Sequence[str], log: Path, lock: int | None = None) -> subprocess.Popen[bytes]:
    """A process in a session of its own: neither the kernel's interrupt nor its end reaches it.

    `lock` is held by the process too, until it closes it: so nobody starts a second one when who started it dies.
    """
    env = caller_environment()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [*argv, *(() if lock is None else ("--lock", str(lock)))],
            pass_fds=() if lock is None else (lock,),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            env=env,
            cwd="/",
        )
    finally:
        os.close(descriptor)


def disown(process: subprocess.Popen[bytes]) -> None:
    """Let a process that is to outlive us go: `Popen` would warn that nobody waited for it."""
    process.returncode = process.returncode or 0


def sweep(directory: Path) -> None:
    """End what still runs of a pool but for this process, by its marks, and remove marks and key; logs stay."""
    for mark in read_marks(directory).values():
        if mark.pid != os.getpid():
            end_process(mark)
            _reap(mark.pid)
    for path in directory.glob("*.json"):
        path.unlink(missing_ok=True)
    for path in (directory / "tls").glob("*"):
        path.unlink(missing_ok=True)


def end_process(mark: Mark, grace: float = 3.0) -> None:
    """SIGTERM, then SIGKILL, to this very process."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 2.0)):
        if not mark.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(mark.pid, number)
        deadline = time.monotonic() + patience
        while mark.is_alive and time.monotonic() < deadline:
            _reap(mark.pid)
            time.sleep(0.02)


def _reap(pid: int) -> None:
    """Collect it if it happens to be our child (we started the pool in this process)."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def await_end(directory: Path, timeout: float = STOP_TIMEOUT) -> None:
    """Wait for a pool that was asked to stop; what does not go by itself is ended."""
    deadline = time.monotonic() + timeout
    marks = tuple(read_marks(directory).values())
    while time.monotonic() < deadline and any(mark.is_alive for mark in marks):
        for mark in marks:
            _reap(mark.pid)
        time.sleep(0.02)
    with _locked(directory):
        sweep(directory)


def make_certificates(directory: Path) -> None:
    """A key and a self-signed certificate for this pool alone; who can read them may use the pool."""
    from distributed.security import Security

    security = Security.temporary()
    tls = private_dir(directory / "tls")
    atomic_write(tls / "cert.pem", str(security.tls_client_cert).encode(), mode=0o600)
    atomic_write(tls / "key.pem", str(security.tls_client_key).encode(), mode=0o600)


@contextlib.contextmanager
def _locked(directory: Path, timeout: float = START_TIMEOUT) -> Iterator[int]:
    """One at a time: two notebooks that start the same pool get one pool. Gives the lock's descriptor."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not timeout:
                    raise
                if time.monotonic() > deadline:
                    raise PoolError(
                        f"another process has been starting this pool for {timeout:.0f} s", hint=f"see {directory}"
                    ) from None
                time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def caller_environment() -> dict[str, str]:
    """This process' environment as a job of its should see it: without what a notebook kernel keeps for itself."""
    return {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}


def dashboard_runs() -> bool:
    """Whether the live pages of this home are served."""
    return running(home_dir() / "dashboard", "dashboard") is not None


def start_dashboard(*, for_guests: bool = False) -> None:
    """The live pages of this home, served by a process of their own; nothing happens where they are not installed.

    `for_guests`: no pool needs them; they end by themselves with the last process that showed a file there.
    """
    if any(importlib.util.find_spec(name) is None for name in ("workbench_widgets", "panel")):
        return
    directory = private_dir(home_dir() / "dashboard")
    if running(directory, "dashboard"):
        return
    with _locked(directory):
        if running(directory, "dashboard") is None:
            argv = [sys.executable, "-m", "workbench_widgets.server", "--home", str(home_dir())]
            argv += ["--guests"] if for_guests else []
            process = spawn(argv, directory / "dashboard.log")
            write_mark(directory, "dashboard", pid=process.pid)
            disown(process)


def stop_dashboard_if_unused() -> None:
    """End the live pages once no pool of this home runs."""
    if any(mark is not None for _, mark in list_pools()):
        return
    directory = home_dir() / "dashboard"
    if directory.is_dir():
        with _locked(directory):
            sweep(directory)
