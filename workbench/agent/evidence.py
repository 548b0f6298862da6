"""All that can be found out about a job's ranks on this host, at once and within a bound, while they hang.

Boxes and processes are looked at in the loop's thread; who asks waits in another, in which py-spy runs and the ranks'
answers are awaited.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from workbench import blackbox
from workbench.agent.frames import find_place, shorten_all
from workbench.agent.launch import first_path
from workbench.agent.processes import RankProcess
from workbench.agent.stacks import AT_ONCE, NONE, dump_stack, find_spy, tidy
from workbench.agent.usage import own_cpu, process_state
from workbench.agent.watch import Pulse
from workbench.agent.witness import Witness
from workbench.evidence import ChildEvidence, RankEvidence

ANSWER: Final = 0.4  # s that a rank's own thread may take; it holds the interpreter for 5 ms at a time at most
CHILDREN: Final = 8  # processes of a rank that are looked at, its loader's workers
LOADER: Final = "torch/utils/data/"
STACK: Final = 2**14  # characters kept of one


@dataclass(frozen=True)
class Question:
    """One rank that was asked, with what its box and its process say."""

    seen: RankEvidence
    witness: Witness
    number: int
    root: str


def ask(process: RankProcess, pulse: Pulse, *, deep: bool) -> Question:
    """In the loop's thread: look at one rank, and ask it when `deep`."""
    assert process.box is not None
    snapshot, state = blackbox.read_header(process.box), process_state(process.pid)
    number = process.witness.next_id()
    if deep and state not in ("T", "t"):
        process.tell({"op": "evidence", "id": number})
    seen = RankEvidence(
        rank=process.rank,
        worker=process.plan.placement.worker,
        pid=process.pid,
        state=state,
        cpu_time=own_cpu(process.pid),
        clock=time.monotonic(),
        step=snapshot.step,
        activity=snapshot.activity.name,
        age=pulse.age,
        collective=snapshot.collective,
        collective_seq=snapshot.collective_seq,
        is_evaluating=snapshot.is_evaluating,
        expected=snapshot.expected,
    )
    spec = process.plan.command.spec
    return Question(seen, process.witness, number, first_path(spec, spec.cwd or str(Path.cwd())))


def gather(questions: Iterable[Question], timeout: float) -> list[RankEvidence]:
    """In a thread that may wait: each rank with its answer and its stacks, within `timeout` s."""
    asked = list(questions)
    start = time.monotonic()
    spy = find_spy()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda one: _complete(one, spy, start, start + timeout), asked))


def _complete(asked: Question, spy: str | None, start: float, deadline: float) -> RankEvidence:
    seen = asked.seen
    text = read_stack(spy, seen.pid, deadline, asked.witness)
    is_stopped = seen.state in ("T", "t")
    groups = None if is_stopped else asked.witness.wait(asked.number, min(start + ANSWER, deadline))
    place = find_place(text, asked.root)
    return replace(
        seen,
        answered=None if is_stopped else groups is not None,
        groups=groups or (),
        stack=shorten_all(text, asked.root)[:STACK],
        where=place.where,
        call=place.call,
        children=_children(spy, seen, text, deadline, asked.root),
    )


def read_stack(spy: str | None, pid: int, deadline: float, witness: Witness | None) -> str:
    """By py-spy; where it cannot, by what the rank's own handler writes; where that cannot either, the reason."""
    text = f"{NONE}py-spy is not installed where this worker runs"
    if spy is not None:
        text = dump_stack(spy, pid, deadline, ("--full-filenames",))
    if text.startswith(NONE) and witness is not None and (own := witness.stacks(pid, deadline)):
        return tidy(f"\n{own}")
    return text


def _children(spy: str | None, seen: RankEvidence, text: str, deadline: float, root: str) -> tuple[ChildEvidence, ...]:
    """The loader's workers of a rank that waits for them."""
    if seen.activity != "DATA" and LOADER not in text:
        return ()
    found = []
    for pid in _child_pids(seen.pid)[:CHILDREN]:
        state = process_state(pid)
        stack = dump_stack(spy, pid, deadline, ("--full-filenames",)) if spy is not None else ""
        where = "" if stack.startswith(NONE) else find_place(stack, root).where
        found.append(ChildEvidence(pid=pid, state=state, where=where, stack=shorten_all(stack, root)[:STACK]))
    return tuple(found)


def _child_pids(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()]
    except OSError:
        return []
