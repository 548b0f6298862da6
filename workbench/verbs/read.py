"""What values of options look like. Each function reads one, or raises ValueError with what is wanted instead."""

from __future__ import annotations

import math
import re
from typing import Final

from workbench.spec import MismatchPolicy, NanPolicy
from workbench.state import JobPhase

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
MOST_RANKS: Final = 65_536


def whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not re.fullmatch(r"\d{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def integer(text: str) -> int:
    """A whole number with a sign, perhaps."""
    if not re.fullmatch(r"[-+]?\d{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
        raise ValueError("a whole number from 1")
    return int(text)


def port(text: str) -> int:
    """A port that a user may listen on, or 0 for any."""
    if not re.fullmatch(r"\d{1,5}", text) or not (text == "0" or 1024 <= int(text) < 65_536):
        raise ValueError("a port from 1024 to 65535")
    return int(text)


def pace(text: str) -> int:
    """Steps between two; `auto` is 0 and `off` -1, as `JobSpec` has them."""
    words = {"auto": 0, "off": -1}
    if text in words:
        return words[text]
    try:
        return count(text)
    except ValueError:
        raise ValueError("a whole number from 1, auto or off") from None


def nodes(text: str) -> tuple[int, int]:
    """`4` or, for an elastic job, `1:4`: the least (0: no fewer than all) and the most nodes."""
    least, colon, most = text.rpartition(":")
    try:
        bounds = (count(least) if colon else 0, count(most))
    except ValueError:
        raise ValueError("a whole number from 1, or MIN:MAX") from None
    if bounds[0] > bounds[1]:
        raise ValueError("MIN:MAX, the smaller number first")
    return bounds


def nproc(text: str) -> int:
    """Ranks a node; 0 stands for torchrun's words that leave the number to the machine."""
    if text in ("auto", "gpu", "cpu"):
        return 0
    try:
        return count(text)
    except ValueError:
        raise ValueError("a whole number from 1, or auto (a rank on every slot)") from None


def seconds(text: str) -> float:
    """A time: 90, 1.5, 30s, 5m, 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([smh]?)", text)
    if not match:
        raise ValueError("a time in seconds, such as 90 or 5m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def steps_or_seconds(text: str) -> tuple[int, float]:
    """How often: 100 is steps; 30s, 5m, 1h is time. `(steps, seconds)`, the other one 0."""
    try:
        return (0, seconds(text)) if text[-1:] in ("s", "m", "h") else (count(text), 0.0)
    except ValueError:
        raise ValueError("steps, such as 100, or a time, such as 30s or 5m") from None


def size(text: str) -> int:
    """Bytes: 1000000, 512M, 2G."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not match or not math.isfinite(float(match[1])):
        raise ValueError("a size, such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def ranks(text: str) -> tuple[int, ...]:
    """Ranks: 1 or 0,2 or 0-3, in order, each once."""
    wanted = "ranks, such as 1 or 0,2 or 0-3"
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not match:
            raise ValueError(wanted)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= MOST_RANKS:
            raise ValueError(wanted)
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def rank(text: str) -> int:
    """One rank."""
    try:
        return whole(text)
    except ValueError:
        raise ValueError("a rank, such as 1") from None


def setting(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise ValueError("KEY=VALUE")
    return key, value


def names(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ValueError("names with commas between, such as transformers,lightning")
    return found


def checks(text: str) -> int:
    """Steps between two checks; `auto` is 0, `off` and 0 are -1, as `JobSpec` has them."""
    return -1 if text == "0" else pace(text)


def share(text: str) -> float:
    """A share of something: 0.02 or 2%."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise ValueError("a share, such as 0.02 or 2%")
    return value


def mismatch_policy(text: str) -> MismatchPolicy:
    """What is done about replicas that differ."""
    try:
        return MismatchPolicy(text)
    except ValueError:
        raise ValueError(f"one of {', '.join(policy.value for policy in MismatchPolicy)}") from None


def nan_policy(text: str) -> NanPolicy:
    """What is done about a loss that is not finite."""
    try:
        return NanPolicy(text)
    except ValueError:
        raise ValueError(f"one of {', '.join(policy.value for policy in NanPolicy)}") from None


def phase(text: str) -> JobPhase:
    """A job's phase, in any case."""
    try:
        return JobPhase[text.upper()]
    except KeyError:
        raise ValueError(f"a phase: {', '.join(p.value for p in JobPhase)}") from None
