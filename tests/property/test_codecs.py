"""What is written comes back: events, black boxes, buckets as they are folded, merged and packed."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import blackbox
from workbench.blackbox import CAPACITY, SIZE, STEP, Activity, StepRecord, Writer, iter_steps, read_header, read_steps
from workbench.events import EVENT_TYPES, Event, decode_event, encode_event
from workbench.feed import Bucket
from workbench.findings import Finding, Severity
from workbench.origin import Origin, Source
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import (
    Checkpoint,
    CheckpointTier,
    Compared,
    DataAbout,
    DataDoubt,
    Failure,
    FailureKind,
    JobPhase,
    Mismatch,
    Placement,
    Side,
    StackGroup,
    Stall,
    StallKind,
)
from workbench.store.packing import pack_buckets, pack_steps, unpack_buckets, unpack_steps
from workbench.views.buckets import PHASES, OpenBuckets, across_ranks, fold_steps, merge, merge_totals

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
real = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**62), 2**62)

SPECIFIC: dict[Any, st.SearchStrategy[Any]] = {
    JobSpec: st.builds(
        JobSpec,
        entrypoint=text,
        kind=st.sampled_from(EntrypointKind),
        args=st.tuples(text, text),
        payload=st.binary(max_size=30),
        env=st.dictionaries(text, text, max_size=3),
        seed=st.none() | whole,
    ),
    Failure: st.builds(
        Failure, kind=st.sampled_from(FailureKind), rank=st.none() | whole, reason=text, time=real, traceback=text
    ),
    JobPhase: st.sampled_from(JobPhase),
}
SPECIFIC[Stall] = st.builds(
    Stall,
    kind=st.sampled_from(StallKind),
    ranks=st.tuples(whole, whole),
    reason=text,
    since=real,
    stacks=st.tuples(st.builds(StackGroup, ranks=st.tuples(whole), text=text)),
)
SPECIFIC[Mismatch] = st.builds(
    Mismatch,
    compared=st.sampled_from(Compared),
    ranks=st.tuples(whole),
    sides=st.tuples(st.builds(Side, ranks=st.tuples(whole, whole), digest=text)),
    also=st.tuples(st.sampled_from(Compared)),
    tensors=st.tuples(text),
    element=st.none() | whole,
    bits=st.tuples(whole),
    deviation=real,
    values=st.tuples(text, text),
)
SPECIFIC[DataDoubt] = st.builds(
    DataDoubt,
    about=st.sampled_from(DataAbout),
    ranks=st.tuples(whole, whole),
    of=whole,
    share=real,
    epochs=st.tuples(whole),
)
SPECIFIC[tuple[int, ...]] = st.lists(whole, max_size=3).map(tuple)
SPECIFIC[tuple[str, ...]] = st.lists(text, max_size=3).map(tuple)
SPECIFIC[Origin] = st.builds(
    Origin,
    root=text,
    sources=st.tuples(st.builds(Source, path=text, digest=text, text=text)),
    packages=st.dictionaries(text, text, max_size=3),
    cores=whole,
    left_out=st.tuples(text),
)
SPECIFIC[Finding] = st.builds(
    Finding, symptom=text, cause=text, advice=text, evidence=st.tuples(text), severity=st.sampled_from(Severity),
    step=st.none() | whole, rank=st.none() | whole,
)  # fmt: skip
SPECIFIC[Finding | None] = st.none() | SPECIFIC[Finding]
SPECIFIC[CheckpointTier] = st.sampled_from(CheckpointTier)
SPECIFIC[Checkpoint] = st.builds(
    Checkpoint, step=whole, path=text, world_size=whole, saved_at=real, tier=SPECIFIC[CheckpointTier], problem=text
)
SPECIFIC[tuple[Placement, ...]] = st.lists(
    st.builds(Placement, rank=whole, local_rank=whole, node_rank=whole, worker=text, slot=whole, host=text), max_size=3
).map(tuple)
SPECIFIC[tuple[Failure, ...]] = st.lists(SPECIFIC[Failure], max_size=3).map(tuple)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: text, float: real, int: whole, bool: st.booleans(), int | None: st.none() | whole,
    float | None: st.none() | real,
}  # fmt: skip


def event_of(kind: type[Any]) -> st.SearchStrategy[Event]:
    """Any event of this type: every field filled, so that none is forgotten by the codec."""
    hints = get_type_hints(kind)
    known = SPECIFIC | PLAIN
    return st.builds(kind, **{name: known[hints[name]] for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_every_event_comes_back_as_it_was(kind: type[Any]) -> None:
    @settings(max_examples=30, deadline=None)
    @given(event_of(kind))
    def check(event: Event) -> None:
        data = encode_event(event)
        assert decode_event(data) == event and decode_event(data.decode()) == event
        assert encode_event(decode_event(data)) == data

    check()


@given(st.binary(max_size=60) | text)
def test_what_is_no_event_is_refused(data: bytes | str) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_event(data)


# --- black box --------------------------------------------------------------------------------------------------------


def record(step: int) -> StepRecord:
    return StepRecord(step, step * 0.5, *(float(step % k + 1) for k in range(2, 12)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, CAPACITY * 2), st.booleans()), max_size=6))
def test_a_black_box_tells_every_step_once_or_counts_it_as_lost(turns: list[tuple[int, bool]]) -> None:
    """Bursts of steps, some followed by a read: also beyond the ring's end and capacity."""
    buffer = bytearray(SIZE)
    blackbox.format_box(buffer)
    writer, written, cursor, lost, seen = Writer(buffer), 0, 0, 0, []
    for count, is_read in [*turns, (0, True)]:
        for _ in range(count):
            writer.record(*record(written))
            written += 1
        if is_read:
            block, cursor, overwritten = read_steps(buffer, cursor)
            records = list(iter_steps(block))
            assert all(found == record(found.step) for found in records)
            seen += [found.step for found in records]
            lost += overwritten
    assert cursor == read_header(buffer).head == written
    assert len(seen) + lost == written and seen == sorted(set(seen))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, CAPACITY), st.integers(0, 300), st.booleans()), max_size=6),
    st.integers(0, 2**40),
)
def test_brief_records_come_back_whole(turns: list[tuple[int, int, bool]], origin: int) -> None:
    """Some whole records, then some brief ones, by turns; the end of each step is its number in half seconds."""
    buffer = bytearray(SIZE)
    blackbox.format_box(buffer)
    writer, step, cursor, lost, seen = Writer(buffer), 0, 0, 0, []
    writer.offset(float(origin))
    for plain, brief, is_read in [*turns, (1, 0, True)]:
        for _ in range(plain or 1):
            step += 1
            writer.record(step, origin + step * 0.5, 0.5, 0.1, 0.1, 0.2, 0.05, 0.05, 0.0, 3.0, 1.0, 2.0)
        for _ in range(brief):
            step += 1
            head, at, _ = writer.brief_slots(1)
            writer.times[at], writer.times[at + 1], writer.times[at + 2] = step * 0.5, 0.3, 7.0
            writer.times[blackbox.HEAD_WORD] = head + 1
        assert read_header(buffer).step == read_header(buffer).head == step
        assert read_header(buffer).since == origin + step * 0.5
        if is_read:
            block, cursor, overwritten = read_steps(buffer, cursor)
            records = list(iter_steps(block))
            assert [found.end for found in records] == [origin + found.step * 0.5 for found in records]
            assert {found.samples for found in records} <= {3.0, 7.0}
            for found in records:
                assert found.duration == 0.5 and found.checkpoint == 0.0
                share = (0.5 - found.data) / 0.4
                parts = (0.1 * share, 0.2 * share, 0.05 * share, 0.05 * share)
                assert found[4:8] == pytest.approx(parts)
            seen += [found.step for found in records]
            lost += overwritten
    assert cursor == step and len(seen) + lost == step and seen == sorted(set(seen))


@given(
    whole, st.sampled_from(Activity), real, st.integers(0, 2**40), text, st.integers(0, 2**40), st.integers(0, 2**40)
)
def test_a_black_boxs_header_comes_back(
    step: int, activity: Activity, since: float, seq: int, name: str, done: int, total: int
) -> None:
    buffer = bytearray(SIZE)
    blackbox.format_box(buffer)
    writer = Writer(buffer)
    writer.now(step, activity, since)
    writer.collective(seq, name)
    writer.progress(done, total)
    found = read_header(buffer)
    assert (found.step, found.activity, found.since, found.collective_seq) == (step, activity, since, seq)
    assert found.progress == ((done, total) if total else None)
    cut = name.encode()[:64].rstrip(b"\0")
    assert found.collective == cut.decode(errors="replace")


# --- buckets ----------------------------------------------------------------------------------------------------------

# Binary fractions: their sums are exact in any order, so that "preserved" can mean equal.
eighths = st.integers(0, 800).map(lambda k: k / 8)
steps = st.builds(
    lambda end, duration, parts, samples, loss: StepRecord(1, end, duration, *parts, samples, samples * 2, loss),
    end=eighths,
    duration=eighths,
    parts=st.tuples(*[eighths] * 6),
    samples=st.integers(0, 1000).map(float),
    loss=eighths | st.just(math.nan),
)
by_rank = st.dictionaries(st.integers(0, 5), st.lists(steps, min_size=1, max_size=30), max_size=4)
SUMS = ("steps", "duration", "samples", "tokens", *PHASES)


def folded(ranks: dict[int, list[StepRecord]], width: float = 1.0) -> list[Bucket]:
    found: OpenBuckets = {}
    for rank, records in ranks.items():
        ordered = sorted(records, key=lambda r: r.end)
        half = len(ordered) // 2
        for part in (ordered[:half], ordered[half:]):  # reports come in pieces
            fold_steps(found, rank, b"".join(map(blackbox.pack_step, part)), width)
    return [bucket for _, group in sorted(found.items()) for _, bucket in sorted(group.items())]


def sums(items: list[Any]) -> dict[str, float]:
    return {name: sum(getattr(item, name) for item in items) for name in SUMS}


@settings(max_examples=100, deadline=None)
@given(by_rank, st.sampled_from([1.0, 2.0, 7.0, 10.0, 60.0]))
def test_folding_and_merging_keep_every_sum(ranks: dict[int, list[StepRecord]], width: float) -> None:
    fine = folded(ranks)
    wide = merge(fine, width)
    records = [record for group in ranks.values() for record in group]
    assert sums(fine)["steps"] == len(records)
    for name in SUMS[1:]:
        assert sums(fine)[name] == sum(getattr(record, name) for record in records)
    assert sums(wide) == sums(fine) == sums(across_ranks(fine)) == sums(merge_totals(across_ranks(fine), width))
    assert sums(merge(merge(fine, 2.0), 60.0)) == sums(fine)
    assert max((b.slowest for b in wide), default=0) == max((r.duration for r in records), default=0)
    assert len({(b.rank, b.start // width) for b in wide}) == len(wide)


@settings(max_examples=100, deadline=None)
@given(by_rank)
def test_packed_buckets_come_back(ranks: dict[int, list[StepRecord]]) -> None:
    """Exactly, for times that 4-byte floats hold."""
    buckets = folded(ranks, 1000.0)
    found = unpack_buckets(pack_buckets(buckets), 0.0, 1000.0)
    assert [repr(b) for b in found] == [repr(b) for b in buckets]  # repr: NaN is not equal to itself
    some = {b.rank for b in buckets[:2]}
    assert [b.rank for b in unpack_buckets(pack_buckets(buckets), 0.0, 1000.0, some)] == sorted(some)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6))
def test_packed_steps_come_back_by_rank(groups: list[tuple[int, int]]) -> None:
    blocks = [(rank, STEP.pack(*record(k)) * count) for k, (rank, count) in enumerate(groups)]
    for rank in range(4):
        assert unpack_steps(pack_steps(blocks), rank) == b"".join(block for owner, block in blocks if owner == rank)
