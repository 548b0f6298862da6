"""Whether a pool whose scheduler was killed is brought back, and what its jobs are told of it. Pure.

Only pools of this machine are: a scheduler that was ended in order is not missed, and one that dies again and again is
not started for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

MOST: Final = 3  # times that a pool is brought back
WITHIN: Final = 300.0  # s


class Comeback(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler of ours knows of those before it: when each died (epoch s), of late, oldest first.

    None: somebody started the pool.
    """

    deaths: tuple[float, ...] = ()

    @property
    def is_given_up(self) -> bool:
        return len(self.deaths) > MOST

    @property
    def goes_on(self) -> bool:
        """Whether it is to take up what ran when the last one died."""
        return bool(self.deaths) and not self.is_given_up


def died_again(deaths: Sequence[float], now: float) -> tuple[float, ...]:
    """The deaths that count, with one more now."""
    return (*(time for time in deaths if now - time < WITHIN), now)


def loss_text(comeback: Comeback | None, step: int) -> str:
    """Why a job that ran at `step` does not run any more."""
    if comeback is None or not comeback.deaths:
        return f"the pool's scheduler went away{f' at step {step}' if step else ''}; the ranks ended with it"
    after = f" after step {step}" if step else ""  # the last one on record: it may have got a little further
    died = f"the pool's scheduler died{after}{_again(len(comeback.deaths))}"
    if comeback.is_given_up:
        return f"{died}, and is not started again; the ranks ended with it"
    return f"{died}; the ranks ended with it"


def _again(count: int) -> str:
    return f", for the {count}{ORDINAL.get(count, 'th')} time within {WITHIN / 60:g} minutes" if count > 1 else ""


ORDINAL: Final = {2: "nd", 3: "rd"}
