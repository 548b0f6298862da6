"""What all ranks do together once they have seen that they differ: find out who, where and how; tell; repair or stop.

Every rank calls every function here at once, after the same exchange: whatever one decides, all decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from workbench.training.consistency import locate
from workbench.training.consistency.locate import Account, Comparison, Verdict
from workbench.training.consistency.measure import Measure
from workbench.training.consistency.replicas import Unit, describe, digest_of, local
from workbench.training.consistency.reports import who

WORDS: Final[Mapping[str, str]] = {
    "steps": "the steps that the optimizer has taken",
    "structure": "parameters' names, order, shapes or types",
    "settings": "the optimizer's options",
    "absent": "which gradients are None",
    "parameters": "parameters",
    "state": "optimizer state",
    "buffers": "buffers",
    "gradients": "gradients",
    "data": "what was read",
    "scale": "GradScaler's scale",
    "reduce": "what an all-reduce gave",
    "shards": "parameters before fully_shard",
    "gathered": "parameters that were gathered",
}


class Finding(NamedTuple):
    """`mismatch`: the fields of a `state.Mismatch`. `names`: tensors to be put right, by lane."""

    verdict: Verdict
    mismatch: dict[str, Any]
    names: dict[str, list[str]]
    accounts: Sequence[Account]


def inquire(
    unit: Unit, measure: Measure, differing: Sequence[str], *, known: Sequence[str], scale: int
) -> Finding | None:
    """`known`: lanes whose difference was told before. None: what differed does so no more."""
    unit.room.assemble()
    accounts = unit.room.gather(account(unit, measure, differing, scale))
    verdict = locate.decide(accounts, [lane for lane in differing if lane not in known])
    if verdict is None:
        return None
    comparison = _compare(unit, verdict)
    names = {lane: _names(accounts, verdict, lane) for lane in (*locate.TENSORS, "absent") if lane in differing}
    also = [lane for lane in differing if lane != verdict.lane]
    return Finding(verdict, describe_mismatch(unit, verdict, accounts, comparison, also), names, accounts)


def account(unit: Unit, measure: Measure, differing: Sequence[str], scale: int) -> dict[str, Any]:
    """What this rank tells the others: digests of every tensor of what differs, and what it has seen of itself."""
    items: dict[str, Any] = {
        "steps": unit.steps,
        "structure": describe(unit.members),
        "settings": unit.settings(),
        "absent": [name for (name, _), is_gone in zip(unit.members, unit.absent(), strict=True) if is_gone],
        "scale": scale,
    }
    items |= {lane: measure.each(named(unit, lane)) for lane in locate.TENSORS if lane in differing}
    return {
        "items": {lane: items.get(lane) for lane in ("steps", *differing)},
        "changed": unit.changed,
        "synced": sum(model.synced for model in unit.models),
        "unsynced": sum(model.unsynced for model in unit.models),
        "was_synced": all(model.was_synced for model in unit.models),
        "reduces": unit.reduces,
        "is_lacking": not any(True for _ in unit.state_of(unit.members)),
        "is_broken": not all(bool(gradient.isfinite().all()) for gradient in unit.gradients()),
    }


def named(unit: Unit, lane: str) -> dict[str, Any]:
    """Tensors, and plain values of optimizer state, by name."""
    if lane == "parameters":
        return {name: local(parameter).detach() for name, parameter in (*unit.members, *unit.frozen)}
    if lane == "gradients":
        grads = {name: local(p.grad) for name, p in unit.members if p.grad is not None}
        return {name: grad for name, grad in grads.items() if grad.layout is torch.strided}
    if lane == "state":
        return dict(unit.state_of(unit.members))
    return {
        name: buffer
        for model in unit.models
        for name, buffer in zip(model.buffer_names, model.buffer_copies, strict=False)
    }


def _compare(unit: Unit, verdict: Verdict) -> tuple[int, Comparison] | None:
    """The first tensor that differs, held against the reference's; what the first rank says that has it otherwise."""
    if verdict.lane not in locate.TENSORS or not verdict.names:
        return None
    tensor = named(unit, verdict.lane).get(verdict.names[0])
    is_fit = isinstance(tensor, torch.Tensor) and tensor.numel() <= locate.LARGEST
    shapes = unit.room.gather((tuple(tensor.shape), str(tensor.dtype)) if tensor is not None and is_fit else None)
    if None in shapes or len(set(shapes)) > 1 or tensor is None:
        return None
    reference = unit.room.send(tensor, verdict.reference)
    found = unit.room.gather(tuple(locate.compare(tensor.detach().cpu(), reference)))
    order = [*verdict.sides.deviating, *range(len(found))]
    return next(((place, Comparison(*found[place])) for place in order if found[place][0]), None)


def _names(accounts: Sequence[Account], verdict: Verdict, lane: str) -> list[str]:
    if lane == "absent":
        return [lane]
    values = [locate.value_of(one, lane) for one in accounts]
    return locate.different(values, verdict.sides.deviating, verdict.reference)[0]


def describe_mismatch(
    unit: Unit, verdict: Verdict, accounts: Sequence[Account], comparison: tuple[int, Comparison] | None,
    also: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The fields of a `state.Mismatch`, as JSON takes them."""
    ranks = unit.room.ranks

    def those(is_one: Any) -> list[int]:
        return [rank for rank, one in zip(ranks, accounts, strict=True) if is_one(one)]

    sides = verdict.sides.groups[: locate.SIDES]
    values = [locate.value_of(accounts[group[0]], verdict.lane) for group in sides]
    texts = values_of(verdict, accounts)
    lacking = those(lambda one: one["is_lacking"]) if verdict.lane == "state" else []
    found: dict[str, Any] = {
        "compared": verdict.lane,
        "ranks": [ranks[place] for place in verdict.sides.deviating],
        "told_by": verdict.sides.told_by,
        "sides": [[[ranks[p] for p in group], short(value)] for group, value in zip(sides, values, strict=True)],
        "also": list(also),
        "tensors": verdict.names[: locate.NAMED],
        "count": len(verdict.names),
        "of": verdict.of,
        "unsynced": those(lambda one: one["unsynced"] and not one["was_synced"]),
        "synced": those(lambda one: one["synced"]),
        "bypassed": those(lambda one: not one["synced"] and not one["unsynced"] and not one["reduces"]),
        "changed": those(lambda one: one["changed"].get(verdict.lane)),
        "lacking": lacking if len(lacking) < len(ranks) else [],
        "broken": those(lambda one: one["is_broken"]),
        "is_first": unit.agreements == 0,
        "is_wrapped": unit.is_wrapped,
        "broadcasts": all(model.broadcasts for model in unit.models),
        "late": int(unit.is_late),
        "values": texts,
        "detail": in_words(texts, [[ranks[place] for place in group] for group in sides]),
    }
    if comparison is not None:
        found["measured_on"], seen = ranks[comparison[0]], comparison[1]
        found |= {**seen._asdict(), "bits": list(seen.bits), "compared_with": ranks[verdict.reference]}
    return found


def short(value: Any) -> str:
    """A few digits that stand for what a side has."""
    return f"{digest_of(repr(value)) & (2**64 - 1):016x}"


def values_of(verdict: Verdict, accounts: Sequence[Account]) -> list[str]:
    """Of what is no tensor: what each side has, of a list its first line that not all have."""
    if verdict.lane in locate.TENSORS:
        return []
    found = [accounts[group[0]]["items"].get(verdict.lane) for group in verdict.sides.groups[: locate.SIDES]]
    lists = [value if isinstance(value, list) else [str(value)] for value in found]
    return first_difference(lists)


def first_difference(lists: Sequence[Sequence[str]]) -> list[str]:
    """The first line that is not the same in all, as each has it."""
    for number in range(max(map(len, lists))):
        lines = [lines[number] if number < len(lines) else "nothing" for lines in lists]
        if len(set(lines)) > 1:
            return lines
    return [""] * len(lists)


def in_words(values: Sequence[str], sides: Sequence[Sequence[int]]) -> str:
    """`group 0: lr = 0.1 on ranks 0 and 2; group 0: lr = 0.2 on rank 1`."""
    return "; ".join(f"{value} on {who(list(ranks))}" for value, ranks in zip(values[:4], sides, strict=False))


def sentence(mismatch: Mapping[str, Any], step: int) -> str:
    """The facts, in one line for the log and the exception; what they mean is `policy.consistency`'s."""
    what, ranks = WORDS[mismatch["compared"]], mismatch["ranks"]
    verb = "deviates" if len(ranks) == 1 else "deviate"
    parts = [f"step {step}: {who(ranks)} {verb} in {what}" if ranks else f"step {step}: ranks differ in {what}"]
    if mismatch["tensors"]:
        of = f" ({mismatch['count']} of {mismatch['of']} tensors)" if mismatch.get("of") else ""
        parts[0] += f": {mismatch['tensors'][0]}{of}"
    if mismatch.get("elements"):
        bits = f", bit {', '.join(map(str, mismatch['bits']))}" if mismatch["elements"] == 1 else ""
        parts.append(f"{mismatch['elements']} of {mismatch['size']} elements, the first at {mismatch['element']}{bits}")
        parts.append(f"by up to {mismatch['deviation']:.3g}")
    if mismatch["detail"]:
        parts.append(mismatch["detail"])
    if not ranks and mismatch["sides"]:
        parts.append(f"which of {' | '.join(who(side[0]) for side in mismatch['sides'][:4])} is right cannot be told")
    return ", ".join(parts)
