"""What ranks write: all of it in the log, the newest of it soon in display, and no rank ever waits for it."""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from tests.integration.agent_host import AgentHost, agent_host, interactive
from workbench.spec import JobSpec
from workbench.telemetry import CellFinished, OutputWritten


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentHost]:
    """The module's agent; afterwards nothing that it started may run."""
    with agent_host(tmp_path_factory.mktemp("host")) as made:
        yield made


# --- logs and display -------------------------------------------------------------------------------------------------


def test_files_are_private(host: AgentHost) -> None:
    job = host.run(host.spec("print(1)"))
    folder = host.jobs_dir / job / "logs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "rank0.log").stat().st_mode) == 0o600


def test_stdout_and_stderr_are_told_apart_and_logged_in_order(host: AgentHost) -> None:
    text = """
        import sys, time
        for number in range(3):
            print("out", number); time.sleep(0.05)
            print("err", number, file=sys.stderr); time.sleep(0.05)
    """
    job = host.run(host.spec(text))
    assert host.log(job) == "out 0\nerr 0\nout 1\nerr 1\nout 2\nerr 2\n"
    assert host.shown(job) == host.log(job)
    for stream in ("stdout", "stderr"):
        shown = "".join(out.text for out in host.of(job, OutputWritten) if out.stream == stream)
        assert shown == "".join(f"{stream[3:]} {number}\n" for number in range(3))


def test_a_hundred_megabytes_neither_block_the_rank_nor_flood_the_display(host: AgentHost) -> None:
    text = """
        import os, sys, time
        line = ("x" * 98 + "\\n").encode()
        start = time.monotonic()
        for number in range(1_000_000 // 1000): sys.stdout.buffer.write(line * 1000)
        sys.stdout.flush()
        print("took", time.monotonic() - start, file=sys.stderr)
    """
    size = 99 * 1_000_000
    job = host.run(host.spec(text, log_limit=2**30), timeout=60)
    log = host.jobs_dir / job / "logs" / "rank0.log"
    with log.open("rb") as file:
        file.seek(-200, os.SEEK_END)
        seconds = float(file.read().split()[-1])
    assert log.stat().st_size - size < 100
    assert seconds < 5  # 20 MB/s on a loaded machine; a blocked rank would never end
    shown = host.of(job, OutputWritten)
    flushes = len({out.time for out in shown})
    assert flushes <= 5 * (shown[-1].time - shown[0].time) + 3
    assert max(len(out.text) for out in shown) <= 64 * 1024
    for former, later in itertools.pairwise(shown):
        assert later.offset == former.offset + len(former.text) + later.dropped
    assert shown[-1].offset + len(shown[-1].text) == log.stat().st_size


def test_a_log_stays_within_its_limit_and_its_positions_stay_valid(host: AgentHost) -> None:
    job = host.run(host.spec("for n in range(40_000): print(f'line {n:06}')", log_limit=2**17))
    folder = host.jobs_dir / job / "logs"
    kept = sum((folder / name).stat().st_size for name in ("rank0.log", "rank0.log.1"))
    assert 2**16 < kept <= 2**17
    page = host.agent.read_log(job, 0, tail=2, grep=None)
    assert page.text == "line 039998\nline 039999\n"
    assert page.next == 40_000 * 12
    assert host.agent.read_log(job, 0, tail=None, grep=None, since=page.next - 12).text == "line 039999\n"
    first = host.agent.read_log(job, 0, tail=None, grep=None, since=0)
    assert first.truncated
    assert first.start == 40_000 * 12 - kept
    assert host.agent.read_log(job, 0, tail=3, grep="0399").text.count("\n") == 3


def test_first_output_after_silence_is_shown_at_once(host: AgentHost) -> None:
    text = """
        import time
        for _ in range(5):
            time.sleep(0.3)
            print(time.time())
    """
    job = host.run(host.spec(text))
    lags = sorted(out.time - float(out.text) for out in host.of(job, OutputWritten))
    assert len(lags) == 5
    assert lags[2] < 0.02, lags


def test_output_without_a_newline_is_shown_while_the_rank_goes_on(host: AgentHost) -> None:
    job = host.start(
        host.spec("import sys, time\nsys.stdout.write('epoch 1 ...'); sys.stdout.flush()\ntime.sleep(1e6)")
    )
    host.says(job, "epoch 1 ...", timeout=2)
    host.stop(job)
    host.ended(job)


def test_progress_bars_are_shown_by_carriage_returns(host: AgentHost) -> None:
    job = host.start(host.spec("import sys, time\nsys.stderr.write('10%\\r20%\\r')\ntime.sleep(1e6)"))
    host.says(job, "20%\r", timeout=2)
    host.stop(job)
    host.ended(job)


def test_output_that_is_not_utf8_is_shown_and_kept(host: AgentHost) -> None:
    text = """
        import sys, time
        sys.stdout.buffer.write("caf\\u00e9 ".encode("latin-1")); sys.stdout.buffer.write("\\u00e9\\u4e16".encode()[:3])
        sys.stdout.flush(); time.sleep(0.4)
        sys.stdout.buffer.write("\\u4e16".encode()[1:] + b"\\n"); sys.stdout.flush()
    """
    job = host.run(host.spec(text))
    assert host.shown(job) == "caf� é世\n"
    assert (host.jobs_dir / job / "logs" / "rank0.log").read_bytes() == b"caf\xe9 \xc3\xa9\xe4\xb8\x96\n"


def test_unbuffered_python_is_respected(host: AgentHost) -> None:
    spec = host.spec("import time\nprint('no newline', end='')\ntime.sleep(1e6)", env={"PYTHONUNBUFFERED": "1"})
    job = host.start(spec)
    host.says(job, "no newline", timeout=3)
    host.stop(job)
    host.ended(job)


def test_the_io_encoding_is_respected(host: AgentHost) -> None:
    assert host.output(
        "import sys; print(sys.stdout.encoding, sys.stderr.encoding)", env={"PYTHONIOENCODING": "latin-1"}
    )
    assert host.output("print('\\ud800')", env={"PYTHONIOENCODING": "utf-8:replace"}) == "?\n"


def test_a_full_disk_neither_blocks_the_rank_nor_goes_unsaid(host: AgentHost, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        job = "full-disk"
        (host.jobs_dir / job).mkdir(parents=True)
        (disk / "logs").mkdir()
        (host.jobs_dir / job / "logs").symlink_to(disk / "logs")
        host.run(host.spec("for n in range(100_000): print(f'line {n:06}')\nprint('last')"), job_id=job, timeout=20)
        shown = host.shown(job)
        assert shown.count("output is shown but not kept") == 1
        assert "No space left on device" in shown
        assert shown.endswith("last\n")
        assert host.ended(job)[0].exit_code == 0
    finally:
        (host.jobs_dir / job / "logs").unlink(missing_ok=True)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_jobs_id_cannot_lead_out_of_the_jobs_folder(host: AgentHost) -> None:
    for name in ("..", "a/b", "../x", ""):
        with pytest.raises(ValueError, match="is no job id"):
            host.agent.read_log(name, 0, tail=1, grep=None)


# --- cells ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(host: AgentHost) -> Iterator[str]:
    """An interactive job of 2 ranks."""
    job = host.start(interactive(host.folder), ranks=2)
    host.started(job, 2)
    yield job
    host.stop(job)
    host.ended(job, 2)


def answers(host: AgentHost, job: str, cell_id: str) -> dict[int, CellFinished]:
    def found() -> dict[int, CellFinished]:
        those = {cell.rank: cell for cell in host.of(job, CellFinished) if cell.cell_id == cell_id}
        return those if len(those) == 2 else {}

    return host.until(job, found)


def test_cells_run_on_all_ranks_and_keep_their_state(host: AgentHost, cells: str) -> None:
    host.execute(cells, "c1", "import os\nx = int(os.environ['RANK'])", ranks=(0, 1))
    host.execute(cells, "c2", "x * 10", ranks=(0, 1))
    assert {rank: cell.data["text/plain"] for rank, cell in answers(host, cells, "c2").items()} == {0: "0", 1: "10"}


def test_a_cells_last_output_comes_before_its_answer(host: AgentHost, cells: str) -> None:
    for number in range(10):
        host.execute(cells, f"c{number}", f"for n in range(500): print('out', n)\nprint('end {number}', end='')")
        host.answer(cells, f"c{number}")
        told = host.news[cells]
        answer = next(
            i for i, news in enumerate(told) if isinstance(news, CellFinished) and news.cell_id == f"c{number}"
        )
        shown = "".join(news.text for news in told[:answer] if isinstance(news, OutputWritten) and news.rank == 0)
        assert shown.endswith(f"end {number}")


def test_a_cells_round_trip_is_short(host: AgentHost, cells: str) -> None:
    host.execute(cells, "warm", "1")
    host.answer(cells, "warm")
    seconds = []
    for number in range(9):
        start = time.monotonic()
        host.execute(cells, f"c{number}", "print(1)")
        host.answer(cells, f"c{number}")
        seconds.append(time.monotonic() - start)
    assert sorted(seconds)[4] < 0.03, seconds


def test_values_are_pushed_and_pulled(host: AgentHost, cells: str) -> None:
    big = "y" * 3_000_000  # more than a socket holds
    host.push(cells, "p1", "value", cloudpickle.dumps({"a": big}))
    assert host.answer(cells, "p1").ok
    host.pull(cells, "p2", "len(value['a'])")
    assert cloudpickle.loads(host.answer(cells, "p2").payload) == 3_000_000
    host.pull(cells, "p3", "value")
    assert cloudpickle.loads(host.answer(cells, "p3").payload) == {"a": big}


def test_an_error_in_a_cell_is_answered_and_the_rank_lives_on(host: AgentHost, cells: str) -> None:
    host.execute(cells, "bad", "def f():\n    raise ValueError('no')\nf()")
    answer = host.answer(cells, "bad")
    assert (answer.ok, answer.error) == (False, "ValueError: no")
    assert "raise ValueError('no')" in answer.traceback
    host.execute(cells, "good", "7")
    assert host.answer(cells, "good").data["text/plain"] == "7"


@pytest.mark.parametrize("source", ["import time; time.sleep(1e6)", "while True: pass"])
def test_an_interrupt_ends_the_cell_and_not_the_rank(host: AgentHost, cells: str, source: str) -> None:
    host.execute(cells, "long", f"kept = 5\nprint('begun')\n{source}")
    host.says(cells, "begun")
    start = time.monotonic()
    host.interrupt(cells, ranks=(0, 1))  # rank 1 runs no cell
    answer = host.answer(cells, "long", timeout=3)
    assert time.monotonic() - start < 1
    assert answer.error.startswith("KeyboardInterrupt")
    host.execute(cells, "after", "kept", ranks=(0, 1))
    assert answers(host, cells, "after")[0].data["text/plain"] == "5"


def test_an_interrupt_ends_a_cell_inside_a_collective(host: AgentHost, cells: str) -> None:
    both = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')"
    host.execute(cells, "init", both, ranks=(0, 1))
    assert all(cell.ok for cell in answers(host, cells, "init").values()), answers(host, cells, "init")
    host.execute(cells, "hang", "print('begun')\ndist.all_reduce(torch.ones(1))")
    host.says(cells, "begun")
    time.sleep(0.1)
    host.interrupt(cells, ranks=(0,))
    assert host.answer(cells, "hang", timeout=3).error.startswith("KeyboardInterrupt")
    host.execute(cells, "alive", "'yes'", ranks=(0, 1))
    assert all(cell.ok for cell in answers(host, cells, "alive").values())


def test_whoever_asks_what_is_not_there_is_answered(host: AgentHost, cells: str) -> None:
    host.execute(cells, "none", "1", ranks=(5,))
    assert host.answer(cells, "none").error == "rank 5 is not running"
    host.execute("no-such-job", "c", "1")
    assert "not running" in host.answer("no-such-job", "c").error
    host.pull("no-such-job", "p", "x")
    assert not host.answer("no-such-job", "p").ok
    script = host.start(host.spec("import time; time.sleep(1e6)"))
    host.started(script)
    host.execute(script, "c", "1")
    assert "not an interactive job" in host.answer(script, "c").error
    host.interrupt(script)  # would end a script
    host.stop(script)
    assert host.ended(script)[0].signal == signal.SIGKILL


def test_a_rank_that_dies_in_a_cell_answers_it(host: AgentHost) -> None:
    job = host.start(interactive(host.folder))
    host.started(job)
    host.execute(job, "fatal", "import os, signal\nprint('last words')\nos.kill(os.getpid(), signal.SIGKILL)")
    answer = host.answer(job, "fatal")
    assert (answer.ok, answer.error) == (False, "rank 0 ended before it had answered")
    assert host.ended(job)[0].signal == signal.SIGKILL
    assert "last words" in host.shown(job)


def test_a_cell_that_leaves_the_interpreter_is_answered(host: AgentHost) -> None:
    job = host.start(interactive(host.folder))
    host.started(job)
    host.execute(job, "leave", "import os; os._exit(3)")
    assert not host.answer(job, "leave").ok
    assert host.ended(job)[0].exit_code == 3


def test_the_cells_of_a_job_that_is_stopped_are_answered(host: AgentHost) -> None:
    job = host.start(interactive(host.folder))
    host.started(job)
    host.execute(job, "long", "print('begun')\nimport time; time.sleep(1e6)")
    host.says(job, "begun")
    host.stop(job)
    assert not host.answer(job, "long").ok


TWENTY = textwrap.dedent("""
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    """)


def test_twenty_cells_that_each_train_and_destroy_their_group(host: AgentHost, cells: str) -> None:
    for number in range(20):
        host.execute(cells, f"train{number}", TWENTY, ranks=(0, 1))
        assert all(cell.ok for cell in answers(host, cells, f"train{number}").values()), number


def test_source_jobs_run_from_cells_of_two_megabytes(host: AgentHost) -> None:
    from workbench.spec import EntrypointKind

    source = "x = '''" + "a\n" * 500_000 + "'''\nprint(len(x))"
    assert host.log(host.run(JobSpec(kind=EntrypointKind.SOURCE, source=source, cwd=str(host.folder)))) == "1000000\n"
