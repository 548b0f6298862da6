"""Models that `fully_shard` keeps in parts: what ranks can still hold against each other.

    before it parts them    all ranks of a mesh must have the same parameters: it sends none
    gathered                parameters that were put together for forward or backward must be the same on all of them
    reduce-scatter          what comes out is the sum of what went in: checksums, done again when it is not
    replicated              of HSDP, the parts that several ranks have: parameters, gradients and state, by the checker

Nothing is hooked into a model, and a program's own communication stays: methods of torch's classes are wrapped.
Gathered parameters are looked at in the first steps, and then in one of `SELDOM`: by count, so that all ranks do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling as tracing

from workbench.training.consistency import lanes, locate
from workbench.training.consistency.check import ReplicasDifferError
from workbench.training.consistency.inquiry import sentence
from workbench.training.consistency.measure import Measure
from workbench.training.consistency.replicas import Member, Model, local
from workbench.training.consistency.reports import say
from workbench.training.consistency.room import LIFE, Room, plain_wait
from workbench.training.consistency.scatter import Scatter
from workbench.training.consistency.watch import Watch
from workbench.training.patching import Function

MODULE: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FIRST: Final = 3  # steps in each of which gathered parameters are looked at
SELDOM: Final = 16
MOST: Final = 4096  # gatherings of one step


class Sharding:
    """Of one process."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.measure = watch, Measure()
        self.rooms: dict[tuple[str, tuple[int, ...]], Room] = {}  # by what for, and the ranks of a mesh
        self.groups: list[Any] = []  # torch's FSDPParamGroup
        self.told: set[str] = set()
        self.steps = 0
        self.seen: list[tuple[Any, list[torch.Tensor]]] = []  # groups that were gathered in this step, and digests
        self.scatter: Scatter | None = None
        self._thread = get_ident()

    def room(self, mesh: Any) -> Room | None:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        if len(ranks) < 2:
            return None
        return self.room_of(ranks)

    def room_of_group(self, group: Any) -> Room | None:
        ranks = tuple(dist.get_process_group_ranks(group))
        return self.room_of(ranks, "scatter") if len(ranks) > 1 else None

    def room_of(self, ranks: tuple[int, ...], what: str = "") -> Room:
        key = (what, ranks)
        if key not in self.rooms:
            group = dist.new_group(list(ranks), backend="gloo", timeout=LIFE, use_local_synchronization=True)
            self.rooms[key] = Room(group, ranks, plain_wait())
        return self.rooms[key]

    def forget(self) -> None:
        self.rooms.clear()
        self.groups.clear()
        self.seen.clear()
        self.told.clear()

    # --- before parameters are parted ---------------------------------------------------------------------------------

    def around_making(self, plain: Function) -> Function:
        def __init__(group: Any, params: Any, modules: Any, mesh_info: Any, *args: Any, **kwargs: Any) -> None:
            self.guarded(lambda: self.compare_whole(params, modules, mesh_info.mesh))
            plain(group, params, modules, mesh_info, *args, **kwargs)
            self.groups.append(group)

        return __init__

    def compare_whole(self, params: Sequence[Any], modules: Sequence[Any], mesh: Any) -> None:
        if not params or any(p.is_meta or hasattr(p, "device_mesh") for p in params):
            return
        room = self.room(mesh)
        if room is None:
            return
        names = names_in(modules)
        tensors = {names.get(id(p), f"parameter {number}"): p.detach() for number, p in enumerate(params)}
        self.compare(room, "shards", tensors, self.measure.each(tensors))

    def compare(
        self, room: Room, what: str, tensors: Mapping[str, torch.Tensor], digests: Sequence[tuple[str, int]]
    ) -> None:
        """Raises `ReplicasDifferError` when they differ and the job is to stop or go back then."""
        whole = lanes.signed(sum(digest * (2 * n + 1) for n, (_, digest) in enumerate(digests)))
        reduced = room.exchange(lanes.row({"parameters": whole}))
        if reduced is None or not lanes.read(reduced).differing or what in self.told:
            return
        self.told.add(what)  # the others follow from it
        accounts = [{"items": {"parameters": one}, "changed": {}} for one in room.gather(list(digests))]
        verdict = locate.decide(accounts, ["parameters"])
        if verdict is None:
            return
        ranks = room.ranks
        mismatch: dict[str, Any] = {
            "compared": what,
            "ranks": [ranks[place] for place in verdict.sides.deviating],
            "told_by": verdict.sides.told_by,
            "sides": [[[ranks[p] for p in group], ""] for group in verdict.sides.groups[: locate.SIDES]],
            "tensors": verdict.names[: locate.NAMED], "count": len(verdict.names), "of": verdict.of,
            "is_first": what == "shards", "is_wrapped": False, "detail": "",
        }  # fmt: skip
        tensor = tensors.get(verdict.names[0])
        if all(room.gather(tensor is not None)) and tensor is not None:
            found = room.gather(tuple(locate.compare(tensor.cpu(), room.send(tensor, verdict.reference))))
            place = next((place for place, one in enumerate(found) if one[0]), verdict.reference)
            seen = locate.Comparison(*found[place])
            mismatch |= {**seen._asdict(), "bits": list(seen.bits), "measured_on": ranks[place]}
        self.tell(room, mismatch)

    def tell(self, room: Room, mismatch: dict[str, Any]) -> None:
        checker = self.watch.checker
        response = "warn" if checker.policy == "warn" else "stop"
        text = sentence(mismatch, checker.step_of())
        if room.leads:
            say(text)
        checker.reports.structure(room.leads, checker.step_of(), mismatch, response)
        if response != "warn":
            room.gather(None)  # nobody raises before it has been told
            raise ReplicasDifferError(text)

    # --- gathered -----------------------------------------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        return self.steps < FIRST or self.steps % SELDOM == 0

    def around_gathering(self, plain: Function) -> Function:
        def wait_for_unshard(group: Any) -> Any:
            is_new = not tracing() and self.is_looking and bool(group._all_gather_result)
            found = plain(group)
            if is_new and torch.is_grad_enabled() and get_ident() == self._thread:
                self.guarded(lambda: self.see(group))
            return found

        return wait_for_unshard

    def see(self, group: Any) -> None:
        """In forward; what backward gathers again is for other threads on a device."""
        digests = [self.measure.together([local(p._unsharded_param).detach()]) for p in group.fsdp_params]
        if len(self.seen) < MOST:
            self.seen.append((group, digests))

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step; its ranks have gathered the same, as often."""
        if tracing() or not self.groups or get_ident() != self._thread:
            return
        seen, self.seen = self.seen, []
        if self.is_looking and seen:
            self.guarded(lambda: self.compare_gathered(seen))
        self.steps += 1

    def compare_gathered(self, seen: Sequence[tuple[Any, list[torch.Tensor]]]) -> None:
        by_mesh: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for group, digests in seen:
            room = self.room(group.mesh_info.mesh)
            if room is not None:
                named = by_mesh.setdefault(room.ranks, [])
                for p, digest in zip(group.fsdp_params, digests, strict=True):
                    named.append((name_of(p), int(digest)))
        for ranks, named in by_mesh.items():
            self.compare(self.room_of(ranks), "gathered", {}, numbered(named))

    # --- replicated ---------------------------------------------------------------------------------------------------

    def replicated(self, parameters: Sequence[Any]) -> tuple[Room, list[Model], list[Member]] | None:
        """Of what an optimizer steps, the parts that the ranks of a replicate dimension have alike."""
        known = {id(p.sharded_param): (group, p) for group in self.groups for p in group.fsdp_params}
        hits = [known[id(parameter)] for parameter in parameters if id(parameter) in known]
        groups = {id(group): getattr(group.mesh_info, "replicate_process_group", None) for group, _ in hits}
        found = next(iter(groups.values()), None)
        if found is None or any(one is not found for one in groups.values()):
            return None
        room = self.watch.room(found)
        return (room, [], [Member(name_of(p), p.sharded_param) for _, p in hits]) if room is not None else None

    # --- reduce-scatter: see `scatter` --------------------------------------------------------------------------------

    def guarded(self, call: Callable[[], object]) -> None:
        """Watching never stops training, but for what it is to stop."""
        if self.watch.checker.off:
            return
        try:
            call()
        except ReplicasDifferError:
            raise
        except Exception as error:
            self.watch.give_up(error)


def name_of(param: Any) -> str:
    """Of torch's FSDPParam."""
    return f"{param._param_fqn or param._module_info.param_name}"


def numbered(named: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """A parameter that was gathered several times has a name for each."""
    counts: dict[str, int] = {}
    found = []
    for name, digest in named:
        counts[name] = counts.get(name, 0) + 1
        found.append((name if counts[name] == 1 else f"{name} (gathered again, {counts[name] - 1})", digest))
    return found


def names_in(modules: Sequence[Any]) -> dict[int, str]:
    return {id(parameter): name for module in modules for name, parameter in module.named_parameters()}


def install(watch: Watch, *, checks_reduces: bool = False) -> Sharding | None:
    """Where torch has loaded its `fully_shard`, which it does with torch._dynamo; None: it has not."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    module: Any = sys.modules.get(MODULE)
    if module is None:
        return None
    sharding = Sharding(watch)
    group = module.FSDPParamGroup
    watch.patches.wrap((group,), "__init__", sharding.around_making)
    watch.patches.wrap((group,), "wait_for_unshard", sharding.around_gathering)
    watch.patches.on_undo(register_optimizer_step_pre_hook(sharding.before).remove)
    watch.on_forget.append(sharding.forget)
    watch.sharded = sharding.replicated
    if checks_reduces:
        checker = watch.checker
        sharding.scatter = Scatter(checker.reports, checker.step_of, checker.policy, sharding.room_of_group)
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        watch.patches.wrap((collectives.DefaultReduceScatter,), "__call__", sharding.scatter.around)
    return sharding
