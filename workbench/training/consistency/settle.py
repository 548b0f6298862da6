"""After a backward: whether what the all-reduces gave is what was sent into them; if not, again, from what was kept.

All ranks of a model call everything here at once: the reduces that came before were theirs together as well. The
exchange is over a group of its own, waits as long as a reduce would, and is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any, Final

import torch
import torch.distributed as dist

from workbench.training.consistency import locate
from workbench.training.consistency.blame import suspects
from workbench.training.consistency.check import ReplicasDifferError
from workbench.training.consistency.inquiry import sentence
from workbench.training.consistency.reduce import Bucket, Reducer
from workbench.training.consistency.reports import Reports, say, who
from workbench.training.consistency.room import Room, plain_wait
from workbench.training.consistency.sums import ROW

ATTEMPTS: Final = 2  # to reduce again


class Settler:
    """Of one reducer. `name_of`: the name of a parameter."""

    def __init__(
        self, reducer: Reducer, room: Room, reports: Reports, step_of: Callable[[], int], policy: str,
        name_of: Callable[[Any], str],
    ) -> None:  # fmt: skip
        self.reducer, self.room, self.reports, self.step_of = reducer, room, reports, step_of
        self.policy, self.name_of = policy, name_of
        self.checked = self.found = self.healed = 0  # backwards; reduces
        self._wait = plain_wait()

    def settle(self) -> None:
        """Raises `ReplicasDifferError`, on all ranks alike, when a reduce stays wrong and the job is to stop then."""
        begun = thread_time()
        fired = self.reducer.finish()
        if fired:
            self.checked += 1
            is_wrong = self._any(fired)
            self.reducer.spent += thread_time() - begun
            if is_wrong:
                self._inquire(fired)

    def _any(self, buckets: Sequence[Bucket]) -> bool:
        """Whether any rank has a row that is not what was sent."""
        mine = any(bool(bucket.flagged.any()) for bucket in buckets if bucket.flagged is not None)
        row = torch.tensor([int(mine)], dtype=torch.int64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(self.room.group.allreduce([row], options))
        return bool(row)

    def _inquire(self, fired: Sequence[Bucket]) -> None:
        mine = [number for number, bucket in enumerate(fired) if bucket.flagged is None or bool(bucket.flagged.any())]
        flagged = sorted({number for some in self.room.gather(mine) for number in some})
        for number in flagged:
            self.found += 1
            self._again(fired[number])

    def _again(self, bucket: Bucket) -> None:
        came, result = bucket.values.clone(), bucket.result.clone()
        flags = bucket.flagged.clone() if bucket.flagged is not None else None
        attempts, is_lasting = 0, True
        while is_lasting and attempts < ATTEMPTS:
            attempts += 1
            self.reducer.again(bucket)
            is_lasting = self._any([bucket])
        mismatch = self._mismatch(bucket, came, result, flags) if not is_lasting else self._lasting(bucket)
        mismatch["attempts"] = attempts
        if not is_lasting:
            self.healed += 1
            put(bucket, result)
        self._tell(mismatch, is_lasting=is_lasting)

    def _tell(self, mismatch: dict[str, Any], *, is_lasting: bool) -> None:
        response = "repair" if not is_lasting else "stop" if self.policy == "repair" else self.policy
        text = sentence(mismatch, self.step_of())
        if self.room.leads:
            say(f"{text}; " + ("it stays so" if is_lasting else "reduced again, and right"))
        self.reports.structure(self.room.leads, self.step_of(), mismatch, response)
        if is_lasting and response != "warn":
            self.room.gather(None)  # nobody raises before it has been told
            raise ReplicasDifferError(text)

    def _lasting(self, bucket: Bucket) -> dict[str, Any]:
        """Nothing to hold it against: the rows that are wrong say which parameters are."""
        flags = bucket.flagged if bucket.flagged is not None else torch.ones(bucket.rows, dtype=torch.bool)
        rows = self.room.gather(flags.nonzero().reshape(-1).tolist())
        wrong = sorted({row for some in rows for row in some})
        offsets = bucket.offsets()
        names = [
            self.name_of(parameter)
            for number, parameter in enumerate(bucket.parameters)
            if any(row * ROW < offsets[number + 1] and (row + 1) * ROW > offsets[number] for row in wrong)
        ]
        return {
            "compared": "reduce", "ranks": [], "sides": [], "stage": "in", "is_lasting": True,
            "tensors": names[: locate.NAMED], "count": len(names), "of": len(bucket.parts),
            "detail": f"rows wrong on {who([r for r, some in zip(self.room.ranks, rows, strict=True) if some])}",
        }  # fmt: skip

    def _mismatch(
        self, bucket: Bucket, came: torch.Tensor, result: torch.Tensor, flags: torch.Tensor | None
    ) -> dict[str, Any]:
        """The fields of a `state.Mismatch`."""
        changed = (locate.bits_of(came) != locate.bits_of(bucket.values)).nonzero().reshape(-1)
        mine = [int(place) for place in changed[:1]], len(changed), bool(flags is not None and flags.any())
        everybody = self.room.gather(mine)
        first = min((places[0] for places, _, _ in everybody if places), default=None)
        ranks, stage, detail = self._blame(bucket, came, everybody, first)
        found = {
            "compared": "reduce", "ranks": ranks, "told_by": "checksum" if ranks else "", "sides": [],
            "tensors": [], "count": 0, "of": len(bucket.parts), "stage": stage, "detail": detail,
        }  # fmt: skip
        if first is not None:
            found |= self._place(bucket, result, first, everybody)
        return found

    def _blame(
        self, bucket: Bucket, came: torch.Tensor, everybody: Sequence[Any], first: int | None
    ) -> tuple[list[int], str, str]:
        """Ranks, when it went wrong, and what more there is to say."""
        if first is None:
            return [], "checksum", "no gradient was changed"
        changed = [place for place, (_, count, _) in enumerate(everybody) if count]
        if len(changed) < len(everybody):
            return [self.room.ranks[place] for place in changed], "after", ""
        own = self._sent(bucket, first)
        values = self.room.gather((own.tolist(), came[first].tolist()))
        if len({repr(value) for _, value in values}) > 1:
            return [], "in", "ranks got different sums"
        sent = torch.tensor([value for value, _ in values], dtype=came.dtype)
        some = [self.room.ranks[place] for place in suspects(sent, came[first].cpu())]
        # A flip of the sum itself may look the same: a suspect is no culprit.
        detail = f"one bit of what {who(some)} sent would explain it" if some else "no single bit explains it"
        return [], "in", detail

    def _sent(self, bucket: Bucket, first: int) -> torch.Tensor:
        """What this rank had for one value, before it went anywhere."""
        if self.reducer.mode != "exact":
            return bucket.retained[first] * (1 / self.reducer.ranks)
        came = bucket.values.clone()
        self.reducer.fill(bucket)
        own = bucket.values[first].clone()
        bucket.values.copy_(came)
        return own

    def _place(self, bucket: Bucket, result: torch.Tensor, first: int, everybody: Sequence[Any]) -> dict[str, Any]:
        """Of the first parameter that came out wrong; what the first rank says that had it so."""
        offsets = bucket.offsets()
        number = next(n for n in range(len(bucket.parts)) if first < offsets[n + 1])
        part = slice(offsets[number], offsets[number + 1])
        mine = locate.compare(result[part].cpu(), bucket.result[part].cpu())
        seen = self.room.gather(tuple(mine))
        place = next((place for place, one in enumerate(seen) if one[0]), 0)
        comparison = locate.Comparison(*seen[place])
        count = sum(
            bool((locate.bits_of(a) != locate.bits_of(b)).any())
            for a, b in zip(bucket.cut(result), bucket.cut(bucket.result), strict=True)
        )
        found: dict[str, Any] = {**comparison._asdict(), "bits": list(comparison.bits)}
        found["tensors"] = [self.name_of(bucket.parameters[number])]
        found["count"] = max(self.room.gather(count))
        found["measured_on"] = self.room.ranks[place]
        return found


@torch.no_grad()
def put(bucket: Bucket, before: torch.Tensor) -> None:
    """The new result into gradients that have the old one; others have not come from this reduce."""
    parts = zip(bucket.parameters, bucket.cut(before), bucket.cut(bucket.result), strict=True)
    for parameter, old, new in parts:
        gradient = parameter.grad
        if gradient is None or gradient.shape != old.shape or same(old, new):
            continue
        if same(gradient, old):
            gradient.copy_(new)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN as well."""
    return torch.equal(locate.bits_of(one), locate.bits_of(other))
