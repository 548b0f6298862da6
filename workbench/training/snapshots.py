"""A rank's side of the memory tier: copies of the training state that outlive the rank, every few steps.

A copy goes into anonymous memory that the agent holds as well, so it survives the rank, and is gone with the agent or
the job's end. Two slots are written by turns; the generation after this one goes on in the same memory. Nothing here
may stop training: what goes wrong switches the tier off and is said once on stderr. Needs torch.

    memory = Snapshots.open()                   # None outside a job, and where nothing would restart it
    restored = memory.restore(disk_step)        # all ranks; None: from disk, or the beginning
    if memory.is_due(step):                     # after each step; `step` counts those that are finished
        memory.take(step, state, extras)        # `state`: nested containers with tensors; `extras`: this rank's own

What is not a tensor may be anything that can be pickled.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, TypeAlias

import torch

from workbench.training import agreement, memory, packing
from workbench.training.agreement import Need, Plan
from workbench.training.buddies import FIRST, Buddies
from workbench.training.confirming import Confirming, checksum_of, mark_of, replicated
from workbench.training.control import Control
from workbench.training.council import Council
from workbench.training.line import Line
from workbench.training.pace import Pace
from workbench.training.recall import Agreed, Recall, Restored
from workbench.training.slot import Kind
from workbench.training.slots import Share, Slot, Slots, Who

SHARE: Final = 0.5  # of the free memory that copies may take
PATIENCE: Final = 60.0  # s for all ranks to come to the first copy
SHORT_PATIENCE: Final = 5.0  # s for rank 0's word on how often
LOOKS: Final = (5, 20, 100)  # after so many steps the pace is told anew, and then each so many as the last
Shares: TypeAlias = Sequence[Sequence[torch.Tensor]]
SETTLED: Final = 3  # copies of this generation after which the ranks that are no more are forgotten


class Snapshots:
    """`peers`: the ranks of this agent. `every`: steps between two copies, 0 for as often as they cost little."""

    def __init__(self, who: Who, line: Line, council: Council, peers: tuple[int, ...], every: int = 0) -> None:
        self.who, self._line, self._council = who, line, council
        self.peers, self._host = tuple(sorted(peers)), min(peers)
        self._is_fixed, self.every = bool(every), every or 1
        self._slots = Slots(who, line.keep, self._free)
        self._of_wards: list[tuple[int, Slot]] = []
        self.buddies: Buddies | None = None  # where there are other hosts
        self._lock = threading.Lock()  # the writer to disk is another thread
        self._recall: Recall | None = None
        self._confirming = Confirming(
            council.store, who.rank, who.world_size, lambda: mark_of(_models(), who.world_size)
        )
        self._plan: Plan | None = None
        self._pace = Pace()
        self._mark = 0.0  # since when a step, or its copy, is under way
        self._steps = self._taken = 0
        self.off = ""  # why no copies are taken any more
        self.reason = ""  # of the last `restore`

    @classmethod
    def open(cls) -> Snapshots | None:
        """This rank's; None outside a job, when the job's spec says never, and where nothing would restart it."""
        control, environ = Control.current, os.environ
        if control is None or "TORCHELASTIC_RESTART_COUNT" not in environ:
            return None
        settings = control.settings
        every = settings.get("snapshot_every", 0)
        if every < 0 or not (every or settings.get("max_restarts") or settings.get("min_ranks")):
            return None
        who = Who(*(int(environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE")))
        council = Council(_connect(), who.rank, who.world_size)
        return cls(who, Line(control), council, tuple(settings.get("peers", (who.rank,))), every)

    # --- going on from one --------------------------------------------------------------------------------------------

    def restore(self, disk_step: int = -1, like: Any = None) -> Restored | None:
        """Agree with all ranks on what to go on from, and get it; None when it is not in memory (`reason` says why).

        Every rank calls it. `disk_step`: of the newest checkpoint on disk, -1 for none; rank 0's word counts. `like`: a
        state on whose device meshes distributed tensors are to be. The tensors are this rank's own to keep. Copies that
        are not gone on from are forgotten, since no later generation may go back to them.
        """
        restored = agreed = None
        if self.who.generation == 0:
            self.reason = "nothing ran before"
            return None
        try:
            agreed = self._recalled().agree(disk_step)
            self.reason = agreed.reason
            if agreed.choice is not None:
                restored = self._recalled().load(agreed, like)
        except Exception as error:
            self.reason = str(error)
            self._say(f"copies in memory cannot be used: {error}")
        self._take_over(agreed if restored is not None else None)
        return restored

    def _recalled(self) -> Recall:
        if self._recall is None:
            self._recall = Recall(self.who, self._host, self._council, self._line)
        return self._recall

    def _take_over(self, agreed: Agreed | None) -> None:
        """Go on in the memory of this rank's predecessor; what was not agreed on, newer or older, is no copy now."""
        choice = agreed.choice if agreed is not None else None
        for one in self._recall.found if self._recall is not None else ():
            is_own = one.rank == self.who.rank
            header = one.slot.header
            is_agreed = choice and header and (header.generation, header.step) == (choice.generation, choice.step)
            if not is_agreed and (is_own or (self.who.rank == self._host and one.rank not in self.peers)):
                one.slot.clear()
            if is_own and one.number >= FIRST:
                self._of_wards.append((one.number, one.slot))
            elif is_own:
                self._slots.adopt(one.number, one.slot)
        self._recall = None

    # --- taking them --------------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Call it after every step, on every rank: whether a copy of `step` is to be taken now."""
        now = time.monotonic()
        if self.off:
            return False
        if self._mark:
            self._pace.stepped(now - self._mark)
        self._steps += 1
        if not self._is_fixed and (self._steps in LOOKS or self._steps % LOOKS[-1] == 0):
            self._look()
        self._mark = time.monotonic()
        return step % self.every == 0

    def take(
        self, step: int, state: Any, extras: Any, number: int | None = None, shares: Shares | None = None
    ) -> float:
        """Copy; s since `is_due` said so. What goes wrong is not raised: it switches the tier off.

        `step` must grow from copy to copy; `number`: what a checkpoint on disk of this moment is called, `step` if not
        given. `shares`: for each of `peers` in order, the tensors of `state` that it is to copy where all ranks have
        the same; the first also copies what is in nobody's.
        """
        if self.off:
            return 0.0
        start = self._mark or time.monotonic()
        try:
            self._copy(step, state, extras, number, shares)
        except Exception as error:
            self.switch_off(f"{type(error).__name__}: {error}")
        self._mark = time.monotonic()
        self._pace.took(self._mark - start)
        return self._mark - start

    def _copy(self, step: int, state: Any, extras: Any, number: int | None, shares: Shares | None) -> None:
        if self._plan is None:
            self._plan = self._agree_on_plan(state, shares)
            if self._plan.kind is Kind.WHOLE and len(set(self._plan.hosts)) > 1:
                self.buddies = Buddies(
                    self.who, self._plan.hosts, self._council, self._line.keep, self._free, self._of_wards
                )
            if self._plan.fault:
                self.switch_off(self._plan.fault, is_told=self.who.rank == 0)
        if self.off:
            return
        kind, share = self._plan.kind, Share()
        if kind is Kind.WHOLE:
            kind, state, share = self._divide(state, shares)
        mark = self._confirming.look() if self._plan.kind is Kind.WHOLE else 0
        if mark and not self._taken:
            self._confirming.sure = self._slots.newest()  # what this generation began from
        sure = self._confirming.sure
        taken = self._slots.write(step, {"state": state, "extras": extras}, kind, number, share, sure, mark)
        if taken is not None:
            self._taken += 1
            self._confirming.took(taken, step, mark)
            if self.buddies is not None:
                self.buddies.send(step // self.every, step, step if number is None else number, extras)
        if self._taken == SETTLED and self.who.rank == self._host:
            self._line.drop(self.peers)

    def _divide(self, state: Any, shares: Shares | None) -> tuple[Kind, Any, Share]:
        """What of a state that is the same on every rank is this one's to copy."""
        if shares is not None:
            return Kind.WHOLE, *divide(state, shares, self.peers.index(self.who.rank))
        is_first = self.who.rank == self._host
        return (Kind.WHOLE, state, Share()) if is_first else (Kind.EXTRAS, None, Share())

    def _agree_on_plan(self, state: Any, shares: Shares | None) -> Plan:
        packed = packing.take_apart(state)
        layout = hashlib.sha256(repr([place[:2] for place in packed.places]).encode())
        checksum = replica_checksum(self.who.world_size)
        _, part, share = self._divide(state, shares)
        needs, part = (
            max(0, 2 * (one.end + len(one.text)) - self._slots.size)
            for one in (packed, packing.take_apart(part, share.away))
        )
        need = Need(self._host, needs, part, memory.free_bytes(), f"{layout.hexdigest()} {checksum}", bool(checksum))

        def decide(told: list[Any]) -> Any:
            return agreement.plan([Need(*one) for one in told], SHARE)

        kind, fault, hosts = self._council.decide("plan", need, decide, PATIENCE)
        return Plan(Kind(kind), fault, tuple(hosts))

    @staticmethod
    def _free() -> int:
        return int(memory.free_bytes() * SHARE)

    def _look(self) -> None:
        """Rank 0's pace is everybody's: copies of different steps would be of no use."""
        try:
            self.every = self._council.hear(f"every/{self._steps}", self._pace.every, SHORT_PATIENCE)
        except TimeoutError:  # ranks that do not step together; from here on it stays as it is
            self._is_fixed = True

    # --- for who writes one to disk -----------------------------------------------------------------------------------

    @contextmanager
    def held(self, step: int) -> Iterator[Any]:
        """This rank's part of the copy of that step, as `take` got it (`state`, `extras`), its tensors views of memory
        that does not change until the end of the `with`; in any thread. None when there is no such copy.

        `state` is None where another rank of the host has it; where they have shares, see `divide`: the first has None
        for a tensor that it has not copied.
        """
        one = self.hold(step)
        try:
            yield one
        finally:
            if one is not None:
                self.release(step)

    def hold(self, step: int) -> Any:
        """Begin what `held` does, in the thread that takes copies; `release` ends it, in any."""
        with self._lock:
            one = self._slots.find(step)
            if one is None:
                return None
            one.holders += 1
        return one.value()

    def release(self, step: int) -> None:
        with self._lock:
            if (one := self._slots.find(step)) is not None:
                one.holders -= 1

    # --- words --------------------------------------------------------------------------------------------------------

    def switch_off(self, reason: str, *, is_told: bool = True) -> None:
        """Take no more copies; said once on stderr."""
        self.off = reason
        if is_told:
            self._say(f"no copies of the training state are kept in memory any more: {reason}")

    @staticmethod
    def _say(words: str) -> None:
        sys.stderr.write(f"dtrain: {words}\n")


def divide(state: Any, shares: Shares, part: int) -> tuple[Any, Share]:
    """A part of a state: the first is all but the tensors of the others, which are counted through."""
    if part:
        first = sum(map(len, shares[1:part]))
        return dict(enumerate(shares[part], first)), Share(part, len(shares))
    away = {id(tensor): number for number, tensor in enumerate(chain.from_iterable(shares[1:]))}
    return state, Share(0, len(shares), away)


def replica_checksum(world_size: int) -> str:
    """Of the parameters that DDP keeps the same on all ranks, some of each; empty: there is no such model here.

    Ranks whose parameters differ all the same (they are averaged only now and then) are told by it.
    """
    whole = replicated(_models(), world_size)
    if not whole and world_size > 1:
        return ""
    return f"{checksum_of((list(model.parameters())[:32] for model in whole), 1024):08x}"


def _models() -> Sequence[Any]:
    from workbench.training.guard import Guard

    return list(Guard.current.models) if Guard.current is not None else []


def _connect() -> Any:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
