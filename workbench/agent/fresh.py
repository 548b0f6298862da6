"""Makes a forked child what a fresh process would be. Each function undoes one thing that a fork inherits.

Called between the fork and the user's first line, so nothing here imports anything heavy or takes a millisecond.
Standard library, and torch where it has been imported before.
"""

# Paths are strings here, as the interpreter has them.
# ruff: noqa: PTH100, PTH109, PTH208

from __future__ import annotations

import ctypes
import faulthandler
import functools
import importlib
import io
import locale
import mmap
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, cast

PR_SET_PDEATHSIG: Final = 1
PR_SET_PTRACER: Final = 0x59616D61
PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)
IGNORED: Final = (signal.SIGPIPE, signal.SIGXFSZ)  # by every Python process
OWN: Final = frozenset({"torch", "numpy", "workbench"})  # never forgotten, whatever lies beside the script


def die_with_parent(parent: int, number: int) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(0)


def allow_tracing() -> None:
    """Let this user's other processes read the rank's stack, where the system restricts that to ancestors (yama)."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)


def leave_zygote(parent: int, keep: Iterable[int]) -> None:
    """A group of its own, default signals, and no descriptor but stdio and `keep`."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    reset_signals()
    die_with_parent(parent, signal.SIGKILL)
    close_others({0, 1, 2, *keep})


def reset_signals() -> None:
    """Handlers and mask as the interpreter sets them when it starts."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, *IGNORED}:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def default_signals() -> None:
    """What a process that is about to execute another program is to leave it: nothing ignored."""
    for number in (signal.SIGINT, *IGNORED):
        signal.signal(number, signal.SIG_DFL)


def close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):  # the listing's own
                os.close(int(name))


def set_stdio(out: int, err: int) -> None:
    """Descriptors 0, 1, 2; the Python objects over them stay valid."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)


def set_streams(environ: dict[str, str]) -> None:
    """`sys.stdout` by the line (a live view is to see it), `sys.stderr` as ever; encodings as the interpreter does."""
    encoding, errors = stream_encoding(environ)
    if environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = _unbuffered(1, encoding, errors)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(2, encoding, "backslashreplace")  # type: ignore[misc]
        return
    for stream, handler in ((sys.stdout, errors), (sys.stderr, "backslashreplace")):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding=encoding, errors=handler, line_buffering=True)


def stream_encoding(environ: dict[str, str]) -> tuple[str, str]:
    """Encoding and error handler of stdout: PYTHONIOENCODING, else UTF-8, strict unless the locale is C."""
    name = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "C"
    encoding, _, errors = environ.get("PYTHONIOENCODING", "").partition(":")
    return encoding or "utf-8", errors or ("surrogateescape" if name in ("C", "POSIX") else "strict")


def _unbuffered(fd: int, encoding: str, errors: str) -> io.TextIOWrapper[Any]:
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - lives as long as the process
    return io.TextIOWrapper(cast(Any, raw), encoding, errors, write_through=True)


def set_environment(environ: dict[str, str]) -> None:
    """Replace the environment wholly, and apply what an interpreter reads from it when it starts."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    changed = {name for name in before.keys() | environ.keys() if before.get(name) != environ.get(name)}
    if "TZ" in changed:
        time.tzset()
    if any(name == "LANG" or name.startswith("LC_") for name in changed):
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "")
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = environ.get("PYTHONPYCACHEPREFIX") or None
    if "PYTHONWARNINGS" in changed:
        set_warnings(environ.get("PYTHONWARNINGS", ""))


def set_warnings(options: str) -> None:
    sys.warnoptions[:] = [option for option in options.split(",") if option]
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]


def set_path(first: str, old_pythonpath: str, pythonpath: str) -> None:
    """`sys.path` of a program whose first entry is `first`; modules that it would have shadowed are forgotten."""
    stale = set(split_path(old_pythonpath))
    own = split_path(pythonpath)
    sys.path[:] = [first, *own, *(p for p in sys.path if p not in stale and p not in own)]
    forget_shadowed([first, *own])


def split_path(value: str) -> list[str]:
    """The entries of a PYTHONPATH, as the interpreter puts them into `sys.path`."""
    return list(dict.fromkeys(os.path.abspath(part) for part in value.split(os.pathsep))) if value else []


def forget_shadowed(folders: list[str]) -> None:
    """Forget installed modules that the zygote has imported and that files in `folders` come before."""
    for folder in folders:
        with suppress(OSError):
            for entry in os.listdir(folder):
                name = entry.partition(".")[0]
                if name in sys.modules and name not in sys.stdlib_module_names and name not in OWN:
                    _forget(name, folder)


def _forget(root: str, folder: str) -> None:
    origin = getattr(sys.modules[root], "__file__", None) or ""
    if origin.startswith(folder + os.sep) or root.startswith("__"):
        return
    for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
        del sys.modules[name]


def set_main() -> ModuleType:
    """A new, empty `__main__`."""
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": __import__("builtins"), "__annotations__": {}})
    sys.modules["__main__"] = main
    return main


def set_argv(argv: list[str], original: list[str]) -> None:
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *original]


def renew_modules() -> None:
    """State that standard modules keep of the process they were imported in."""
    process: Any = sys.modules["multiprocessing.process"]
    process.ORIGINAL_DIR = os.getcwd()
    process.current_process().authkey = os.urandom(32)
    tempfile: Any = sys.modules["tempfile"]
    tempfile.tempdir = None


@functools.cache
def openblas() -> tuple[Any, ...]:
    """The OpenBLAS libraries of this process, as threadpoolctl finds them; slow, so called in the zygote."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:  # another interpreter, without it: numpy keeps the zygote's one thread
        return ()
    return tuple(lib for lib in ThreadpoolController().lib_controllers if lib.internal_api == "openblas")


def set_threads(environ: dict[str, str]) -> None:
    """Threads of torch and of numpy's BLAS as the variables say, or as many as there are cores."""
    if count := thread_count(environ, "OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(count)
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    for library in openblas():
        library.set_num_threads(thread_count(environ, *names) or len(os.sched_getaffinity(0)))


def thread_count(environ: dict[str, str], *names: str) -> int:
    """The first of the variables that is set to a number above 0; else 0. `4,2` (nested levels) is 4."""
    for name in names:
        first = environ.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    return 0


def set_torch_switches(environ: dict[str, str]) -> None:
    """What torch reads from the environment when it is imported and can be told again."""
    torch = sys.modules["torch"]
    if "TORCH_DISTRIBUTED_DEBUG" in environ:
        torch.distributed.set_debug_level_from_env()
    if "TORCH_LOGS" in environ or "TORCH_LOGS_OUT" in environ:
        importlib.import_module("torch._logging._internal")._init_logs()


def set_seeds(seed: int | None) -> None:
    """Generators of `random`, numpy and torch: from `seed`, or from the system so that no two ranks are alike."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(None if seed is None else seed % 2**32)
    torch = sys.modules["torch"]
    chosen = int.from_bytes(os.urandom(8), "big") >> 1 if seed is None else seed
    if torch.version.cuda or seed is not None:
        torch.manual_seed(chosen)  # its devices' generators too, when they come to be used
    else:
        torch.default_generator.manual_seed(chosen)  # the same for the CPU alone, 4 ms faster


def map_shared(fd: int, size: int) -> memoryview:
    """The file's memory, for as long as the process lives; the descriptor is closed (`mmap.mmap` keeps one)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    os.close(fd)
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def enable_faulthandler() -> None:
    faulthandler.enable(file=2)
