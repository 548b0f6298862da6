"""How a request comes in and its answer goes out: bytes outside, values inside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from workbench.pool.messages import decode, encode

Requests: TypeAlias = dict[str, Callable[[bytes], Awaitable[bytes]]]


def as_request(kind: Any, handler: Callable[[Any], Any]) -> Callable[[bytes], Awaitable[bytes]]:
    """Wrap a handler of values as one of bytes."""

    async def answer(body: bytes) -> bytes:
        result = handler(decode(body, kind))
        if isinstance(result, Awaitable):
            result = await result
        return encode(result)

    return answer
