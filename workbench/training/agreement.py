"""Which copy in memory a generation goes on from. Pure: rank 0 decides from what every rank has found on its host.

- Never a mix: the copies of one choice are of one generation and one step, and every rank of that generation has one,
  since each keeps what is its own (random states, its place in the data).
- Never a torn one: only whole copies are told of.
- Never one of ranks that differed: what is the same on every rank then was not.
- Never an older one than need be, and none that is older than the newest checkpoint on disk.

What is the same on every rank needs to be there once, in as many parts as that host had ranks; it is sent to the hosts
that lack it. What was a rank's own part
goes back to that rank, in a world of the same size and on the host that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from workbench.training.slot import Header, Kind


class Copy(NamedTuple):
    """A whole slot: whose, of when, and the host that has it (named by the lowest rank that runs there now).

    `step` tells copies of a generation apart, `number` is what people and checkpoints on disk call it.
    """

    generation: int
    step: int
    number: int
    rank: int
    world_size: int
    kind: Kind
    host: int
    part: int = 0
    parts: int = 1
    mark: int = 0


class Choice(NamedTuple):
    """`world_size` is that of the copies. `hosts` have a copy of the state, unless it is in parts (Kind.OWN)."""

    generation: int
    step: int
    number: int
    world_size: int
    kind: Kind
    hosts: tuple[int, ...]


class Place(NamedTuple):
    """Where the ranks run now: `hosts[rank]`. `can_send`: they have a process group to send a state over."""

    hosts: tuple[int, ...]
    can_send: bool

    @property
    def world_size(self) -> int:
        return len(self.hosts)


def describe(header: Header, host: int) -> Copy:
    return Copy(
        header.generation, header.step, header.number, header.rank, header.world_size, header.kind, host, header.part,
        header.parts, header.mark,
    )  # fmt: skip


def choose(copies: Sequence[Copy], place: Place, disk_step: int = -1) -> tuple[Choice | None, str]:
    """The newest copy that every rank can go on from, and why it is that one; None: from disk, or the beginning.

    `disk_step`: of the newest checkpoint on disk, -1 for none; of the same step, the one in memory is taken.
    """
    by_time: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        by_time.setdefault((copy.generation, copy.step), []).append(copy)
    if not by_time:
        return None, "no copy in memory is left"
    faults: dict[str, list[int]] = {}
    for time in sorted(by_time, reverse=True):
        group = by_time[time]
        step = group[0].number
        if step < disk_step:
            return None, _words(f"step {step}, in memory, is older than step {disk_step} on disk", faults)
        if not (fault := find_fault(group, place)):
            return _choice(group), _words(f"every rank has its copy of step {step}", faults)
        faults.setdefault(fault, []).append(step)
    return None, _words("", faults)


def _words(first: str, faults: Mapping[str, Sequence[int]]) -> str:
    """`first`, and what was passed over on the way, each reason once."""
    passed_over = [
        f"step{'s' if len(steps) > 1 else ''} {' and '.join(map(str, steps))} cannot be taken from memory: {fault}"
        for fault, steps in faults.items()
    ]
    return "; ".join([first, *passed_over] if first else passed_over)


def find_fault(group: Sequence[Copy], place: Place) -> str:
    """Why the ranks cannot go on from these copies of one generation and step; empty: they can."""
    old = group[0].world_size
    there = {copy.rank: copy for copy in group}
    if missing := [rank for rank in range(old) if rank not in there]:
        return f"{_ranks(missing)} left no whole copy of it"
    if len({copy.mark for copy in group if copy.mark}) > 1:
        return "the ranks' parameters were no longer the same"
    if {copy.kind for copy in group} == {Kind.OWN}:
        return _parts_fault(group, place)
    if not (having := having_state(group)):
        return "no host that has the state is left"
    lacking = sorted(set(place.hosts) - having)
    if lacking and not place.can_send:
        return f"the host of rank {lacking[0]} has none, and there is no process group to send it over"
    return ""


def having_state(group: Sequence[Copy]) -> set[int]:
    """The hosts that have all parts of what is the same on every rank; those of two hosts are never mixed."""
    there: dict[tuple[int, int], set[int]] = {}
    for copy in group:
        if copy.kind is Kind.WHOLE:
            there.setdefault((copy.host, copy.parts), set()).add(copy.part)
    return {host for (host, parts), found in there.items() if len(found) == parts}


def _parts_fault(group: Sequence[Copy], place: Place) -> str:
    old = group[0].world_size
    if old != place.world_size:
        return f"it is in {old} parts, one a rank, and there are {place.world_size} ranks now"
    kept = {(copy.rank, copy.host) for copy in group}
    away = [rank for rank, host in enumerate(place.hosts) if (rank, host) not in kept]
    return f"the part of {_ranks(away)} is on another host" if away else ""


def _choice(group: Sequence[Copy]) -> Choice:
    first = group[0]
    is_whole = any(copy.kind is Kind.WHOLE for copy in group)
    hosts = tuple(sorted(having_state(group)))
    kind = Kind.WHOLE if is_whole else Kind.OWN
    return Choice(first.generation, first.step, first.number, first.world_size, kind, hosts)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


class Need(NamedTuple):
    """What a rank says before the first copy: its host, bytes it needs and bytes free there, and what its state is.

    `needs` if it keeps all of its own state, `part` if that is the same on every rank.
    `layout`: a digest of its tensors' types and shapes. `is_replicated`: DDP keeps it the same on every rank.
    """

    host: int
    needs: int
    part: int
    free: int
    layout: str
    is_replicated: bool


class Plan(NamedTuple):
    """How the ranks keep copies; `fault`: why they do not. `hosts` by rank."""

    kind: Kind
    fault: str = ""
    hosts: tuple[int, ...] = ()


def plan(needs: Sequence[Need], share: float) -> Plan:
    """What is the same on every rank is copied once a host; `share` of the free memory may be used."""
    is_same = len({need.layout for need in needs}) == 1
    is_whole = len(needs) == 1 or (is_same and all(need.is_replicated for need in needs))
    kind = Kind.WHOLE if is_whole else Kind.OWN
    wanted: dict[int, int] = {}
    for need in needs:
        wanted[need.host] = wanted.get(need.host, 0) + (need.needs if kind is Kind.OWN else need.part)
    return Plan(kind, _memory_fault(needs, wanted, share), tuple(need.host for need in needs))


def _memory_fault(needs: Sequence[Need], wanted: Mapping[int, int], share: float) -> str:
    for host, size in wanted.items():
        free = min(need.free for need in needs if need.host == host)
        if size > free * share:
            there = f"{size / 2**20:.0f} MiB on the host of rank {host}, where {free / 2**20:.0f} MiB are free"
            return f"they would take {there}; at most {share:.0%} of that is used"
    return ""
