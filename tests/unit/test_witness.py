"""The Flight Recorder's dump by group, stacks by our own handler in py-spy's form, and the program's own line."""

from __future__ import annotations

from workbench.agent.frames import find_place, shorten, shorten_all
from workbench.agent.witness import as_spy
from workbench.training.witness import read_trace

SPY = """Process 7: python train.py
Python v3.11.7

Thread 9 (idle): "other"
    wait (/usr/lib/python3.11/threading.py:320)
Thread 7 (active): "MainThread"
    match (/usr/lib/python3.11/re/__init__.py:166)
    call (/code/workbench/training/communication.py:52)
    load (/home/me/project/pack/data.py:41)
    <module> (/home/me/project/train.py:9)
"""
FAULT = """Current thread 0x00007f01 (most recent call first):
  File "/code/workbench/training/control.py", line 90 in _listen

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/home/me/project/train.py", line 9 in <module>
"""


def test_the_programs_innermost_line_and_what_it_calls() -> None:
    assert find_place(SPY, "/home/me/project") == ("pack/data.py:41 in load", "match (re/__init__.py)")
    assert find_place(SPY).where == "data.py:41 in load"
    assert find_place("no stack: gone") == ("", "")
    assert shorten("/x/lib/python3.12/site-packages/torch/a.py") == "torch/a.py"
    assert shorten("<cell train>") == "<cell train>"
    assert "    load (pack/data.py:41)" in shorten_all(SPY, "/home/me/project")


def test_our_own_handlers_stacks_read_like_py_spys() -> None:
    text = as_spy(FAULT, 0x7F02)
    assert text.splitlines()[0] == 'Thread 0x7f02 (unknown): "MainThread"'
    assert find_place(text, "/home/me/project") == ("train.py:9 in <module>", "match (re/__init__.py)")
    assert as_spy("", 1) == ""


def entry(group: str, seq: int, name: str, sizes: list[list[int]], **fields: object) -> dict[str, object]:
    return {
        "process_group": [group, "default_pg"],
        "collective_seq_id": seq,
        "profiling_name": f"gloo:{name}",
        "input_sizes": sizes,
        "input_dtypes": ["Float"] * len(sizes),
        **fields,
    }


def test_the_recorders_dump_by_group() -> None:
    trace = {
        "entries": [
            entry("0", 1, "barrier", []),
            entry("0", 2, "all_reduce", [[4, 4], [4]], state="scheduled"),
            entry("0", 3, "send", [[1]], is_p2p=True),
            entry("5", 1, "broadcast", [[3]]),
        ],
        "pg_config": {"": {"ranks": "[]"}},
        "pg_status": {
            "0": {"last_enqueued_collective": "2", "last_completed_collective": "1"},
            "5": {"last_enqueued_collective": "1", "last_completed_collective": "-1"},
            "6": {"last_enqueued_collective": "-1", "last_completed_collective": "-1"},
        },
    }
    first, second = read_trace(trace, {"0": [0, 1]})
    assert first == {
        "name": "0",
        "ranks": [0, 1],
        "entered": 2,
        "completed": 1,
        "last": [[1, "barrier", 0, ""], [2, "all_reduce", 20, "float32"]],
    }
    assert (second["ranks"], second["completed"]) == ([], 0)
    assert read_trace({}, {}) == []
