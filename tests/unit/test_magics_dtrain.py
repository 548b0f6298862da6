"""The magics in a real IPython shell, over a session by the letter of the real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell

import workbench
from tests.unit.fake_session import FakeScreen, FakeSession, answer, output, state, update
from workbench import magics
from workbench.errors import PoolUnavailableError, RankFailedError
from workbench.magics import DtrainMagics, our_words, split_line
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import JobPhase
from workbench.verbs.table import verb_names


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    """An IPython shell of its own, with the extension loaded."""
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.Completer.use_jedi = False
    workbench.load_ipython_extension(made)
    yield made
    workbench.unload_ipython_extension(made)
    InteractiveShell.clear_instance()


@pytest.fixture
def session(shell: InteractiveShell) -> FakeSession:
    """What the magics' context opens, with a screen that remembers."""
    fake = FakeSession("old-1", running=["cells-1"])
    spec = JobSpec(kind=EntrypointKind.INTERACTIVE, nproc_per_node=2)
    fake.known["cells-1"].script = [update(state("cells-1", spec=spec))]
    context = loaded(shell).context
    context.opener, context.clock, context.sleep = lambda *_, **__: fake, fake.clock, fake.clock.sleep
    context.screen, context.job_id, context.interactive_id = FakeScreen(), "", ""
    context._session = context._opened = None
    return fake


def loaded(shell: InteractiveShell) -> DtrainMagics:
    found = shell.magics_manager.registry["DtrainMagics"]
    assert isinstance(found, DtrainMagics)
    return found


def shown(shell: InteractiveShell) -> list[tuple[str, Any]]:
    screen = loaded(shell).context.screen
    assert isinstance(screen, FakeScreen)
    return screen.shown


# --- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words", "quiet"),
    [
        ("launch a.py -n 2;", ["launch", "a.py", "-n", "2"], True),
        ("launch a.py ;  # why; not", ["launch", "a.py"], True),
        ("jobs # all of them", ["jobs"], False),
        ("# nothing", [], False),
        ("logs --grep '# 1;'", ["logs", "--grep", "# 1;"], False),
        ('logs --grep "it\'s # so"', ["logs", "--grep", "it's # so"], False),
        ("launch a.py -- --tag a#1", ["launch", "a.py", "--", "--tag", "a#1"], False),
        (r"launch a\ b.py", ["launch", "a b.py"], False),
        ("", [], False),
    ],
)
def test_lines(line: str, words: list[str], quiet: bool) -> None:
    assert split_line(line) == (words, quiet)


def test_an_open_quote_is_told(shell: InteractiveShell, session: FakeSession) -> None:
    with pytest.raises(IPythonUsageError, match="a quote is not closed: logs --grep 'x"):
        shell.run_line_magic("dtrain", "logs --grep 'x")


# --- %dtrain ----------------------------------------------------------------------------------------------------------


def test_launch_returns_the_job_and_prints_nothing(shell: InteractiveShell, session: FakeSession) -> None:
    shell.user_ns["lr"] = 0.3
    shell.run_cell("job = %dtrain launch train.py -n {1+1} -- --lr $lr", store_history=False)
    assert shell.user_ns["job"] is session.known["new-1"]
    assert session.launched[0]["args"] == ("--lr", "0.3")
    assert session.launched[0]["nproc_per_node"] == 2
    assert shown(shell) == []


def test_a_semicolon_keeps_quiet(shell: InteractiveShell, session: FakeSession) -> None:
    session.was_started = True
    assert shell.run_line_magic("dtrain", "launch train.py --lr 0.1;") is None
    assert session.launched[0]["args"] == ("--lr", "0.1")
    assert shown(shell) == []


def test_help_prints_and_returns(shell: InteractiveShell, session: FakeSession) -> None:
    for line, words in [
        ("", "usage: %dtrain VERB"),
        ("--help", "usage: %dtrain VERB"),
        ("launch -h", "usage: %dtrain launch"),
    ]:
        assert shell.run_line_magic("dtrain", line) is None
        assert shown(shell)[-1][1].startswith(words)
    shell.run_cell_magic("dtrain", "--help", "x")
    assert shown(shell)[-1][1].startswith("usage: %%dtrain [options]")


def test_mistakes_are_usage_errors(shell: InteractiveShell, session: FakeSession) -> None:
    for line, words in [
        ("lanch a.py", "did you mean launch"),
        ("status nope", "no job 'nope'"),
        ("-r 0", "only a cell runs on ranks"),
        ("launch a.py --nprocs 2 --", "has no option --nprocs"),
    ]:
        with pytest.raises(IPythonUsageError, match=words):
            shell.run_line_magic("dtrain", line)


def test_other_errors_are_shown_shortly(shell: InteractiveShell, session: FakeSession) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PoolUnavailableError("pool default does not run", hint="start it with: %dtrain up")

    loaded(shell).context.opener = refuse
    with pytest.raises(PoolUnavailableError) as caught:
        shell.run_line_magic("dtrain", "jobs")
    assert caught.value._render_traceback_() == [  # type: ignore[attr-defined]
        "PoolUnavailableError: pool default does not run",
        "start it with: %dtrain up",
    ]


def test_text_shows_as_text_and_lists_as_tables(shell: InteractiveShell, session: FakeSession) -> None:
    session.known["cells-1"].pages = {0: "it's\n"}
    format_plain = shell.display_formatter.formatters["text/plain"]  # type: ignore[union-attr]
    assert format_plain(shell.run_line_magic("dtrain", "logs cells-1 -r 0")) == "it's"
    jobs = shell.run_line_magic("dtrain", "jobs")
    assert len(jobs) == 2
    assert format_plain(jobs) == jobs.table
    assert isinstance(shell.run_line_magic("dtrain", "jobs --json"), list)
    assert isinstance(shell.run_line_magic("dtrain", "status cells-1 --json"), dict)


def test_push_and_pull(shell: InteractiveShell, session: FakeSession) -> None:
    shell.user_ns["batch"] = [1]
    shell.run_line_magic("dtrain", "push batch")
    session.known["cells-1"].values = {0: 5, 1: 6}
    assert shell.run_line_magic("dtrain", "pull loss -r 1") == shell.user_ns["loss"] == 6
    assert session.known["cells-1"].calls == [("push", "batch", [1], None)]


# --- %%dtrain ---------------------------------------------------------------------------------------------------------


def test_a_cell_runs_on_the_interactive_job(shell: InteractiveShell, session: FakeSession) -> None:
    shell.run_line_magic("dtrain", "attach cells-1;")
    session.known["cells-1"].cell = [[output(0, "hi\n"), answer(0, "1"), answer(2, "1")]]
    shell.run_cell_magic("dtrain", "-r 0,2", "x = 1\nx")
    assert session.known["cells-1"].calls == [("execute", "x = 1\nx", (0, 2))]
    assert shown(shell) == [("out", "[rank 0] hi\n"), ("display", {"text/plain": "ranks 0, 2: 1"})]


def test_a_cell_of_another_job(shell: InteractiveShell, session: FakeSession) -> None:
    session.known["cells-1"].cell = [[answer(0), answer(1)]]
    shell.run_cell_magic("dtrain", "--job cells", "x")
    assert session.known["cells-1"].calls == [("execute", "x", None)]


def test_a_cell_without_ranks_says_how_to_come_by_some(shell: InteractiveShell, session: FakeSession) -> None:
    words = r"no interactive job.*attach to one with: %dtrain attach cells-1; or start one with: %dtrain launch --inter"
    with pytest.raises(IPythonUsageError, match=words):
        shell.run_cell_magic("dtrain", "", "x")


@pytest.mark.parametrize(
    ("line", "cell", "words"),
    [
        ("", " \n\n", "the cell is empty"),
        ("launch", "  \n", "the cell is empty"),
        ("jobs", "x", "jobs takes no cell .write it in a line: %dtrain jobs"),
        ("-r x", "x", "-r wants ranks"),
        ("--jb y", "x", "did you mean --job"),
        ("launch a.py", "x", "SCRIPT and a cell were given"),
        ("lanch", "x", "did you mean launch"),
    ],
)
def test_cells_that_cannot_be(shell: InteractiveShell, session: FakeSession, line: str, cell: str, words: str) -> None:
    with pytest.raises(IPythonUsageError, match=words):
        shell.run_cell_magic("dtrain", line, cell)
    assert session.launched == []


def test_a_cell_as_a_program_of_its_own(shell: InteractiveShell, session: FakeSession) -> None:
    job = shell.run_cell_magic("dtrain", "launch -n 2 --name x -- --lr 0.1", "print(1)\n")
    assert job is session.known["new-1"]
    assert session.launched == [
        {"entrypoint": None, "source": "print(1)\n", "args": ("--lr", "0.1"), "nproc_per_node": 2, "name": "x"}
    ]


def test_an_exception_of_a_rank_is_shown_as_its_own(
    shell: InteractiveShell, session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    session.known["cells-1"].cell = [
        [answer(1, error="ValueError: bad", traceback="Traceback (most recent call last)\nValueError: bad")]
    ]
    result = shell.run_cell("%%dtrain --job cells-1\nraise ValueError('bad')", store_history=False)
    assert isinstance(result.error_in_exec, RankFailedError)
    shown_text = "".join(capsys.readouterr())
    assert "rank 1:\nTraceback (most recent call last)\nValueError: bad" in shown_text
    assert "verbs/cells.py" not in shown_text
    assert "magics.py" not in shown_text


def test_an_interrupt_is_one_line(
    shell: InteractiveShell, session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    session.known["old-1"].script = [update(state("old-1", JobPhase.HEALTHY)), KeyboardInterrupt()]
    result = shell.run_cell("%dtrain wait old-1", store_history=False)
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "".join(capsys.readouterr()).strip() == "stopped waiting; old-1 goes on"


# --- documentation, completion, loading -------------------------------------------------------------------------------


def test_every_verb_is_in_the_docstring(shell: InteractiveShell) -> None:
    text = shell.object_inspect("%dtrain")["docstring"]
    for name in verb_names():
        assert f"  {name} " in text or name in ("pool start", "pool stop", "pool status"), name
    assert text.count("%dtrain") > 5


def completions(shell: InteractiveShell, text: str, cell: str | None = None) -> list[str]:
    whole = text if cell is None else f"{text}\n{cell}"
    with provisionalcompleter():
        return [item.text for item in shell.Completer.completions(whole, len(text))]


def test_completion_is_ours_and_nothing_else(shell: InteractiveShell, session: FakeSession) -> None:
    loaded(shell).context._session = session  # type: ignore[assignment]
    assert completions(shell, "%dtrain la") == ["launch"]
    assert completions(shell, "%dtrain launch --nproc") == ["--nproc-per-node"]
    assert completions(shell, "%dtrain status ") == ["old-1", "cells-1"]
    assert completions(shell, "job = %dtrain launch --ma") == ["--max-restarts", "--master-port", "--max-steps"]
    offered = completions(shell, "%%dtrain ", "import os")
    assert offered[-1] == "launch"
    assert set(offered[:-1]) == {"--rank", "--ranks", "--job", "--pool", "--address", "--quiet", "--help"}
    assert completions(shell, "%%dtrain --jo", "x = 1") == ["--job"]
    assert completions(shell, "%%dtrain launch --na", "x = 1") == ["--name"]


def test_other_completion_is_untouched(shell: InteractiveShell, session: FakeSession) -> None:
    shell.user_ns["launch_pad"] = 1
    assert "launch_pad" in completions(shell, "launch_p")
    assert our_words("dtrain la", 0) is None
    assert our_words("x = 1  # %dtrain la", 0) is None
    assert our_words("%%dtrain la", 3) is None
    assert our_words("%dtrain", 0) is None
    assert our_words("%dtrain launch ", 5) == ["%", "launch", ""]


def test_completion_never_starts_or_waits_for_a_pool(shell: InteractiveShell, session: FakeSession) -> None:
    loaded(shell).context.opener = lambda *_, **__: pytest.fail("a session was opened")
    assert loaded(shell)._complete(["%", "status", "t"]) == []


def test_loading_twice_is_loading_once_and_unloading_is_whole() -> None:
    shell = InteractiveShell()
    before = len(shell.Completer.custom_matchers)
    for _ in range(2):
        magics.load_ipython_extension(shell)
    assert len(shell.Completer.custom_matchers) == before + 1
    assert shell.find_line_magic("dtrain") is not None
    for _ in range(2):
        magics.unload_ipython_extension(shell)
    assert len(shell.Completer.custom_matchers) == before
    assert shell.find_line_magic("dtrain") is None
    assert shell.find_cell_magic("dtrain") is None
    magics.load_ipython_extension(shell)
    assert shell.find_line_magic("dtrain") is not None


def test_load_ext_is_light_and_quick() -> None:
    code = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = time.process_time()
shell.run_line_magic("load_ext", "workbench")
took = time.process_time() - before
heavy = {"torch", "panel", "bokeh", "distributed", "dask", "ipywidgets", "pandas", "numpy"} & set(sys.modules)
assert shell.find_line_magic("dtrain") is not None
print(took, sorted(heavy))
"""
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        took, _, heavy = done.stdout.strip().partition(" ")
        assert heavy == "[]"
        times.append(float(took))
    assert sorted(times)[1] < 0.3
