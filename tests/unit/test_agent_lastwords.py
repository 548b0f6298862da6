"""What is read in the log of a rank that crashed."""

from __future__ import annotations

from pathlib import Path

from workbench.agent.lastwords import HERE, MOST, last_words, read_end

MAIN = f"""  File "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778 in _wrapped_call_impl
  File "{HERE}/training/probes.py", line 187 in call
  File "/home/ana/train.py", line 12 in step
  File "/home/ana/train.py", line 40 in <module>
  File "{HERE}/agent/programs.py", line 51 in _script
  File "{HERE}/agent/bootstrap.py", line 43 in <module>
"""
SEGFAULT = f"""step 3
Fatal Python error: Segmentation fault

Thread 0x00007f55b3e696c0 (most recent call first):
  File "{HERE}/agent/wire.py", line 177 in receive_some

Current thread 0x00007f55d6a68b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
{MAIN}
Extension modules: numpy._core (total: 1)
"""
GLOO = f"""terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /x/pair.cc:456] op.preamble.length <= op.nbytes. 20 vs 8. Received data size doesn't match
Fatal Python error: Aborted

Thread 0x00007f55b3e696c0 (most recent call first):
  File "{HERE}/agent/wire.py", line 177 in receive_some

Thread 0x00007f55d6a68b80 (most recent call first):
{MAIN}
"""


def test_a_segfault_names_the_users_line_and_keeps_the_stack() -> None:
    words = last_words(SEGFAULT)
    assert words.text == "in train.py:12 in step"
    lines = words.stack.splitlines()
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert "string_at" in lines[1] and lines[-1].endswith("line 40 in <module>")
    assert not any("bootstrap" in line or "receive_some" in line for line in lines)


def test_an_abort_in_another_thread_has_the_runtimes_words_and_the_main_threads_stack() -> None:
    words = last_words(GLOO)
    assert words.said == (
        "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 20 vs 8. Received data size doesn't match"
    )
    assert words.where == "train.py:12 in step" and "line 40 in <module>" in words.stack


def test_the_last_crash_of_a_log_counts() -> None:
    assert last_words(SEGFAULT + GLOO).said.startswith("gloo")
    assert last_words(GLOO + SEGFAULT).stack.startswith("Fatal Python error: Segmentation fault")


def test_a_log_without_a_crash_says_nothing() -> None:
    assert last_words("step 1\nstep 2\n").text == ""
    assert last_words("").stack == ""
    assert last_words("Fatal Python error: Aborted\n").stack == ""


def test_only_the_end_of_a_log_and_only_this_generations(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"old\n" + b"x" * (2 * MOST) + b"new\n")
    assert len(read_end(str(log), 0)) == MOST
    assert read_end(str(log), log.stat().st_size - 4) == "new\n"
    assert read_end(str(tmp_path / "none"), 0) == ""
