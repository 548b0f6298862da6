"""What a rank can say of itself while its main thread hangs: asked by its agent, answered by the line's thread.

Two ways, since each fails where the other works. The collectives it has entered, from torch's Flight Recorder: needs
the interpreter, which a main thread inside a collective has let go. Its Python stacks by `faulthandler`: written by a
signal's handler in the line's own thread, so they come also where the interpreter is held and where the system forbids
tracing, and interrupt no call of the program.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import math
import os
import signal
import sys
import threading
from typing import Any, Final

from workbench.training.control import Control, Header
from workbench.training.descriptors import raised

SIGNAL: Final = signal.SIGRTMAX - 3  # real-time, so that no program means anything by it
LAST: Final = 64  # collectives told of each group
DTYPES: Final = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip


def install(control: Control) -> None:
    """Have the agent's questions answered on this line, which is about to be opened."""
    file = raised(os.memfd_create("dtrain-stacks", os.MFD_CLOEXEC))  # before there is a thread to race for a number
    control.on_open(lambda: _offer_stacks(control, file))
    control.on("evidence", lambda header, payload, fds: _answer(control, header))


def _offer_stacks(control: Control, file: int) -> None:
    """In the line's thread: give the agent a file, and the signal that has the stacks written to it."""
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})
    main = threading.main_thread().ident
    word = {"op": "witness", "signal": int(SIGNAL), "thread": _thread.get_native_id(), "main": main}
    control.send(word, fds=(file,))  # the file stays open here: the handler writes to it


def _answer(control: Control, header: Header) -> None:
    control.send({"op": "evidence", "id": header["id"]}, json.dumps(groups()).encode())


def groups() -> list[dict[str, Any]]:
    """This process' groups with the collectives it has entered in each; see `evidence.GroupEvidence`."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    recorder: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(recorder, "_dump_fr_trace_json", None)  # of late, and not public
    if c10d is None or dump is None:
        return []
    trace = json.loads(dump(True, False))  # without stacks: with them the first takes 4 s
    return read_trace(trace, {str(name): ranks for name, ranks in _members(c10d).items()})


def _members(c10d: Any) -> dict[str, list[int]]:
    world = c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}


def read_trace(trace: dict[str, Any], members: dict[str, list[int]]) -> list[dict[str, Any]]:
    """The recorder's dump, by group. Its `state` stays "scheduled" with gloo, and `pg_config` is empty: what has ended
    is in `pg_status`, and who belongs to a group is not in it at all.
    """
    last: dict[str, list[list[Any]]] = {}
    for entry in trace.get("entries", ()):
        if not entry.get("is_p2p"):
            last.setdefault(str(entry["process_group"][0]), []).append(_entered(entry))
    return [
        {
            "name": name,
            "ranks": members.get(name, []),
            "entered": int(status["last_enqueued_collective"]),
            "completed": max(0, int(status["last_completed_collective"])),
            "last": last.get(name, [])[-LAST:],
        }
        for name, status in trace.get("pg_status", {}).items()
        if int(status["last_enqueued_collective"]) > 0
    ]


def _entered(entry: dict[str, Any]) -> list[Any]:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    numel = sum(math.prod(size) for size in sizes)
    dtype = DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else ""
    return [entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2], numel, dtype]
