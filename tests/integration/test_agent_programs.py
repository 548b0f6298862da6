"""A rank's program runs as `python train.py` would run it, in a process that was forked and looks fresh."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from tests.integration.agent_host import AgentHost, agent_host
from workbench.events import LaunchFailed, RankRaised
from workbench.spec import EntrypointKind, JobSpec
from workbench.telemetry import CellFinished


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    """The module's agent; afterwards nothing that it started may run."""
    with agent_host(tmp_path_factory.mktemp("host")) as made:
        yield made


def as_python(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """What the interpreter itself does with the script."""
    return subprocess.run([sys.executable, str(path), *args], capture_output=True, text=True, timeout=60, check=False)


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_rank_looks_like_a_fresh_process(host: AgentHost) -> None:
    spec = host.spec(
        """
        import json, os, signal, sys, threading
        names = {n: int(signal.getsignal(signal.Signals[n]))
                 for n in ("SIGTERM", "SIGCHLD", "SIGUSR1", "SIGPIPE", "SIGXFSZ")}
        first = open(os.devnull).fileno()
        print(json.dumps({
            "argv": sys.argv, "cwd": os.getcwd(), "path0": sys.path[0], "name": __name__, "file": __file__,
            "main": sys.modules["__main__"].__dict__ is globals(), "spec": __spec__, "env": os.environ.get("MINE"),
            "group": os.getpgid(0) == os.getpid() == os.getsid(0), "stdin": sys.stdin.read(), "signals": names,
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "wakeup": signal.set_wakeup_fd(-1),
            "threads": threading.active_count(), "first": first, "main_thread": threading.current_thread().name,
            "stdout": [sys.stdout.encoding, sys.stdout.errors], "stderr": [sys.stderr.encoding, sys.stderr.errors],
            "cuda": __import__("torch").cuda.is_initialized(),
            "leftover": [n for n in os.environ if n.startswith("OPENBLAS")],
        }))
        """,
        args=("--lr", "0.1"),
        env={"MINE": "yes", "LC_ALL": "C.UTF-8"},
    )
    seen = json.loads(host.log(host.run(spec)))
    assert seen == {
        "argv": [spec.entrypoint, "--lr", "0.1"],
        "cwd": str(host.folder),
        "path0": str(host.folder),
        "name": "__main__",
        "file": spec.entrypoint,
        "main": True,
        "spec": None,
        "env": "yes",
        "group": True,
        "stdin": "",
        "signals": {"SIGTERM": 0, "SIGCHLD": 0, "SIGUSR1": 0, "SIGPIPE": 1, "SIGXFSZ": 1},
        "sigint": True,
        "mask": [],
        "wakeup": -1,
        "threads": 1,
        "first": 3,
        "main_thread": "MainThread",
        "stdout": ["utf-8", "strict"],
        "stderr": ["utf-8", "backslashreplace"],
        "cuda": False,
        "leftover": [],
    }


def test_no_descriptor_of_zygote_or_agent_is_left(host: AgentHost) -> None:
    text = host.output(
        """
        import os
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            try: print(name, os.readlink(f"/proc/self/fd/{name}").split(":")[0])
            except OSError: pass
        """
    )
    found = dict(line.split() for line in text.splitlines())
    assert found.pop("0") == "/dev/null"
    assert found.pop("1") == found.pop("2") == "pipe"
    assert {found.pop("100"), found.pop("101")} == {"socket", "/memfd"}  # its line to its agent, and its last stacks
    assert not found


def test_unseeded_ranks_differ_and_seeded_ones_repeat(host: AgentHost) -> None:
    text = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    drawn = []
    for seed in (None, None, 7, 7):
        job = host.run(host.spec(text, seed=seed), ranks=2)
        drawn.append([host.log(job, rank) for rank in (0, 1)])
    unseeded, again, seeded, repeated = drawn
    for position in range(3):
        assert len({line.split()[position] for line in (*unseeded, *again, *seeded)}) == 6
    assert seeded == repeated


def test_a_deterministic_job_runs_deterministic_algorithms(host: AgentHost) -> None:
    text = (
        "import os, torch; print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    assert host.output(text, deterministic=True) == "True :4096:8\n"


def test_an_edit_takes_effect_at_the_next_launch(host: AgentHost) -> None:
    host.script("VALUE = 1", "helper_module.py")
    spec = host.spec("import helper_module; print(helper_module.VALUE)")
    assert host.log(host.run(spec)) == "1\n"
    host.script("VALUE = 'edited'", "helper_module.py")
    assert host.log(host.run(spec)) == "edited\n"


def test_a_module_beside_the_script_comes_before_an_installed_one(host: AgentHost) -> None:
    (host.folder / "shadow").mkdir()
    (host.folder / "shadow" / "sympy.py").write_text("HERE = True")
    path = host.folder / "shadow" / "train.py"
    path.write_text("import sympy; print(sympy.HERE)")
    assert host.log(host.run(JobSpec(entrypoint=str(path), cwd=str(host.folder)))) == "True\n"


def test_pythonpath_of_the_job_is_used(host: AgentHost) -> None:
    (host.folder / "lib").mkdir()
    (host.folder / "lib" / "in_lib.py").write_text("print('found')")
    assert host.output("import in_lib", env={"PYTHONPATH": str(host.folder / "lib")}) == "found\n"


def test_thread_counts_follow_the_variables(host: AgentHost) -> None:
    text = """
        import numpy, torch, threadpoolctl
        blas = [p["num_threads"] for p in threadpoolctl.threadpool_info() if p["internal_api"] == "openblas"]
        print(torch.get_num_threads(), *blas)
    """
    assert host.output(text, env={"OMP_NUM_THREADS": "2"}).split() == ["2", "2"]
    assert host.output(text, ranks=2).split() == ["1", "1"]  # torchrun's default for more than one rank
    assert host.output(text, env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}).split() == ["1", "1"]


# --- its end ----------------------------------------------------------------------------------------------------------

ENDINGS = {
    "exit": ("import sys; print('a'); sys.exit(3)", 3),
    "message": ("import sys; sys.exit('no data')", 1),
    "none": ("import sys; sys.exit()", 0),
    "os_exit": ("import os; print('lost', end=''); os._exit(5)", 5),
    "atexit": ("import atexit, sys; atexit.register(print, 'bye'); sys.exit(4)", 4),
    "error": ("import atexit; atexit.register(print, 'bye')\n1 / 0", 1),
    "thread": ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()", 0),
    "chained": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e", 1),
    "syntax": ("x = 1\nif x = 2:\n    pass\n", 1),
    "group": ("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])", 1),
    "hook": ("import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0", 1),
    "badhook": ("import sys\nsys.excepthook = lambda: 0\n1 / 0", 1),
    "nested": ("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(30)", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_as_under_python(host: AgentHost, ending: str) -> None:
    text, code = ENDINGS[ending]
    path = host.script(text, f"ends_{ending}.py")
    job = host.run(JobSpec(entrypoint=str(path), cwd=str(host.folder)))
    plain = as_python(path)
    assert (host.ended(job)[0].exit_code, plain.returncode) == (code, code)
    if ending != "badhook":  # there our line stands in the middle
        assert sorted(host.log(job).splitlines()) == sorted((plain.stdout + plain.stderr).splitlines())


def test_keyboard_interrupt_ends_by_the_signal_as_under_python(host: AgentHost) -> None:
    job = host.run(host.spec("raise KeyboardInterrupt"))
    exited = host.ended(job)[0]
    assert (exited.exit_code, exited.signal) == (None, 2)
    assert host.log(job).endswith("KeyboardInterrupt\n")


def test_unclosed_files_are_flushed(host: AgentHost) -> None:
    host.output("f = open('unclosed.txt', 'w'); f.write('kept')")
    assert (host.folder / "unclosed.txt").read_text() == "kept"


def test_an_exception_is_told_with_the_users_frames_alone(host: AgentHost) -> None:
    spec = host.spec("def f():\n    raise ValueError('bad batch')\nf()")
    job = host.run(spec)
    raised = host.raised(job)
    assert (raised.error, raised.is_collective, raised.rank) == ("ValueError: bad batch", False, 0)
    assert raised.traceback == host.log(job)
    assert raised.traceback == textwrap.dedent(f"""\
        Traceback (most recent call last):
          File "{spec.entrypoint}", line 3, in <module>
            f()
          File "{spec.entrypoint}", line 2, in f
            raise ValueError('bad batch')
        ValueError: bad batch
        """)
    told = host.news[job]
    assert told.index(raised) < told.index(host.ended(job)[0])


def test_a_childs_exception_is_not_the_ranks(host: AgentHost) -> None:
    job = host.run(host.spec("import os\npid = os.fork()\nif not pid: 1 / 0\nos.waitpid(pid, 0)"))
    assert host.ended(job)[0].exit_code == 0
    assert not host.of(job, RankRaised)
    assert "ZeroDivisionError" in host.log(job)


def test_a_crash_leaves_pythons_stack_in_the_log(host: AgentHost) -> None:
    job = host.run(host.spec("import ctypes; ctypes.string_at(0)"))
    assert host.ended(job)[0].signal == 11
    assert "Fatal Python error: Segmentation fault" in host.log(job)


# --- kinds of program -------------------------------------------------------------------------------------------------


def test_a_module_runs_as_with_dash_m(host: AgentHost) -> None:
    package = host.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("X = 5")
    (package / "train.py").write_text(
        "import sys\nfrom .other import X\nprint(X, __name__, __package__, __spec__.name, sys.argv[1:], sys.path[0])"
    )
    spec = JobSpec(kind=EntrypointKind.MODULE, entrypoint="package.train", args=("-v",), cwd=str(host.folder))
    assert host.log(host.run(spec)) == f"5 __main__ package package.train ['-v'] {host.folder}\n"


def test_a_module_that_is_not_there_is_told_as_python_does(host: AgentHost) -> None:
    spec = JobSpec(kind=EntrypointKind.MODULE, entrypoint="no.such", cwd=str(host.folder))
    job = host.run(spec)
    assert host.ended(job)[0].exit_code == 1
    assert "Error while finding module specification for 'no.such'" in host.log(job)


def test_a_folder_with_a_main_runs(host: AgentHost) -> None:
    (host.folder / "app").mkdir()
    (host.folder / "app" / "__main__.py").write_text("import part; print(part.X)")
    (host.folder / "app" / "part.py").write_text("X = 9")
    assert host.log(host.run(JobSpec(entrypoint="app", cwd=str(host.folder)))) == "9\n"


def test_a_cell_is_a_program_with_its_source_in_the_traceback(host: AgentHost) -> None:
    source = "import sys\nprint(__name__, sys.argv[1:])\ndef f():\n    raise ValueError('in a cell')\nf()\n"
    spec = JobSpec(kind=EntrypointKind.SOURCE, entrypoint="train", source=source, args=("a",), cwd=str(host.folder))
    job = host.run(spec)
    assert "__main__ ['a']" in host.log(job)
    assert (
        '  File "<cell train>", line 5, in <module>\n    f()\n'
        "  File \"<cell train>\", line 4, in f\n    raise ValueError('in a cell')\n"
    ) in host.raised(job).traceback


def test_processes_spawned_from_a_cell_find_what_it_defines(host: AgentHost) -> None:
    source = textwrap.dedent("""
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]))
        """)
    job = host.run(JobSpec(kind=EntrypointKind.SOURCE, entrypoint="c", source=source, cwd=str(host.folder)))
    assert host.log(job) == "[4, 9]\n"


def test_a_functions_value_comes_back(host: AgentHost) -> None:
    def train(scale: int, *, plus: int) -> tuple[int, int]:
        import os

        print("working")
        return int(os.environ["RANK"]), 10 * scale + plus

    payload = cloudpickle.dumps((train, (4,), {"plus": 2}))
    spec = JobSpec(kind=EntrypointKind.FUNCTION, entrypoint="train", payload=payload, cwd=str(host.folder))
    job = host.run(spec, ranks=2)
    answers = {cell.rank: cloudpickle.loads(cell.payload) for cell in host.of(job, CellFinished) if cell.ok}
    assert answers == {0: (0, 42), 1: (1, 42)}
    assert {cell.cell_id for cell in host.of(job, CellFinished)} == {"result"}


def test_a_value_that_cannot_be_pickled_is_told(host: AgentHost) -> None:
    payload = cloudpickle.dumps((lambda: (x for x in ()), (), {}))
    job = host.run(JobSpec(kind=EntrypointKind.FUNCTION, payload=payload, cwd=str(host.folder)))
    answer = host.answer(job, "result")
    assert not answer.ok
    assert "cannot be pickled" in answer.error


# --- processes of the program's own -----------------------------------------------------------------------------------

LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.tensor(i * i)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=3, num_workers=2, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
"""


def test_data_loader_workers_by_fork_and_spawn(host: AgentHost) -> None:
    job = host.run(host.spec(LOADERS), timeout=60)
    batches = [[0, 1, 4], [9, 16, 25]]
    assert host.log(job) == f"fork {batches}\nspawn {batches}\n"


def test_classes_of_the_script_can_be_pickled(host: AgentHost) -> None:
    assert (
        host.output("import pickle\nclass A: x = 3\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)")
        == "True __main__\n"
    )


def test_ranks_have_their_own_multiprocessing_key(host: AgentHost) -> None:
    job = host.run(host.spec("import multiprocessing as m; print(bytes(m.current_process().authkey).hex())"), ranks=2)
    assert host.log(job, 0) != host.log(job, 1)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"entrypoint": "missing.py"}, "there is no script"),
        ({"entrypoint": "x.py", "cwd": "/no/such/folder"}, "there is no directory /no/such/folder"),
        ({"entrypoint": "train.py", "python": "/no/python"}, "there is no interpreter /no/python"),
    ],
)
def test_what_cannot_be_started_is_refused_at_once(host: AgentHost, fields: dict[str, str], words: str) -> None:
    host.script("", "train.py")
    job = host.start(JobSpec(**{"cwd": str(host.folder), **fields}), ranks=2)
    assert words in host.refusal(job, timeout=2).reason
    assert len(host.of(job, LaunchFailed)) == 1
