"""The magics in a real kernel, over a real pool and gloo ranks: what a person in a notebook sees, and when."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from workbench.saved.parameters import parameters
from workbench.session import Session
from workbench.state import JobPhase

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:zmq", "ignore::ResourceWarning")


@dataclass
class Shown:
    """What one cell showed: `(seconds after it began, kind, content)`."""

    items: list[tuple[float, str, Any]] = field(default_factory=list)
    took: float = 0.0
    freed: float = 0.0  # s between the interrupt and the end of the cell

    def stream(self, name: str) -> str:
        return "".join(text for _, kind, text in self.items if kind == name)

    @property
    def displays(self) -> list[str]:
        return [data["text/plain"] for _, kind, data in self.items if kind in ("display_data", "execute_result")]

    @property
    def error(self) -> str:
        return "\n".join(text for _, kind, text in self.items if kind == "error")


class Kernel:
    """One kernel and what its cells show."""

    def __init__(self) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=60)

    def run(
        self, code: str, *, timeout: float = 30.0, interrupt_after: float | None = None, tags: Sequence[str] = ()
    ) -> Shown:
        """Run a cell to its end; with `interrupt_after` press the stop button. `tags`: as JupyterLab sends them."""
        shown, began, pressed = Shown(), time.monotonic(), None
        sent = self._send(code, tags)
        while time.monotonic() - began < timeout:
            if interrupt_after is not None and pressed is None and time.monotonic() - began > interrupt_after:
                pressed = time.monotonic()
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=0.02)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            at, content = time.monotonic() - began, message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                shown.took, shown.freed = at, time.monotonic() - (pressed or began)
                return shown
            self._take(shown, at, message["msg_type"], content)
        raise AssertionError(f"the cell did not end within {timeout} s: {code!r} showed {shown.items}")

    def _send(self, code: str, tags: Sequence[str]) -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = self.client.session.msg("execute_request", content, metadata={"tags": list(tags), "trusted": True})
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _take(self, shown: Shown, at: float, kind: str, content: Any) -> None:
        if kind == "stream":
            shown.items.append((at, content["name"], content["text"]))
        elif kind in ("display_data", "execute_result", "update_display_data"):
            shown.items.append((at, kind, content["data"]))
        elif kind == "error":
            shown.items.append((at, "error", re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))))

    def restart(self) -> None:
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def shared_kernel(shared_session: Session) -> Iterator[Kernel]:
    """A kernel with the extension loaded, in the shared home."""
    kernel = Kernel()
    shown = kernel.run("%load_ext workbench")
    assert shown.items == []
    yield kernel
    kernel.close()


@pytest.fixture
def kernel(shared_kernel: Kernel, session: Session) -> Kernel:
    return shared_kernel


@pytest.fixture
def ranks(kernel: Kernel) -> Kernel:
    """The kernel with an interactive job of 2 ranks that has run a cell."""
    assert kernel.run("job = %dtrain launch --interactive -n 2   # two of them").items == []
    kernel.run("%%dtrain\nimport os, time\nr = int(os.environ['RANK'])")
    return kernel


def test_a_mistake_has_no_traceback(kernel: Kernel) -> None:
    shown = kernel.run("%dtrain lanch train.py")
    assert shown.error == ""
    assert shown.stream("stderr").startswith("UsageError: there is no verb 'lanch' (did you mean launch?")
    shown = kernel.run("%dtrain status nope-1")
    assert "no job 'nope-1'" in shown.stream("stderr")


def test_state_stays_and_values_come_back_by_rank(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain\nprint('hello', r)\nr * 10")
    assert sorted(shown.stream("stdout").splitlines()) == ["[rank 0] hello 0", "[rank 1] hello 1"]
    assert shown.displays == ["rank 0: 0\nrank 1: 10"]
    assert ranks.run("%%dtrain -r 1\nr").displays == ["rank 1: 1"]
    assert ranks.run("%%dtrain\n'same'").displays == ["ranks 0–1: 'same'"]
    assert ranks.run("%%dtrain\nr;").items == []
    assert ranks.run("%%dtrain\nimport sys; print('oops', file=sys.stderr)").stream("stderr").count("oops") == 2


def test_rich_values_stay_rich(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain -r 0\nclass Rich:\n    def _repr_html_(self): return '<b>rich</b>'\nRich()")
    bundles = [data for _, kind, data in shown.items if kind == "display_data"]
    assert bundles[0] == {"text/plain": "rank 0:"}
    assert bundles[1]["text/html"] == "<b>rich</b>"


def test_a_warm_cell_is_quick(ranks: Kernel) -> None:
    took = sorted(ranks.run("%%dtrain\nr").took for _ in range(15))
    assert took[7] < 0.1


def test_output_comes_while_the_cell_runs(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain\nfor k in range(5):\n    print('step', k, flush=True)\n    time.sleep(0.4)")
    first = next(at for at, kind, _ in shown.items if kind == "stdout")
    assert first < 1.0 < shown.took
    assert shown.stream("stdout").count("step 4") == 2


def test_the_first_exception_is_shown_within_a_second_and_frees_the_cell(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain\nif r == 1: raise ValueError('bad batch')\ntime.sleep(20)")
    assert shown.took < 1.0
    assert "rank 1:\nTraceback (most recent call last)" in shown.error
    assert "ValueError: bad batch" in shown.error
    assert "rank 0 still in the cell" in shown.error
    assert "workbench/verbs" not in shown.error
    assert len(shown.error.encode()) < 2048
    assert "interrupted the cell on all ranks" in ranks.run("%dtrain interrupt").stream("stdout")
    assert ranks.run("%%dtrain\nr").displays == ["rank 0: 0\nrank 1: 1"]


def test_identical_exceptions_are_shown_once(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain\n1 / 0")
    assert shown.error.count("Traceback") == 1
    assert shown.error.startswith("ranks 0–1:")


def test_the_stop_button_frees_the_cell_and_hurts_nobody(ranks: Kernel, session: Session) -> None:
    before = {rank.pid for rank in session.attach(session.pool_status().running[0]).ranks}
    hang = "if r == 0:\n    import torch.distributed as dist\n    dist.init_process_group('gloo')"  # for ever, alone
    code = f"%%dtrain\n{hang}\nwhile True: pass"
    shown = ranks.run(code, interrupt_after=1.5)
    assert shown.freed < 0.3  # 0.1 s of ours, and the notebook's own way there and back
    assert "its ranks live on" in shown.error
    assert "Traceback" not in shown.error
    assert all(psutil.pid_exists(pid) for pid in before)
    assert ranks.run("%%dtrain\nr").displays == ["rank 0: 0\nrank 1: 1"]


def test_a_killed_rank_is_told_within_half_a_second(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain\nif r == 1: os.kill(os.getpid(), 9)\ntime.sleep(20)")
    assert shown.took < 0.5
    assert "rank 1 killed by SIGKILL" in shown.error
    assert "log: " in shown.error
    assert len(shown.error.encode()) < 2048
    shown = ranks.run("%%dtrain\nr")
    assert "start another with: %dtrain launch --interactive -n 2" in shown.stream("stderr")


def test_values_travel(ranks: Kernel) -> None:
    ranks.run("batch = {'x': [1, 2]}\n%dtrain push batch")
    assert ranks.run("%%dtrain\nbatch['x'][r]").displays == ["rank 0: 1\nrank 1: 2"]
    assert ranks.run("y = %dtrain pull r -r 1\ny, r").displays == ["(1, 1)"]
    assert ranks.run("%dtrain pull r*2").displays == ["{0: 0, 1: 2}"]


def test_a_cell_as_a_program_of_its_own_and_the_wait_for_it(kernel: Kernel) -> None:
    shown = kernel.run("%%dtrain launch -n 2 --name prog -- --lr 0.1\nimport sys\nprint(sys.argv[1:])")
    assert shown.displays[0].startswith("prog-")
    assert "<table" in next(data["text/html"] for _, kind, data in shown.items if kind == "execute_result")
    waited = kernel.run("%dtrain wait")
    last = [data["text/plain"] for _, kind, data in waited.items if "display_data" in kind][-1]
    assert "SUCCEEDED" in last
    assert kernel.run("%dtrain logs -r 0").displays == ["['--lr', '0.1']"]


def test_a_cell_that_is_tagged_parameters_says_so_in_its_text(kernel: Kernel, session: Session) -> None:
    """As papermill wants it; `dtrain rerun --set` then knows its names."""
    shown = kernel.run("%%dtrain launch -n 1 --name tagged\nlr = 0.1\nprint(lr)", tags=["parameters"])
    job = session.attach(
        next(data["text/plain"] for _, kind, data in shown.items if kind == "execute_result").split()[0]
    )
    assert parameters(job.spec.source).keys() == {"lr"} and job.wait(30) is JobPhase.SUCCEEDED


def test_stopping_to_wait_stops_nothing_else(kernel: Kernel, session: Session) -> None:
    kernel.run("job = %dtrain launch --name slow -m timeit -n 1 -- -n 1 'import time; time.sleep(60)';")
    (running,) = session.pool_status().running
    shown = kernel.run("%dtrain wait", interrupt_after=1.0)
    assert shown.freed < 0.3
    assert shown.error == f"stopped waiting; {running} goes on"
    assert session.attach(running).phase.value in ("LAUNCHING", "HEALTHY")
    assert kernel.run("%dtrain status").displays[0].startswith(running)


def test_a_job_that_failed_is_told_with_the_ranks_own_traceback(kernel: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\n")
    shown = kernel.run(f"%dtrain launch {script} -n 2 --wait")
    assert "ValueError: bad batch" in shown.error
    assert "rank 1 raised ValueError: bad batch" in shown.error
    assert "workbench/" not in shown.error
    assert len(shown.error.encode()) < 2048


def test_much_output_stays_small_in_the_notebook(ranks: Kernel) -> None:
    shown = ranks.run("%%dtrain -r 0\nfor k in range(60_000): print(k, 'x' * 90)", timeout=60)
    assert len(shown.stream("stdout")) < 260_000
    assert "59999 " in shown.stream("stdout")
    assert "characters are not shown" in shown.stream("stderr")
    writes = sum(kind in ("stdout", "stderr") for _, kind, _ in shown.items)
    assert writes <= shown.took * 20 + 10


def test_no_other_cell_gets_our_output(kernel: Kernel) -> None:
    kernel.run("%%dtrain launch -n 2\nimport time\nfor k in range(20):\n    print(k, flush=True)\n    time.sleep(0.05)")
    shown = kernel.run("import time\ntime.sleep(1.5)\nprint('mine')")
    assert [content for _, _, content in shown.items] == ["mine\n"]


def test_a_restarted_kernel_finds_its_ranks_again(ranks: Kernel, session: Session) -> None:
    (job_id,) = session.pool_status().running
    ranks.run("%%dtrain\nkept = r + 40")
    ranks.restart()
    ranks.run("%load_ext workbench")
    assert f"attach to one with: %dtrain attach {job_id}" in ranks.run("%%dtrain\nkept").stream("stderr")
    assert ranks.run("%dtrain status").displays[0].startswith(job_id)  # the only one that runs
    assert ranks.run(f"%dtrain attach {job_id}").displays[0].startswith(job_id)
    assert ranks.run("%%dtrain\nkept").displays == ["rank 0: 40\nrank 1: 41"]


def test_a_cell_behind_one_that_hangs_says_so(ranks: Kernel) -> None:
    ranks.run("%%dtrain\nif r == 1: raise ValueError('bad')\ntime.sleep(30)")
    ranks.run("import time; time.sleep(0.5)")
    shown = ranks.run("%%dtrain\nr", interrupt_after=3.0)
    assert "rank 0 still in an earlier cell" in shown.stream("stderr")
    assert shown.freed < 0.3
    assert ranks.run("%%dtrain\nr").displays == ["rank 0: 0\nrank 1: 1"]


def test_completion_over_the_wire(kernel: Kernel) -> None:
    def matches(code: str) -> list[str]:
        reply = kernel.client.complete(code, reply=True, timeout=20)
        return list(reply["content"]["matches"])

    assert matches("%dtrain launch --nproc") == ["--nproc-per-node"]
    assert matches("%dtrain pool st") == ["start", "stop", "status"]
