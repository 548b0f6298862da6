"""Whether a job computes the same bits again: what its replays are asked to do, and the first thing that differs.

A job is replayed three times for a few steps:

- `FIRST`: as it is;
- `SECOND`: the same in fresh interpreters, in which nothing is as a fork inherits it: strings hash otherwise (unless
  PYTHONHASHSEED says), objects lie elsewhere;
- `SWAPPED`: as the first, but each rank runs in the slot of the next one (and node, where there are several). A rank
  takes its number, its data, its seed and its place in the all-reduce along, so every bit must be the same; all that is
  different is the device, core or host that computes it.

Ranks note what they compute (`training.replay` has the kinds). The first note that differs, in the order of steps and
within them, is the verdict: all before it was equal, on every rank, so what it was made of was. States of generators
differ without harm where nothing is drawn from them: they are evidence, never a verdict. Pure.
"""

from __future__ import annotations

import enum
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from workbench.findings import Finding, Severity
from workbench.spec import JobSpec, MismatchPolicy, NanPolicy

STEPS: Final = 5
HUGE: Final = 1e30  # what no training computes, and memory that was never written may hold


class Replay(enum.Enum):
    """Each value names it to a person."""

    FIRST = "run 1"
    SECOND = "run 2"
    SWAPPED = "the run with slots swapped"


class Note(msgspec.Struct, frozen=True, array_like=True):
    """Of an output, `name` is that of the module and its class: `layer1.dropout|Dropout`."""

    step: int
    kind: str
    name: str
    digest: str
    elements: int
    scale: float  # root mean square
    sample: tuple[float, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank noted."""

    rank: int
    threads: int
    strings: int  # how they hash
    is_deterministic: bool
    devices: tuple[str, ...]
    host: str
    notes: tuple[Note, ...]

    @property
    def steps(self) -> int:
        """That were noted wholly."""
        return max((note.step + 1 for note in self.notes if note.kind == "parameter"), default=0)


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay first differs from the first run. `deviation`: the largest in the samples, a lower bound."""

    run: Replay
    rank: int
    step: int
    kind: str
    name: str
    module: str = ""  # its class
    elements: int = 0
    deviation: float = 0.0
    scale: float = 0.0
    is_wild: bool = False  # NaN or huge on one side only
    generators: tuple[str, ...] = ()  # whose states differed by then
    threads: tuple[int, int] = (0, 0)
    strings_differ: bool = False
    has_gpu: bool = False
    is_deterministic: bool = False  # all generators were seeded before the program began
    was_same_again: bool = False  # the second run had no difference, only this one has
    instead: str = ""  # the program did this in its place


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict. `tensors`: notes compared, of one run of all ranks. `skipped`: what was not done, and why."""

    label: str
    steps: int
    ranks: int
    tensors: int
    job_ids: tuple[str, ...]
    divergence: Divergence | None = None
    finding: Finding | None = None
    skipped: str = ""

    @property
    def is_same(self) -> bool:
        return self.divergence is None

    def lines(self) -> list[str]:
        """As a person reads it."""
        what = f"{self.label}, {_count(self.steps, 'step')} on {_count(self.ranks, 'rank')}"
        also = [self.skipped] if self.skipped else []
        if self.finding is not None:
            return [f"NOT the same bits: {what}", *self.finding.lines(), *also]
        how = "in 2 runs" if self.skipped else "in 2 runs and with slots swapped"
        return [f"same bits {how}: {what}, {self.tensors:,} tensors a run", *also]


def replay_spec(spec: JobSpec, steps: int, run: Replay) -> JobSpec:
    """The job as a replay: no restart, no checkpoint, nothing taken from another's, and an end after `steps`."""
    return replace(
        spec,
        name=f"replay-{spec.label}"[:64].rstrip("-._"),
        replay_steps=steps,
        cold=spec.cold or run is Replay.SECOND,
        rotate_slots=run is Replay.SWAPPED,
        max_steps=0,
        max_restarts=0,
        min_ranks=0,
        min_nnodes=0,
        checkpoint_every=0,
        checkpoint_seconds=0.0,
        checkpoint_dir="",
        snapshot_every=-1,
        consistency_every=-1,
        on_nan=NanPolicy.WARN,
        on_mismatch=MismatchPolicy.WARN,
    )


def read_recording(payload: bytes) -> Recording:
    """What a rank sent. Raises `ValueError` on anything else."""
    try:
        return msgspec.convert(json.loads(zlib.decompress(payload)), Recording)  # json has NaN, msgspec's has not
    except (zlib.error, msgspec.ValidationError) as error:
        raise ValueError(f"no recording: {error}") from None


# --- the first difference ---------------------------------------------------------------------------------------------


def compare(first: Sequence[Recording], other: Sequence[Recording], run: Replay) -> Divergence | None:
    """Of the same ranks in both, in any order."""
    others = {recording.rank: recording for recording in other}
    found = [
        (at, divergence)
        for recording in first
        if (pair := _first_difference(recording, others[recording.rank], run)) is not None
        for at, divergence in [pair]
    ]
    return min(found, key=lambda item: (item[1].step, item[0], item[1].rank))[1] if found else None


def _first_difference(one: Recording, two: Recording, run: Replay) -> tuple[int, Divergence] | None:
    """With its place among the rank's notes."""
    for at, (a, b) in enumerate(zip(one.notes, two.notes, strict=False)):
        is_aligned = (a.kind, a.name) == (b.kind, b.name)
        if is_aligned and a.kind == "random":
            continue
        if not is_aligned or a.digest != b.digest or a.elements != b.elements:
            return at, _divergence(one, two, a, b, run, drawn_from(one, two, at))
    at = min(len(one.notes), len(two.notes))
    if len(one.notes) == len(two.notes):
        return None
    last = max(one.notes, two.notes, key=len)[at]
    gone = Note(last.step, "end", "", "", 0, 0.0, ())
    return at, _divergence(one, two, last, gone, run, drawn_from(one, two, at))


def drawn_from(one: Recording, two: Recording, at: int) -> tuple[str, ...]:
    """Generators whose states differ by note `at` and that something was drawn from by then, or by their next note."""
    states: dict[str, list[str]] = {}
    differ: dict[str, bool] = {}
    closed: set[str] = set()
    for place, note in enumerate(one.notes):
        if note.kind == "random" and note.name not in closed:
            states.setdefault(note.name, []).append(note.digest)
            if place < len(two.notes) and (two.notes[place].kind, two.notes[place].name) == ("random", note.name):
                differ[note.name] = note.digest != two.notes[place].digest  # equal again: the program has seeded it
            if place > at:
                closed.add(note.name)
    return tuple(name for name, seen in states.items() if differ.get(name) and len(set(seen)) > 1)


def _divergence(one: Recording, two: Recording, a: Note, b: Note, run: Replay, drawn: tuple[str, ...]) -> Divergence:
    name, _, module = a.name.partition("|")
    is_aligned = (a.kind, a.name) == (b.kind, b.name)
    fields: dict[str, Any] = {}
    if is_aligned:
        pairs = list(zip(a.sample, b.sample, strict=False))
        sizes = [abs(x - y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
        fields = {"deviation": max(sizes, default=0.0), "scale": a.scale, "elements": a.elements}
        fields["is_wild"] = any(_is_wild(x) != _is_wild(y) for x, y in [*pairs, (a.scale, b.scale)])
    else:
        fields["instead"] = words(b.kind, *b.name.partition("|")[::2])
    return Divergence(
        run=run,
        rank=one.rank,
        step=a.step,
        kind=a.kind if is_aligned else "order",
        name=name if is_aligned else words(a.kind, name, module),
        module=module,
        generators=drawn,
        threads=(one.threads, two.threads),
        strings_differ=one.strings != two.strings,
        has_gpu=bool(one.devices),
        is_deterministic=one.is_deterministic,
        **fields,
    )


def _is_wild(value: float) -> bool:
    return not math.isfinite(value) or abs(value) > HUGE


# --- what it comes of -------------------------------------------------------------------------------------------------


def explain(divergence: Divergence) -> Finding:
    cause, advice = next((cause, advice) for applies, cause, advice in CAUSES if applies(divergence))
    words_of = {"generators": " and ".join(map(GENERATORS.__getitem__, divergence.generators)), "name": divergence.name}
    words_of |= {"threads": " and ".join(map(str, divergence.threads)), "rank": str(divergence.rank)}
    return Finding(
        symptom=symptom(divergence),
        evidence=evidence(divergence),
        cause=cause.format(**words_of),
        advice=advice.format(**words_of),
        severity=Severity.ERROR if divergence.was_same_again else Severity.WARNING,
        step=divergence.step,
        rank=divergence.rank,
    )


def symptom(d: Divergence) -> str:
    """`rank 1, step 0: the output of drop (Dropout) differs between run 1 and run 2, by at least 1.4 (of 0.9 RMS)`."""
    where = f"rank {d.rank}, step {d.step}"
    if d.kind == "order":
        return f"{where}: {d.name} in run 1, {d.instead} in its place in {d.run.value}"
    size = f", by at least {d.deviation:.3g} (RMS {d.scale:.3g})" if d.deviation else ""
    return f"{where}: {words(d.kind, d.name, d.module)} differs between run 1 and {d.run.value}{size}"


def words(kind: str, name: str, module: str = "") -> str:
    return WORDS[kind].format(name=name, module=f" ({module})" if module else "")


def evidence(d: Divergence) -> tuple[str, ...]:
    same = SAME.get(d.kind, "")
    said = [
        (bool(same), same),
        (d.was_same_again, "run 2, in the same slots, had the same bits as run 1"),
        (bool(d.generators), f"states differed of {', '.join(GENERATORS[name] for name in d.generators)}"),
        (not d.generators and d.kind != "start", "the states of all generators were the same"),
        (d.threads[0] != d.threads[1], f"{d.threads[0]} threads, then {d.threads[1]}"),
        (d.is_wild, "it is not finite, or absurdly large, in one of them only"),
        (d.strings_differ, "strings hashed differently in the two"),
    ]
    return tuple(text for holds, text in said if holds)


WORDS: Final = {
    "start": "parameter {name} before the first step",
    "batch": "a batch of the {name}",
    "random": "the state of generator {name}",
    "input": "the input of {name}",
    "output": "the output of {name}{module}",
    "loss": "the loss",
    "gradient": "the gradient of {name}, before the reduce,",
    "reduced": "the gradient of {name} that the optimizer uses",
    "parameter": "parameter {name} after the step",
    "end": "the end of the program",
}
SAME: Final = {
    "input": "the batch was the same",
    "output": "all that the modules before it gave was the same",
    "loss": "the outputs of all modules were the same",
    "gradient": "the loss was the same",
    "reduced": "the gradients of all ranks were the same before the reduce",
    "parameter": "the gradients were the same",
}
GENERATORS: Final = {"torch": "torch's generator", "random": "Python's random", "numpy": "numpy's generator"}
SEED: Final = "launch with --seed N or --deterministic, or seed {generators} yourself"
Row = tuple[Callable[[Divergence], bool], str, str]
COMPUTED: Final = ("output", "loss", "gradient", "parameter")
CAUSES: Final[tuple[Row, ...]] = (
    (
        lambda d: d.threads[0] != d.threads[1],
        "other numbers of threads ({threads}) split sums in other places",
        "fix OMP_NUM_THREADS with --env, or use --deterministic",
    ),
    (
        lambda d: d.was_same_again and d.kind == "reduced",
        "the order of the all-reduce follows from where ranks lie",
        "use --exact-reduce, or keep ranks where they are (NCCL_ALGO=Ring fixes it on one kind of network)",
    ),
    (
        lambda d: d.was_same_again and d.kind in COMPUTED,
        "the place computes otherwise: another kind of device or processor, or one that is faulty",
        "compare what the slots are made of; where they are alike, run it again, and have that device tested",
    ),
    (
        lambda d: d.is_deterministic and bool(d.generators),
        "the program seeds {generators} itself, from the system or the clock",
        "leave torch.seed(), random.seed() and the like without a number out: the job's generators are seeded already",
    ),
    (
        lambda d: d.kind == "start" and "torch" in d.generators,
        "weights are initialised from a generator that is not seeded",
        "launch with --seed N or --deterministic, or seed torch before the model is made",
    ),
    (
        lambda d: d.kind == "start",
        "weights are initialised without a seed, or in the order of a set",
        "launch with --seed N or --deterministic; sort what the model is made from",
    ),
    (
        lambda d: d.kind in ("batch", "input") and bool(d.generators),
        "the data is drawn or augmented with {generators}, which is not seeded",
        SEED,
    ),
    (
        lambda d: d.kind in ("batch", "input") and d.strings_differ,
        "the data depends on the order of a set of strings, on the time, or on the order of a folder's files",
        "sort sets and listings of folders before use; take no decision by the clock",
    ),
    (
        lambda d: d.kind in ("batch", "input"),
        "the data depends on the time, on the order of a folder's files, or on which DataLoader worker is first",
        "sort listings of folders, take no decision by the clock, and leave in_order=False out",
    ),
    (
        lambda d: d.kind == "order",
        "which way the program takes depends on the time, on random numbers without a seed, or on the order of a set",
        "seed with --seed N or --deterministic, sort sets, and take no decision by the clock",
    ),
    (
        lambda d: d.kind in COMPUTED and "Dropout" in d.module and bool(d.generators),
        "dropout without a seed",
        "launch with --seed N or --deterministic, or call torch.manual_seed",
    ),
    (
        lambda d: d.is_wild,
        "memory that was never written is read, as after torch.empty",
        "use torch.zeros; --deterministic fills such memory, so that it shows at once",
    ),
    (
        lambda d: d.kind in COMPUTED and "torch" in d.generators,
        "{name} uses random numbers without a seed",
        "launch with --seed N or --deterministic, or call torch.manual_seed",
    ),
    (
        lambda d: d.kind in ("output", "loss", "gradient") and d.has_gpu,
        "a kernel that adds in no fixed order (atomics: scatter_add, index_add, interpolate, some of cuDNN's)",
        "use --deterministic, which names operations that have no other form",
    ),
    (
        lambda d: d.kind == "reduced",
        "the all-reduce adds in another order: another bucket layout, another algorithm, or a comm hook of its own",
        "use --deterministic, which fixes both, or --exact-reduce, where order does not matter",
    ),
    (
        lambda d: d.kind == "parameter",
        "the optimizer uses more than the gradients: noise, the time, or a state that was loaded",
        "seed what it draws; compare its options in both runs",
    ),
    (
        lambda d: bool(d.generators),
        "{name} uses {generators}, which is not seeded, or the time",
        SEED,
    ),
    (
        lambda d: True,
        "{name} uses something besides its inputs: the time, the order of a set, memory that was never written",
        "look at its forward and backward; --deterministic fixes the order of sets and fills such memory",
    ),
)


def verdict(
    label: str, runs: Mapping[Replay, Sequence[Recording]], job_ids: Sequence[str], skipped: str = ""
) -> ReplayReport:
    """Of all runs that were made, the first among them."""
    first = runs[Replay.FIRST]
    again = compare(first, runs[Replay.SECOND], Replay.SECOND)
    found = again
    if found is None and (swapped := runs.get(Replay.SWAPPED)) is not None:
        found = compare(first, swapped, Replay.SWAPPED)
        found = replace(found, was_same_again=True) if found is not None else None
    return ReplayReport(
        label=label,
        steps=min((recording.steps for recording in first), default=0),
        ranks=len(first),
        tensors=sum(len(recording.notes) for recording in first),
        job_ids=tuple(job_ids),
        divergence=found,
        finding=explain(found) if found is not None else None,
        skipped=skipped,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
