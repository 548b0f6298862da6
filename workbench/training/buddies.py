"""What each rank keeps for itself alone (random states, its place in the data) is kept on another host as well.

The state is the same on all ranks and so on every host; without this a host that is lost would take with it the little
that is its ranks' own, and the job would have to go back to disk. Each rank sends its own to its buddy, a rank of the
next host, through the store; who buddies whom all ranks know by themselves. A thread does it, so that no step waits;
where that cannot keep up copies are left out, and the step gone on from after a host's loss is an older one.
"""

from __future__ import annotations

import atexit
import base64
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from workbench.training.council import Council
from workbench.training.slot import Kind
from workbench.training.slots import MOST, Slot, Slots, Who

FIRST: Final = 8  # from this number on a rank's slots are others': below are its own
EACH: Final = 64  # ranks that send at each copy; of more, all send at each second or third, so that the store keeps up
PATIENCE: Final = 5.0  # s for a ward's word on the same step
FIRST_PAUSE, LAST_PAUSE = 0.002, 0.05  # s between two looks
AT_EXIT: Final = 2.0  # s

Keep = Callable[[int, int], object]  # (number of a slot, descriptor), as `Line.keep`


def buddy(rank: int, hosts: Sequence[int]) -> int:
    """Who keeps a rank's own things, a rank of the next host; itself where there is one host. `hosts` by rank."""
    order = sorted(set(hosts))
    next_host = order[(order.index(hosts[rank]) + 1) % len(order)]
    here, there = ([other for other, host in enumerate(hosts) if host == at] for at in (hosts[rank], next_host))
    return there[here.index(rank) % len(there)]


def place(number: int) -> tuple[int, int] | None:
    """Whose slot it is that a buddy has under this number, and which; None: it is the buddy's own."""
    return divmod(number - FIRST, MOST) if number >= FIRST else None


class Word(NamedTuple):
    """One rank's own things at one step; `number` is that of a checkpoint on disk."""

    step: int
    number: int
    extras: bytes


class Buddies:
    """One rank's side, from its first copy on; `found` are its wards' slots of earlier generations."""

    def __init__(
        self, who: Who, hosts: Sequence[int], council: Council, keep: Keep, free: Callable[[], int],
        found: Sequence[tuple[int, Slot]] = (),
    ) -> None:  # fmt: skip
        self._who, self._council = who, council
        self._stride = 1 + (len(hosts) - 1) // EACH
        self._wards = {
            ward: Slots(who._replace(rank=ward), _numbered(keep, ward), free)
            for ward in range(len(hosts))
            if ward != who.rank and buddy(ward, hosts) == who.rank
        }
        for number, slot in found:
            if (known := place(number)) is not None and known[0] in self._wards:
                self._wards[known[0]].adopt(known[1], slot)
        self._is_sent = buddy(who.rank, hosts) != who.rank
        self._heard = dict.fromkeys(self._wards, 0)
        self._said = 0
        self._next: Word | None = None
        self._change = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="dtrain-buddies", daemon=True)
        self.fault = ""  # why nothing is sent any more

    def send(self, count: int, step: int, number: int, extras: Any) -> None:
        """Have this sent; `count` of the copies, the same on all ranks. Waits for nobody."""
        if count % self._stride or self.fault or not (self._is_sent or self._wards):
            return
        word = Word(step, number, pickle.dumps(extras, pickle.HIGHEST_PROTOCOL))
        with self._change:
            self._next = word
            self._change.notify_all()
        if self._thread.ident is None:
            atexit.register(self.end)
            self._thread.start()

    @property
    def wards(self) -> tuple[int, ...]:
        """The ranks whose buddy this one is."""
        return tuple(self._wards)

    def steps(self) -> dict[int, int]:
        """The last step kept of each ward."""
        newest = {ward: slots.newest() for ward, slots in self._wards.items()}
        return {ward: one.header.step for ward, one in newest.items() if one is not None and one.header is not None}

    def end(self) -> None:
        """Before the interpreter ends: no thread may be in the store then."""
        with self._change:
            self._is_over = True
            self._change.notify_all()
        atexit.unregister(self.end)
        if self._thread.ident is not None:
            self._thread.join(AT_EXIT)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (word := self._wait()) is not None:
                if self._is_sent:
                    self._say(word)
                deadline = time.monotonic() + PATIENCE
                for ward in self._wards:
                    self._hear(ward, word.step, deadline)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def _wait(self) -> Word | None:
        with self._change:
            self._change.wait_for(lambda: self._is_over or self._next is not None)
            word, self._next = self._next, None
            return None if self._is_over else word

    def _say(self, word: Word) -> None:
        text = base64.b85encode(word.extras).decode()
        self._council.post(self._name(self._who.rank, self._said), (word.step, word.number, text))
        self._said += 1

    def _hear(self, ward: int, step: int, deadline: float) -> None:
        """What the ward has said until now, and its word on this step if that comes in time."""
        pause = FIRST_PAUSE
        while True:
            name = self._name(ward, self._heard[ward])
            if self._council.has(name):
                if self._keep(ward, name) >= step:
                    return
                continue
            if time.monotonic() > deadline or self._is_over:
                return
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _keep(self, ward: int, name: str) -> int:
        step, number, text = self._council.fetch(name, PATIENCE)
        self._council.forget(name)
        self._heard[ward] += 1
        value = {"state": None, "pickled": base64.b85decode(text)}
        self._wards[ward].write(step, value, Kind.EXTRAS, number)
        return int(step)

    @staticmethod
    def _name(rank: int, count: int) -> str:
        return f"buddy/{rank}/{count}"


def _numbered(keep: Keep, ward: int) -> Keep:
    return lambda number, fd: keep(FIRST + MOST * ward + number, fd)
