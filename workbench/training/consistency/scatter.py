"""Linear checksums across the reduce-scatter of `fully_shard`: sums of rows of each rank's part go through a reduce
with the same operation, and must come out as the sums of the rows of the part that comes out. See `sums` for the bound.

What went in is still there, so that it is done again at once, up to twice, by all ranks of the group; a rank waits for
its device then. Only where the job asks for it (`--check-reduce`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from workbench.training.consistency import sums
from workbench.training.consistency.check import ReplicasDifferError
from workbench.training.consistency.inquiry import sentence
from workbench.training.consistency.reports import Reports, say
from workbench.training.consistency.room import Room, plain_wait

ATTEMPTS: Final = 2


class Scatter:
    """`room`: a room for the ranks of a process group."""

    def __init__(
        self, reports: Reports, step_of: Callable[[], int], policy: str, room: Callable[[Any], Room | None]
    ) -> None:  # fmt: skip
        self.reports, self.step_of, self.policy, self.room = reports, step_of, policy, room
        self.checked = self.found = self.healed = 0
        self.off = ""
        self._wait = plain_wait()

    def around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(
            comm: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
            async_op: bool = False,
        ) -> Any:  # fmt: skip
            def reduce() -> Any:
                return plain(comm, output_tensor, input_tensor, group, op, async_op)

            if async_op or self.off or not input_tensor.is_floating_point():
                return reduce()
            work = reduce()
            try:
                self.check(output_tensor, input_tensor, group, op, reduce)
            except ReplicasDifferError:
                raise
            except Exception as error:
                self.off = f"{type(error).__name__}: {error}"
                say(f"reduce-scatters are no longer checked: {self.off}")
            return work

        return __call__

    def check(
        self, output: torch.Tensor, sent: torch.Tensor, group: Any, op: Any, reduce: Callable[[], Any]
    ) -> None:  # fmt: skip
        room = self.room(group)
        if room is None:
            return
        self.checked += 1
        ranks = room.size
        expected = self._expected(sent, group, op, ranks)
        attempts = 0
        wrong = self._wrong(room, output, expected, ranks)
        first = wrong
        while wrong is not None and attempts < ATTEMPTS:
            attempts += 1
            reduce()
            wrong = self._wrong(room, output, expected, ranks)
        if first is not None:
            self._tell(room, first, attempts, is_lasting=wrong is not None)

    def _expected(self, sent: torch.Tensor, group: Any, op: Any, ranks: int) -> torch.Tensor:
        """Sums and scales of this rank's part, over all ranks."""
        parts = sent.detach().view(ranks, -1)
        table = torch.stack([rows(part) for part in parts])
        flat = table.view(-1, sums.ROW)
        found = sums.row_sums(flat)
        both = torch.stack([found, sums.scales(flat, found)]).view(2, ranks, -1).transpose(0, 1).contiguous()
        options: Any = dist.AllreduceOptions()
        options.reduceOp = op
        self._wait(group.allreduce([both], options))
        own: torch.Tensor = both[dist.get_rank(group)]
        return own

    def _wrong(self, room: Room, output: torch.Tensor, expected: torch.Tensor, ranks: int) -> list[int] | None:
        """Ranks whose part is not what it should be; None: none."""
        allowed = sums.tolerance(ranks, output.dtype)
        found = sums.row_sums(rows(output.detach()))
        row = torch.zeros(ranks, dtype=torch.int64)
        row[room.index] = bool(sums.broken(found, expected[0], expected[1], allowed).any())
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(room.group.allreduce([row], options))
        wrong = [room.ranks[place] for place in row.nonzero().reshape(-1).tolist()]
        return wrong or None

    def _tell(self, room: Room, wrong: list[int], attempts: int, *, is_lasting: bool) -> None:
        self.found += 1
        self.healed += not is_lasting
        response = "repair" if not is_lasting else "stop" if self.policy == "repair" else self.policy
        mismatch: dict[str, Any] = {
            "compared": "reduce", "ranks": [], "sides": [], "tensors": [], "stage": "in", "attempts": attempts,
            "is_lasting": is_lasting, "is_wrapped": False,
            "detail": f"a reduce-scatter, in the part of rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}",
        }  # fmt: skip
        text = sentence(mismatch, self.step_of())
        if room.leads:
            say(f"{text}; " + ("it stays so" if is_lasting else "reduced again, and right"))
        self.reports.structure(room.leads, self.step_of(), mismatch, response)
        if is_lasting and response != "warn":
            room.gather(None)
            raise ReplicasDifferError(text)


def rows(part: torch.Tensor) -> torch.Tensor:
    """As a table whose last row is filled up with zeros."""
    flat = part.reshape(-1)
    count = sums.rows_of(flat.numel())
    table = flat.new_zeros(count * sums.ROW)
    table[: flat.numel()] = flat
    return table.view(count, sums.ROW)
