"""One check: what a rank brings to it, the exchange, and what becomes of the answer.

Called just before an optimizer's step, on every rank that has the same parameters, so that a wrong gradient is found
before it is used. While ranks agree, a check is a few digests and one small all-reduce. On a difference they inquire
together, and do what the job's `on_mismatch` says. Nothing is ever raised but that: what fails in a check ends
checking, with a word.

On a device that works on its own, digests are read one step late, when they are long there, so that nothing waits for
it. A difference is then found after one step has been taken with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from time import thread_time
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency import lanes, locate
from workbench.training.consistency.cadence import FIRST, Costs, Pace, choose, is_worth, look_every, share
from workbench.training.consistency.data import DataWatch
from workbench.training.consistency.inquiry import Finding, inquire, sentence
from workbench.training.consistency.looks import Look, Numbers, packed, unpacked
from workbench.training.consistency.measure import Measure
from workbench.training.consistency.repair import repair
from workbench.training.consistency.replicas import Unit, digest_of
from workbench.training.consistency.reports import Reports, say
from workbench.training.consistency.rows import Rows, row_of
from workbench.training.consistency.rows import numbers as numbers_of

MOST_MISSED: Final = 3  # checks in a row to which somebody did not come
SMOOTH: Final = 0.2  # weight of the newest time
AIM: Final = 0.8  # of the budget: times scatter
TIMED_FIRST: Final = 16  # checks that are timed, and then
TIMED_EACH: Final = 8
DIGESTS: Final = ("parameters", "state", "gradients", "buffers")
HELD: Final = ("parameters", "state", "gradients", "buffers")
# What follows by itself from a difference that was told and not repaired.
FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "steps": (*HELD, "scale", "settings", "absent"),
    "structure": lanes.COMPARED,
    "settings": HELD,
    "absent": HELD,
    "parameters": HELD,
    "state": HELD,
    "buffers": ("buffers",),
    "gradients": (*HELD, "scale", "settings"),
    "scale": (*HELD, "steps"),
    "data": (),
}


class ReplicasDifferError(RuntimeError):
    """Ranks that should hold the same do not, and the job was to stop or go back then; says who, where and what."""


class Reads(NamedTuple):
    """What an exchange of rows is about."""

    unit: Unit


class Looks(NamedTuple):
    """What an exchange of numbers of a look is about; the CPU time that it has cost."""

    unit: Unit
    look: Look | None
    spent: float


class Checker:
    """One of a process. `policy`: a word of `MismatchPolicy`; `every`: steps between checks, 0 for what is cheap.

    `step_of`: optimizer steps that the rank has finished. `scale_of`: what a GradScaler does, as a number.
    """

    def __init__(
        self, reports: Reports, step_of: Callable[[], int], *, policy: str = "warn", every: int = 0,
        budget: float = 0.02,
    ) -> None:  # fmt: skip
        self.reports, self.step_of, self.policy = reports, step_of, policy
        self.every, self.budget = every, budget
        self.scale_of: Callable[[], int] = lambda: 0
        self.scaling: Callable[[], Any] = lambda: 1.0  # what a GradScaler multiplies by, a number or a tensor of one
        self.on_broken: Callable[[Sequence[str]], object] = lambda names: None  # gradients, before the reduce
        self.measure = Measure()
        self.data, self.rows = DataWatch(), Rows()
        self.off = ""
        self._told: dict[int, set[str]] = {}  # by unit: differences told that may still be there

    # --- before a step ------------------------------------------------------------------------------------------------

    def check(self, unit: Unit) -> None:
        """Raises `ReplicasDifferError`, on all ranks alike, when the job is not to go on."""
        try:
            self._check(unit)
        except ReplicasDifferError:
            raise
        except Exception as error:
            self.end(f"{type(error).__name__}: {error}")
            say(f"replicas are no longer compared: {self.off}")
        if self.off:
            unit.due = sys.maxsize

    def _check(self, unit: Unit) -> None:
        begun = thread_time() if unit.is_timed else 0.0
        row = self._row(unit)
        if row is None:
            return
        unit.room.post(unit, row)
        while (answer := unit.room.answer()) is not None:
            if isinstance(answer[0], Reads):
                self._tell_data(answer[0].unit, answer[1])
            elif isinstance(answer[0], Looks):
                self._tell_look(answer[0], answer[1])
            else:
                self._take(answer[0], lanes.read(answer[1]), begun)
        if unit.room.is_waiting:
            self._missed(unit)

    def _take(self, unit: Unit, reading: lanes.Reading, begun: float) -> None:
        unit.checks += 1
        if reading.differing:
            unit.room.drop()
            self._differ(unit, reading.differing)
        else:
            unit.agreements += 1
            self._told.pop(unit.number, None)
            self._time(unit, begun)
            self.reports.agreed(unit, self.step_of(), unit.digest)
        if reading.largest["rows"]:
            unit.room.post_next(Reads(unit), numbers_of(self.data.row(unit)))
        if reading.largest["looks"]:
            self._post_look(unit)
        self._pace(unit, reading.largest)

    def _row(self, unit: Unit) -> torch.Tensor | None:
        """None: it is still on its way from a device."""
        if unit.late is not None:
            (numbers, event, values), unit.late = unit.late, None
            event.synchronize()  # of a step ago
            return self._filled(unit, values, numbers.tolist())
        values = self._plain_lanes(unit)
        self._end_look(unit)
        gradients = self.measure.gradients(unit)
        dear = thread_time() if unit.is_timed else 0.0
        members, frozen = unit.stretch()
        held = self.measure.held(unit, members, frozen)
        buffers = self.measure.together([model.buffer_digest.reshape(1) for model in unit.models])
        digests = [*held, gradients, buffers]
        if unit.is_timed:
            unit.dear_time = (thread_time() - dear) * (2 if unit.room.size == 2 else 1)  # `prepare` does it again
        if any(digest.is_cuda for digest in digests):
            unit.late = _sent(digests, values)
            unit.is_late, unit.due = True, unit.steps + 1
            return None
        numbers = [int(digest) for digest in digests]
        self._notice_changes(unit, numbers)
        return self._filled(unit, values, numbers)

    def _filled(self, unit: Unit, values: Mapping[str, int], numbers: Sequence[int]) -> torch.Tensor:
        unit.digest = numbers[DIGESTS.index("gradients")]
        return lanes.row({**values, **dict(zip(DIGESTS, numbers, strict=True))})

    def _plain_lanes(self, unit: Unit) -> dict[str, int]:
        wish = self._wish(unit)
        return {
            "steps": unit.number << 40 | unit.steps,
            "structure": unit.structure(),
            "settings": digest_of("\n".join(unit.settings())),
            "absent": digest_of(unit.absent()),
            "scale": self.scale_of(),
            "share": int(1e6 * share(unit.costs, Pace(unit.every, unit.parts, unit.look_every))),
            "every": wish.every,
            "parts": wish.parts,
            "rows": int(self.data.is_due(unit)),
            "looks": int(unit.look is not None),
            "look": wish.look,
        }

    def _notice_changes(self, unit: Unit, numbers: Sequence[int]) -> None:
        """Whether parameters and state are not what they were after the last step, by this rank's own digests."""
        kept, unit.kept = unit.kept, None
        unit.changed = {}
        if kept is not None and kept[0] == unit.part:
            unit.changed = {"parameters": numbers[0] != kept[1], "state": numbers[1] != kept[2]}

    # --- after the step before one that is checked --------------------------------------------------------------------

    def prepare(self, unit: Unit) -> None:
        """Between this step and the next, which is checked, nothing may change what the optimizer keeps."""
        for model in unit.models:
            model.wants_buffers, model.synced, model.unsynced = bool(model.buffer_names), 0, 0
        unit.reduces = 0
        self.data.prepare(unit)
        if unit.wants_look:
            self._begin_look(unit)
        if unit.room.size == 2:  # no majority then: a rank's own digest may tell
            held = self.measure.held(unit, *unit.stretch())
            if not any(digest.is_cuda for digest in held):
                unit.kept = unit.part, int(held[0]), int(held[1])

    # --- what gradients are like ---

    def _begin_look(self, unit: Unit) -> None:
        unit.wants_look = False
        if unit.look is not None:  # its step was never taken
            unit.look.close()
        unit.look = Look(unit, unit.looks, has_layers=unit.room.leads)
        unit.looks += 1

    def _end_look(self, unit: Unit) -> None:
        """Just before the step; what comes of it is brought to the others once they have agreed on this step."""
        unit.looked, unit.look = unit.look, None
        if unit.looked is None:
            return
        unit.look_outside += unit.looked.spent
        begun = thread_time()
        unit.looked.gather(self.scaling())
        unit.look_time = thread_time() - begun
        if names := unit.looked.broken:
            self.on_broken(names)

    def stepped(self, unit: Unit) -> None:
        """The optimizer has stepped after a look."""
        before = unit.looked.spent
        unit.looked.stepped()
        unit.look_outside += unit.looked.spent - before

    def _post_look(self, unit: Unit) -> None:
        begun = thread_time()
        numbers = unit.looked.numbers() if unit.looked is not None else Numbers.unseen()
        unit.looked_at = unit.steps
        spent = (unit.looked.spent if unit.looked is not None else 0.0) + thread_time() - begun
        unit.room.post_next(Looks(unit, unit.looked, spent), packed(numbers))

    def _tell_look(self, about: Looks, table: torch.Tensor) -> None:
        begun, unit = thread_time(), about.unit
        if unit.room.leads:
            self.reports.looked(unit, self.step_of(), [unpacked(bits) for bits in table.tolist()])
        unit.has_told = about.look  # of its layers the next report tells: the step is still to come
        spent = about.spent + thread_time() - begun
        old = unit.costs.look or spent
        unit.costs = unit.costs._replace(look=old + SMOOTH * (spent - old))

    # --- what ranks read ---

    def _tell_data(self, unit: Unit, table: torch.Tensor) -> None:
        """What the rows of all ranks say together is the same on all of them."""
        rows = [row_of(numbers) for numbers in table.tolist()]
        for doubt in self.rows.look(rows, unit.room.ranks):
            self.reports.doubted(unit, self.step_of(), doubt)

    # --- a difference -------------------------------------------------------------------------------------------------

    def _differ(self, unit: Unit, differing: Sequence[str]) -> None:
        told = self._told.setdefault(unit.number, set())
        if told.issuperset(differing):
            self.reports.deviated(unit, self.step_of(), None)
            return
        found = inquire(unit, self.measure, differing, known=tuple(told), scale=self.scale_of())
        if found is None:
            self.reports.deviated(unit, self.step_of(), ())
            return
        lane = found.verdict.lane
        response = self._response(found)
        if unit.room.leads:
            say(sentence(found.mismatch, self.step_of()))
        self.reports.mismatched(unit, self.step_of(), found.mismatch, response)
        if lane == "steps":
            unit.steps = max(one["items"]["steps"] for one in found.accounts)
        if response == "repair":
            self._repair(unit, found)
            return
        told |= {lane, *FOLLOWS[lane]}
        if response != "warn":
            unit.room.gather(None)  # nobody raises before it has been told
            raise ReplicasDifferError(sentence(found.mismatch, self.step_of()))

    def _response(self, found: Finding) -> str:
        """What is possible: a repair needs somebody who is known to be right, and something that can be sent."""
        lane, told_by = found.verdict.lane, found.verdict.sides.told_by
        if lane == "buffers" and not told_by:
            return "warn"  # each rank's own statistics: often meant so
        if self.policy == "repair" and not (told_by and lane in (*locate.TENSORS, "absent")):
            return "stop"
        return self.policy

    def _repair(self, unit: Unit, found: Finding) -> None:
        sides, room = found.verdict.sides, unit.room
        source = found.verdict.reference
        done = repair(unit, found.names, source, is_deviating=room.index in sides.deviating)
        values = {"absent": digest_of(unit.absent()), "gradients": int(self.measure.gradients(unit))}
        held = self.measure.held(unit, unit.members, unit.frozen)
        row = lanes.row({**values, "parameters": int(held[0]), "state": int(held[1])})
        reduced = room.exchange(row)
        if reduced is None or (left := lanes.read(reduced).differing):
            raise RuntimeError(f"a repair has left {', '.join(left) if reduced is not None else 'a rank'} behind")
        self._told.pop(unit.number, None)
        deviating = tuple(room.ranks[place] for place in sides.deviating)
        self.reports.repaired(unit, self.step_of(), deviating, room.ranks[source], done)

    def _missed(self, unit: Unit) -> None:
        unit.due = unit.steps + 1
        if unit.room.missed >= MOST_MISSED:
            self.end("not every rank takes the optimizer's steps that the others take")
            self.reports.paced(unit, self.step_of(), self.off)

    # --- how often ----------------------------------------------------------------------------------------------------

    def _time(self, unit: Unit, begun: float) -> None:
        """Note what this check has cost, and what the steps since the last one did. Not at each: a clock costs too."""
        if not unit.is_timed or unit.timed_at is None:
            return
        now = thread_time()
        if unit.steps > unit.timed_at[0]:
            step = (begun - unit.timed_at[1] - unit.look_outside) / (unit.steps - unit.timed_at[0])
            twice = 2 if unit.room.size == 2 else 1
            light = now - begun - unit.dear_time / twice - unit.look_time
            new = Costs(step, light, unit.dear_time * unit.parts, unit.costs.look)
            old = unit.costs if unit.costs.step else new
            unit.costs = Costs(*(b + SMOOTH * (a - b) for a, b in zip(new, old, strict=True)))

    def _wish(self, unit: Unit) -> Pace:
        if self.every or unit.checks < FIRST or not unit.costs.step:
            return Pace(self.every or 1, 1, look_every(unit.costs, AIM * self.budget))
        return choose(unit.costs, AIM * self.budget, max(1, len(unit.members)))

    def _pace(self, unit: Unit, largest: Mapping[str, int]) -> None:
        """The largest wish is everybody's."""
        unit.part = (unit.part + 1) % unit.parts
        wish, old = Pace(max(1, largest["every"]), max(1, largest["parts"])), Pace(unit.every, unit.parts)
        is_settling, is_over = unit.checks == FIRST + 1, largest["share"] > 1e6 * self.budget and not self.every
        if is_settling or is_over or is_worth(old, wish):
            unit.every, unit.parts, unit.part = wish.every, wish.parts, 0
        if is_settling or is_worth(old, Pace(unit.every, unit.parts)):
            self.reports.paced(unit, self.step_of())
        self.reports.shares[unit.number] = largest["share"] / 1e6
        unit.due = unit.steps + unit.every
        unit.look_every = max(1, largest["look"])
        unit.wants_look = unit.due - unit.looked_at >= unit.look_every
        unit.look_time = unit.look_outside = 0.0
        is_next_timed = unit.checks <= TIMED_FIRST or unit.checks % TIMED_EACH == 0
        unit.timed_at = (unit.steps, thread_time()) if is_next_timed else None
        unit.is_timed = is_next_timed

    def end(self, reason: str) -> None:
        self.off = self.off or reason


def _sent(digests: Sequence[torch.Tensor], values: dict[str, int]) -> Any:
    """Begin to bring digests from a device."""
    device = next(digest.device for digest in digests if digest.is_cuda)
    stacked = torch.stack([digest.to(device, non_blocking=True) for digest in digests])
    numbers = torch.empty(len(digests), dtype=torch.int64, pin_memory=True)
    numbers.copy_(stacked, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return numbers, event, values
