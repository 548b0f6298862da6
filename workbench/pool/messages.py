"""What travels over Dask's connections: msgpack bytes of the vocabulary, never pickles.

Worker → scheduler: batches of `Message`. Scheduler → worker: one agent command. Client → scheduler: a request's name
and a msgpack body, answered by a body or by an error that is rebuilt on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

import workbench.errors as errors
from workbench.commands import AgentCommand
from workbench.errors import InternalError, WorkbenchError
from workbench.events import Event
from workbench.telemetry import Report

PROTOCOL: Final = 1  # raised when client, scheduler and agents of different versions would misunderstand each other

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of its host when it joins, and again from time to time."""

    protocol: int
    host: str
    pid: int
    slots: int
    accelerator: str = "CPU"
    is_warm: bool = True  # ranks start at once; else seconds later, when torch has been imported
    epoch: int = 0  # how often it has ended its ranks because it was cut off: see `lease`


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One fact or report of one job."""

    job_id: str
    event: Event | None = None
    report: Report | None = None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An exception on its way to the client: its class by name, and what it was made of."""

    kind: str
    message: str
    hint: str = ""


_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(list[Message])
_command = msgspec.msgpack.Decoder(AgentCommand)


def encode(value: object) -> bytes:
    """Any value of the vocabulary as msgpack."""
    return _encoder.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The inverse of `encode`, checked against `kind`."""
    return msgspec.msgpack.decode(data, type=kind)


def decode_batch(data: bytes) -> Sequence[Message]:
    return _batch.decode(data)


def decode_command(data: bytes) -> AgentCommand:
    return _command.decode(data)


def to_fault(error: Exception) -> Fault:
    """What the client is to raise for `error`."""
    hint = error.hint if isinstance(error, WorkbenchError) else ""
    message = str(error.args[0]) if error.args else str(error)
    return Fault(kind=type(error).__name__, message=message, hint=hint)


def from_fault(fault: Fault) -> Exception:
    """The exception a fault stands for; one that is not of our tree is a bug on the other side."""
    kind: Any = getattr(errors, fault.kind, None)
    if isinstance(kind, type) and issubclass(kind, WorkbenchError) and not issubclass(kind, errors.JobError):
        return kind(fault.message, hint=fault.hint)
    return InternalError(f"{fault.kind} in the pool: {fault.message}")
