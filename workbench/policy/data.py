"""What is odd about the data that ranks read, what it most likely comes of, and what to do about it.

Pure, and a table: the first rule whose evidence is there decides. Some of it is done on purpose by some programs; then
the sentence says what it does, and when it is right.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from workbench.findings import Finding, Severity
from workbench.state import DataAbout, DataDoubt

SAMPLERS: Final = ("", "SequentialSampler", "RandomSampler", "DistributedSampler", "WeightedRandomSampler")


class DataCause(enum.Enum):
    """Each value is what a person reads."""

    SAME_SHARD = "ranks read the same shard"
    SAME_BATCH = "ranks got the same batch"
    WRONG_SPLIT = "data are split for another number of ranks"
    SAME_PLACE = "samplers deal to the same rank"
    NO_SET_EPOCH = "set_epoch was not called"
    SAME_ORDER = "the order repeats"
    OTHER_EPOCHS = "set_epoch differs between ranks"
    OWN_ORDER = "each rank reads all the data"
    OVERLAP = "shards overlap"
    UNEVEN = "batches of different sizes weigh the same"
    SAME_RANDOM = "ranks draw the same random numbers"
    SAME_SEED = "DataLoader workers of different ranks have the same seed"


class DataRule(msgspec.Struct, frozen=True):
    """`severity`: an error where nobody does it on purpose; a notice where it is so common that few ask for it."""

    applies: Callable[[DataDoubt], bool]
    cause: DataCause
    sentence: str
    fix: str
    severity: Severity = Severity.ERROR


def explain_data(doubt: DataDoubt, step: int) -> Finding:
    """`step`: optimizer steps finished when it was seen."""
    rule = next(rule for rule in RULES if rule.applies(doubt))
    small, large = doubt.sizes or (0, 0)
    words = {
        "ranks": "all ranks" if len(doubt.ranks) == doubt.of else names_of(doubt.ranks),
        "sampler": SAMPLERS[doubt.sampler] or "sampler",
        "epochs": ", ".join(map(str, doubt.epochs)),
        "share": f"{doubt.share:.0%}",
        "small": str(small),
        "large": str(large),
        "times": f"{large / small:.2g}" if small else "",
    }
    for name in ("of", "number", "epoch", "place", "places"):
        words[name] = str(getattr(doubt, name))
    words["last"] = str(doubt.number - 1)
    return Finding(
        symptom=rule.sentence.format(**words),
        cause=rule.cause.value,
        advice=rule.fix.format(**words),
        evidence=tuple(text.format(**words) for holds, text in EVIDENCE if holds(doubt)),
        severity=rule.severity,
        step=step,
        rank=doubt.ranks[0] if len(doubt.ranks) == 1 else None,
    )


def names_of(ranks: Sequence[int]) -> str:
    """`ranks 0, 2 and 3`."""
    named = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    if len(named) < 2:
        return f"rank {named[0]}" if named else "no rank"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _is(about: DataAbout) -> Callable[[DataDoubt], bool]:
    return lambda doubt: doubt.about is about


EVIDENCE: Final[tuple[tuple[Callable[[DataDoubt], bool], str], ...]] = (
    (lambda d: d.about is DataAbout.BATCH, "digests of the batch are equal on {ranks}, and were not those of before"),
    (lambda d: d.about is DataAbout.BATCH and d.is_drawn, "their samplers drew the same indices"),
    (lambda d: d.about is DataAbout.BATCH and d.is_apart, "though their samplers drew different indices"),
    (lambda d: 0 < d.sampler < len(SAMPLERS), "the sampler is a {sampler}"),
    (lambda d: d.about is DataAbout.ORDER, "the first batch of epoch {number} has the indices of that of {last}"),
    (lambda d: d.about is DataAbout.ORDER and d.is_same_epoch, "the sampler's epoch is {epoch} in both"),
    (lambda d: d.about is DataAbout.EPOCHS, "samplers have been told epochs {epochs}"),
    (lambda d: d.about is DataAbout.PLACES, "samplers of {ranks} deal for rank {place} of {places}"),
    (lambda d: d.about is DataAbout.OVERLAP, "about {share} of the samples drawn were drawn by several ranks"),
    (lambda d: d.about is DataAbout.SIZES, "batches have {small} samples on some ranks, {large} on others"),
    (lambda d: d.about is DataAbout.RANDOM and d.is_forward, "torch's random state is equal, and was drawn from"),
    (lambda d: d.about is DataAbout.RANDOM and not d.is_forward, "the base seed of their workers is equal"),
)

RULES: Final = (
    DataRule(
        lambda d: d.about is DataAbout.BATCH and d.is_drawn, DataCause.SAME_SHARD,
        "{ranks} got the same batch: they read the same shard, so that {of} ranks learn what one would",
        "give the DataLoader a DistributedSampler, made after init_process_group",
    ),
    DataRule(
        _is(DataAbout.BATCH), DataCause.SAME_BATCH,
        "{ranks} got the same batch, and go on to: their data are the same, or are made from the same seed",
        "choose data by the rank: DistributedSampler, or a seed with the rank in it", Severity.WARNING,
    ),
    DataRule(
        lambda d: d.about is DataAbout.PLACES and d.places != d.of, DataCause.WRONG_SPLIT,
        "data are split for {places} ranks where there are {of}: some samples are read by several ranks or by none",
        "give the sampler dist.get_world_size() and dist.get_rank(), after init_process_group",
    ),
    DataRule(
        _is(DataAbout.PLACES), DataCause.SAME_PLACE,
        "samplers of {ranks} deal for the same rank, {place}: they read the same shard",
        "give each sampler its own rank: dist.get_rank(), not the local rank, nor 0",
    ),
    DataRule(
        lambda d: d.about is DataAbout.ORDER and d.is_same_epoch, DataCause.NO_SET_EPOCH,
        "the sample order of epoch {number} equals that of epoch {last}: set_epoch was not called",
        "call loader.sampler.set_epoch(epoch) before each epoch",
    ),
    DataRule(
        _is(DataAbout.ORDER), DataCause.SAME_ORDER,
        "the sample order of epoch {number} equals that of epoch {last}, though its sampler was told another epoch",
        "let the sampler's order depend on the epoch that set_epoch gives it",
    ),
    DataRule(
        _is(DataAbout.EPOCHS), DataCause.OTHER_EPOCHS,
        "ranks shuffle for different epochs ({epochs}), {ranks} for another than most: their shards overlap",
        "call set_epoch with the same number on every rank",
    ),
    DataRule(
        lambda d: d.about is DataAbout.OVERLAP and SAMPLERS[d.sampler] in SAMPLERS[1:3], DataCause.OWN_ORDER,
        "each rank reads all the data in an order of its own, so that an epoch goes {of} times through them; right"
        " only where that is meant",
        "to go through them once, give the DataLoader a DistributedSampler", Severity.WARNING,
    ),
    DataRule(
        _is(DataAbout.OVERLAP), DataCause.OVERLAP,
        "shards overlap: about {share} of the samples were read by several ranks; right only where samples are drawn"
        " with replacement",
        "split the data by rank so that each sample is on one rank", Severity.WARNING,
    ),
    DataRule(
        _is(DataAbout.SIZES), DataCause.UNEVEN,
        "batches differ in size between ranks, {small} to {large}, and DDP gives each rank the same weight: samples"
        " of the smaller ones count {times} times as much",
        "give all ranks batches of one size, or weigh each loss by world size x its samples / samples of all ranks",
        Severity.WARNING,
    ),
    DataRule(
        lambda d: d.about is DataAbout.RANDOM and d.is_forward, DataCause.SAME_RANDOM,
        "{ranks} draw the same random numbers in training: dropout and augmentation are alike on them; right only"
        " where that is meant",
        "after the model is made, torch.manual_seed(seed + rank)", Severity.NOTICE,
    ),
    DataRule(
        _is(DataAbout.RANDOM), DataCause.SAME_SEED,
        "the DataLoader workers of {ranks} have the same seed: augmentation is alike on them; right only where that"
        " is meant",
        "give the DataLoader a generator seeded with seed + rank", Severity.NOTICE,
    ),
)  # fmt: skip
