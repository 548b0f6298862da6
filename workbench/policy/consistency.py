"""What a difference between replicas most likely comes of, why, and what to do about it.

Pure, and a table: the first rule whose evidence is there decides. The evidence is what ranks found when they differed
(`state.Mismatch`); a cause is never more than it shows, and no rank is blamed that it does not name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from workbench.findings import Finding, Severity
from workbench.state import Compared, Mismatch

FEW_BITS: Final = 8  # that hardware changes at once; a computation that went another way changes more
FEW: Final = 4  # elements


class Cause(enum.Enum):
    """What replicas differ for; each value is what a person reads."""

    BYPASSED = "the wrapper's forward was bypassed"
    NO_SYNC = "no_sync on the wrong side"
    NOT_REDUCED = "gradients were not reduced"
    SCALED = "gradients were scaled on some ranks"
    CHANGED = "gradients were changed after the reduce"
    NOT_FINITE = "gradients are not finite on some ranks"
    CORRUPTED = "bits flipped"
    REDUCED = "the all-reduce went wrong"
    SEEDS = "each rank its own weights before fully_shard"
    GATHERED = "the all-gather went wrong"
    ABSENT = "some ranks have no gradient"
    ORDER = "parameters in another order"
    TYPES = "parameters of another type"
    STRUCTURE = "other parameters"
    LOADED = "loaded on some ranks only"
    INITIAL = "weights differ from the first step on"
    STATE_LOADED = "optimizer state loaded on some ranks only"
    OPTIONS = "other options of the optimizer"
    BUFFERS = "buffers are not synchronised"
    SKIPPED = "some ranks left out a step"
    SCALER = "GradScaler disagrees"
    WRITTEN = "changed between two steps"
    DRIFTED = "drifted apart"
    UNKNOWN = "unknown"


class Rule(msgspec.Struct, frozen=True):
    """`sentence`: what is so, and why we think it; `fix`: what to do, in one sentence."""

    applies: Callable[[Mismatch], bool]
    cause: Cause
    sentence: str
    fix: str
    severity: Severity = Severity.ERROR


def explain(mismatch: Mismatch, step: int) -> Finding:
    """`step`: optimizer steps finished when it was seen."""
    rule = _rule_of(mismatch)
    words = {"ranks": _names(mismatch.ranks), "what": WHAT[mismatch.compared], "tensor": _tensor(mismatch)}
    words |= {"ratio": f"{mismatch.ratio:.4g}", "unsynced": _names(mismatch.unsynced), "detail": mismatch.detail}
    words |= {"lacking": _names(mismatch.lacking), "broken": _names(mismatch.broken), "who": _who(mismatch)}
    return Finding(
        symptom=rule.sentence.format(**words),
        cause=rule.cause.value,
        advice=rule.fix.format(**words),
        evidence=evidence_of(mismatch),
        severity=rule.severity,
        step=step,
        rank=mismatch.ranks[0] if len(mismatch.ranks) == 1 else None,
    )


def cause_of(mismatch: Mismatch) -> Cause:
    return _rule_of(mismatch).cause


def _rule_of(mismatch: Mismatch) -> Rule:
    return next(rule for rule in RULES if rule.applies(mismatch))


def is_corruption(mismatch: Mismatch) -> bool:
    """Whether it looks like a fault of the device or its memory, and of one that is known."""
    return bool(mismatch.ranks) and cause_of(mismatch) is Cause.CORRUPTED


def summary(mismatch: Mismatch, step: int) -> str:
    """One line: `step 5: rank 1 deviates in gradients: 0.weight, element 5, bit 3, by up to 7.45e-09; bits flipped`."""
    where = f": {place}" if (place := place_of(mismatch)) else ""
    return f"{_who(mismatch)} in {WHAT[mismatch.compared]} at step {step}{where}; {cause_of(mismatch).value}"


def place_of(mismatch: Mismatch) -> str:
    """`0.weight (1 of 4 tensors), 1 of 128 elements, the first at 5, bit 3, by up to 7.45e-09`."""
    parts = []
    if mismatch.tensors:
        parts.append(mismatch.tensors[0] + (f" ({mismatch.count} of {mismatch.of} tensors)" if mismatch.of else ""))
    if mismatch.elements:
        bits = f", bit {', '.join(map(str, mismatch.bits))}" if mismatch.elements <= FEW else ""
        parts.append(f"{mismatch.elements} of {mismatch.size} elements, the first at {mismatch.element}{bits}")
        parts.append(f"by up to {mismatch.deviation:.3g}" + _relative(mismatch))
    if mismatch.compared in TOLD_IN_WORDS and mismatch.detail:
        parts.append(mismatch.detail)
    return ", ".join(parts)


def evidence_of(mismatch: Mismatch) -> tuple[str, ...]:
    """What was seen, the most telling first."""
    m = mismatch
    sides = " | ".join(_names(side.ranks) for side in m.sides[:4])
    said = [
        (bool(m.bypassed), f"the wrapper's forward was not called for this step on {_names(m.bypassed)}"),
        (bool(m.unsynced), f"the last backward before the step was under no_sync on {_names(m.unsynced)}"),
        (bool(m.lacking), f"{_names(m.lacking)} had none"),
        (bool(m.broken), f"not finite on {_names(m.broken)}"),
        (bool(m.changed), f"{_names(m.changed)} had something else itself after its last step"),
        (bool(m.ratio), f"all of it is {m.ratio:.4g} times what rank {m.compared_with} has"),
        (bool(place_of(m)), place_of(m)),
        (m.told_by == "majority", f"the others agree: {sides}"),
        (not m.told_by, f"no majority: {sides}"),
        (m.is_first, "at the first check: they never agreed"),
        (bool(m.attempts), f"reduced again from what was sent {_times(m.attempts)}, {_outcome(m)}"),
        (bool(m.late), f"seen {m.late} step late, as the device was not waited for"),
    ]
    return tuple(text for holds, text in said if holds)


# --- words ------------------------------------------------------------------------------------------------------------

WHAT: Final = {
    Compared.STEPS: "steps of the optimizer",
    Compared.STRUCTURE: "parameters' names, order, shapes or types",
    Compared.SETTINGS: "options of the optimizer",
    Compared.ABSENT: "which gradients are None",
    Compared.PARAMETERS: "parameters",
    Compared.STATE: "optimizer state",
    Compared.BUFFERS: "buffers",
    Compared.GRADIENTS: "gradients",
    Compared.DATA: "data read",
    Compared.SCALE: "GradScaler's scale",
    Compared.REDUCE: "what an all-reduce gave",
    Compared.SHARDS: "parameters before fully_shard",
    Compared.GATHERED: "parameters that were gathered",
}
TOLD_IN_WORDS: Final = (Compared.STEPS, Compared.STRUCTURE, Compared.SETTINGS, Compared.ABSENT, Compared.SCALE)


def _names(ranks: Sequence[int]) -> str:
    named = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    if len(named) < 2:
        return f"rank {named[0]}" if named else "no rank"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _who(mismatch: Mismatch) -> str:
    if not mismatch.ranks:
        return "ranks differ"
    return f"{_names(mismatch.ranks)} deviate{'s' if len(mismatch.ranks) == 1 else ''}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _outcome(mismatch: Mismatch) -> str:
    return "and it went wrong each time" if mismatch.is_lasting else "and it came out right"


def _tensor(mismatch: Mismatch) -> str:
    return mismatch.tensors[0] if mismatch.tensors else "them"


def _relative(mismatch: Mismatch) -> str:
    return f", {mismatch.relative:.2g} of its RMS" if mismatch.relative else ""


# --- evidence ---------------------------------------------------------------------------------------------------------


def _is(*compared: Compared) -> Callable[[Mismatch], bool]:
    return lambda m: m.compared in compared


def _both(*tests: Callable[[Mismatch], bool]) -> Callable[[Mismatch], bool]:
    return lambda m: all(test(m) for test in tests)


def _has_flipped(m: Mismatch) -> bool:
    """Few bits of few elements of one tensor."""
    return m.count == 1 and 0 < m.elements <= FEW and len(m.bits) <= FEW_BITS


def _is_one_tensor(m: Mismatch) -> bool:
    return m.count == 1 and m.of > 1 and bool(m.elements)


def _has_other_names(m: Mismatch) -> bool:
    """What each side has at the first difference, as `a.weight (8, 8) float32`: only the name is another."""
    lines = [value.partition(" ") for value in m.values[:2]]
    return len(lines) == 2 and lines[0][2] == lines[1][2] != "" and lines[0][0] != lines[1][0]


def _has_other_types(m: Mismatch) -> bool:
    lines = [value.rpartition(" ") for value in m.values[:2]]
    return len(lines) == 2 and lines[0][0] == lines[1][0] != ""


REDUCE: Final = _is(Compared.REDUCE)
GRADIENTS: Final = _is(Compared.GRADIENTS)
PARAMETERS: Final = _is(Compared.PARAMETERS)
STATE: Final = _is(Compared.STATE)
BUFFERS: Final = _is(Compared.BUFFERS)
STRUCTURE: Final = _is(Compared.STRUCTURE)
AFTER: Final = "the all-reduce gave every rank the same"

RULES: Final = (
    Rule(
        _both(STRUCTURE, _has_other_names), Cause.ORDER,
        "ranks register the same shapes under other names, so that DDP averages unlike with unlike: {detail}",
        "register modules in the same order on every rank: it may not depend on the rank, nor on the order of a set",
    ),
    Rule(
        _both(STRUCTURE, _has_other_types), Cause.TYPES,
        "ranks have parameters of other types, whose bits DDP adds up all the same: {detail}",
        "give the model the same dtype on every rank before it is wrapped",
    ),
    Rule(
        STRUCTURE, Cause.STRUCTURE, "ranks do not have the same parameters: {detail}",
        "build the same model on every rank: nothing in it may depend on the rank",
    ),
    Rule(
        _is(Compared.STEPS), Cause.SKIPPED, "some ranks left out a step of the optimizer that others took: {detail}",
        "take or skip a step on all ranks alike: with GradScaler, reduce found_inf, and skip for no other reason",
    ),
    Rule(
        _is(Compared.SCALE), Cause.SCALER, "GradScaler's scale is not the same on all ranks: {detail}",
        "unscale after the all-reduce, and let all ranks skip a step when one of them overflows",
    ),
    Rule(
        _is(Compared.SETTINGS), Cause.OPTIONS, "the optimizer's options are not the same on all ranks: {detail}",
        "set learning rate and options from what all ranks know: a scheduler that looks at a loss needs its mean",
    ),
    Rule(
        _is(Compared.ABSENT), Cause.ABSENT,
        "some ranks have no gradient where others have one, and step other parameters: {detail}",
        "use the same parameters on all ranks, or DDP's find_unused_parameters=True",
    ),
    Rule(
        _both(REDUCE, lambda m: m.stage == "checksum"), Cause.REDUCED,
        "a checksum was hit on its way, and no gradient", "nothing: look at memory and network if it comes again",
        Severity.WARNING,
    ),
    Rule(
        _both(REDUCE, lambda m: m.is_lasting), Cause.REDUCED,
        "the all-reduce does not give the sum of what ranks send, each time it is done: {tensor}",
        "look for a fault of the communication library, or a device that fails: dtrain doctor, another backend",
    ),
    Rule(
        _both(REDUCE, lambda m: m.stage == "after" and bool(m.ranks)), Cause.CORRUPTED,
        "what the all-reduce gave was changed on {ranks}, in {tensor}: memory, device or network at fault there",
        "nothing more for this step, it was reduced again; replace the device if it comes again",
        Severity.WARNING,
    ),
    Rule(
        REDUCE, Cause.REDUCED,
        "what the all-reduce gave is not the sum of what ranks had: corrupted in it or on the way there, in {tensor};"
        " {detail}",
        "nothing more for this step, it was reduced again; look at memory and network if it comes again",
        Severity.WARNING,
    ),
    Rule(
        _is(Compared.SHARDS), Cause.SEEDS,
        "ranks had other weights when fully_shard parted them, and it sends none: the model is a patchwork of theirs,"
        " {tensor} first",
        "set the same seed on every rank before the model is made, or load a full state dict after fully_shard",
    ),
    Rule(
        _is(Compared.GATHERED), Cause.GATHERED,
        "the same shards came out of the all-gather otherwise on some ranks: {who}, in {tensor}",
        "look at memory and network of {ranks}; replace the device if it comes again",
    ),
    Rule(
        _both(GRADIENTS, lambda m: m.is_wrapped and bool(m.bypassed)), Cause.BYPASSED,
        "no all-reduce happened: the wrapped module was called, not the wrapper, and each rank steps with its own"
        " gradients; parameters differ on all ranks from now on",
        "call the model that DDP returned, never model.module, in training",
    ),
    Rule(
        _both(GRADIENTS, lambda m: bool(m.unsynced and m.synced)), Cause.NO_SYNC,
        "the gradients that the optimizer uses were not reduced on the last micro-batch: no_sync is on the wrong side",
        "put no_sync around all micro-batches but the last",
    ),
    Rule(
        _both(GRADIENTS, lambda m: bool(m.unsynced)), Cause.NOT_REDUCED,
        "every backward before this step was under no_sync: each rank steps with its own gradients",
        "leave the last backward before optimizer.step out of no_sync",
    ),
    Rule(
        _both(GRADIENTS, lambda m: not m.is_wrapped and bool(m.bypassed)), Cause.NOT_REDUCED,
        "the loop called all_reduce for no gradient before this step",
        "all-reduce gradients before every optimizer.step",
    ),
    Rule(
        _both(GRADIENTS, lambda m: bool(m.ranks and m.broken) and set(m.broken) <= set(m.ranks)), Cause.NOT_FINITE,
        "gradients of {broken} are not finite, after " + AFTER,
        "look for what changes gradients between backward and optimizer.step on {broken} only",
    ),
    Rule(
        _both(GRADIENTS, lambda m: m.ratio != 0.0), Cause.SCALED,
        "{who} in gradients between the all-reduce and the step: all of {tensor} is {ratio} times what others have",
        "clip or scale gradients on all ranks alike, not under `if rank == 0`",
    ),
    Rule(
        _both(GRADIENTS, _has_flipped), Cause.CORRUPTED,
        "{who} in {tensor} after the all-reduce, in few bits: memory or device at fault",
        "repair it, and replace the device if it comes again: --on-mismatch repair",
    ),
    Rule(
        _both(GRADIENTS, lambda m: bool(m.ranks)), Cause.CHANGED,
        "{who} in gradients: " + AFTER + ", and they were changed between it and the step",
        "let nothing that only {ranks} does touch gradients between backward and optimizer.step",
    ),
    Rule(
        _both(GRADIENTS, _is_one_tensor), Cause.CHANGED,
        "gradients of {tensor} differ between the all-reduce and the step, and nothing says on which rank",
        "let nothing that depends on the rank touch gradients between backward and optimizer.step",
    ),
    Rule(
        GRADIENTS, Cause.NOT_REDUCED, "gradients differ on all ranks: they were not reduced, or changed afterwards",
        "see that every backward before optimizer.step goes through DDP, and that all its parameters were wrapped",
    ),
    Rule(
        _both(STATE, lambda m: bool(m.lacking)), Cause.STATE_LOADED,
        "optimizer state was loaded on some ranks only: {lacking} had none of it; parameters will drift apart",
        "load the optimizer's state on every rank",
    ),
    Rule(
        _both(PARAMETERS, lambda m: m.is_first), Cause.LOADED,
        "parameters differ from the first step on: {who}, in {tensor}; weights were loaded or replaced on some ranks",
        "load weights before DDP wraps the model, or on every rank",
    ),
    Rule(
        _both(STATE, lambda m: m.is_first), Cause.STATE_LOADED,
        "optimizer state differs from the first step on: {who}, in {tensor}; it was loaded on some ranks only",
        "load the optimizer's state on every rank",
    ),
    Rule(
        _both(_is(Compared.PARAMETERS, Compared.STATE), _has_flipped), Cause.CORRUPTED,
        "{who} in {what} {tensor}, in few bits: memory or device at fault, as the optimizer did not do that",
        "repair it, or roll back as gradients have been computed with it; replace the device if it comes again",
    ),
    Rule(
        _both(_is(Compared.PARAMETERS, Compared.STATE), lambda m: bool(m.changed)), Cause.WRITTEN,
        "{what} of {ranks} changed between two steps: {tensor}",
        "let nothing that depends on the rank write to parameters or optimizer state between steps",
    ),
    Rule(
        _is(Compared.PARAMETERS, Compared.STATE), Cause.DRIFTED,
        "{what} have drifted apart since they last agreed: {who}, in {tensor}",
        "look for what writes to them on some ranks only; with kernels that are not deterministic, --deterministic",
    ),
    Rule(
        _both(BUFFERS, _has_flipped, lambda m: bool(m.ranks)), Cause.CORRUPTED,
        "{who} in buffer {tensor}, in few bits: memory or device at fault", "repair it: --on-mismatch repair",
    ),
    Rule(
        _both(BUFFERS, lambda m: not m.broadcasts), Cause.BUFFERS,
        "buffers are each rank's own, as DDP does not send them: {tensor}; what is evaluated or saved depends on the"
        " rank",
        "leave DDP's forward_sync_buffers on, or use SyncBatchNorm",
        Severity.WARNING,
    ),
    Rule(
        BUFFERS, Cause.BUFFERS, "{who} in buffers: {tensor}",
        "register buffers before DDP wraps the model, and write to them alike on every rank",
    ),
    Rule(lambda m: True, Cause.UNKNOWN, "{who} in {what}: {tensor}", "look at what ranks do differently"),
)  # fmt: skip
