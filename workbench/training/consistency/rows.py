"""What the rows of all ranks say of what they read. Pure: the same rows give the same answer on every rank.

Only what is odd is told, each kind once, with the evidence by which `workbench.policy.data` tells its cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

SKETCH: Final = 16
NEVER: Final = 2**63 - 1
FEW: Final = 64  # samples of all ranks below which shards that overlap say nothing
OVERLAP: Final = 0.2  # of what was read, by several ranks: padding of a last batch is less
UNEVEN: Final = 1.1  # times as many samples as on another rank
NAMED: Final = 64  # ranks


class Row(NamedTuple):
    """One rank's numbers, each of 64 bits. 0 and -1 stand for what is not known."""

    content: int = 0  # digest of the batch
    is_still: int = 0  # and it was that already at the last row
    size: int = 0  # samples of the batch
    first: int = 0  # digest of the indices of the pass' first batch
    before: int = 0  # of the pass before
    number: int = 0  # of the pass
    is_dealt: int = 0  # its sampler shuffles, and wants to be told the epoch
    epoch: int = -1  # that it was told
    is_same_epoch: int = 0  # as in the pass before
    place: int = -1  # the rank that the sampler deals to
    places: int = -1  # of so many
    taken: int = 0  # indices drawn in this pass, or the one before where that is more
    seed: int = 0  # of the DataLoader's workers
    kind: int = 0  # the sampler's class: see `data.KINDS`
    random: int = 0  # state of torch's generator
    drawn: int = 0  # it has changed since the forward began
    sketch: tuple[int, ...] = (NEVER,) * SKETCH


LENGTH: Final = len(Row._fields) - 1 + SKETCH


def numbers(row: Row) -> list[int]:
    return [*map(int, row[:-1]), *row.sketch]


def row_of(values: Sequence[int]) -> Row:
    plain = len(Row._fields) - 1
    return Row._make([*values[:plain], tuple(values[plain:])])


class Rows:
    """Remembers what was told, and what was seen once and is to be seen again before it is."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._seen: set[str] = set()

    def look(self, rows: Sequence[Row], ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The fields of a `state.DataDoubt` for each oddity that is new; the first explains the others."""
        found = list(oddities(rows, ranks))
        seen, self._seen = self._seen, {about["about"] for about, _ in found}
        due = [about for about, is_sure in found if is_sure or about["about"] in seen]
        new = [about for about in due if about["about"] not in self._told]
        self._told |= {about["about"] for about in due}
        if "batch" in self._told:  # ranks that read the same have all that in common
            self._told |= {"overlap", "places"}
        return new


def oddities(rows: Sequence[Row], ranks: Sequence[int]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each with whether once is enough."""
    for look in LOOKS:
        found = look(rows, ranks)
        if found is not None:
            yield found
            if found[0]["about"] == "batch":
                return


Look = Callable[[Sequence[Row], Sequence[int]], tuple[dict[str, Any], bool] | None]


def same_batch(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    """Data that never change are made up, for a benchmark, and say nothing; indices say it at once."""
    group = largest(r.content for r in rows)
    those = [rows[place] for place in group]
    if len(group) < 2 or any(row.is_still for row in those):
        return None
    is_drawn = len({row.first for row in those}) == 1 and those[0].first != 0
    about = {**_about("batch", group, rows, ranks), "is_drawn": is_drawn, "places": those[0].places}
    return {**about, "sampler": those[0].kind, "is_apart": len({row.first for row in those}) > 1}, is_drawn


def same_place(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    """Samplers that deal to the same rank, or to another number of ranks than there are."""
    if any(row.places < 1 for row in rows):
        return None
    group = largest((row.places, row.place) for row in rows)
    is_short = {row.places for row in rows} != {len(rows)}
    if len(group) < 2 and not is_short:
        return None
    place = rows[group[0]].place
    return {**_about("places", group, rows, ranks), "places": rows[group[0]].places, "place": place}, False


def same_order(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    group = [n for n, r in enumerate(rows) if r.is_dealt and r.number and r.first and r.first == r.before]
    if not group:
        return None
    row = rows[group[0]]
    told = {"number": row.number, "epoch": row.epoch, "is_same_epoch": bool(row.is_same_epoch)}
    return {**_about("order", group, rows, ranks), **told}, True


def other_epochs(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    epochs = [row.epoch for row in rows if row.is_dealt]
    if len(epochs) < len(rows) or len(set(epochs)) < 2:
        return None
    usual = Counter(epochs).most_common(1)[0][0]
    group = [place for place, epoch in enumerate(epochs) if epoch != usual]
    return {**_about("epochs", group, rows, ranks), "epochs": sorted(set(epochs))[:8]}, True


def overlap(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    """Of the hashes that all sketches would hold, how many are on several ranks."""
    if any(row.taken == 0 for row in rows) or sum(row.taken for row in rows) < FEW:
        return None
    limit = min(max(row.sketch) for row in rows)
    seen = Counter(mark for row in rows for mark in set(row.sketch) if mark <= limit and mark != NEVER)
    if not seen:
        return None
    shared = {mark for mark, times in seen.items() if times > 1}
    share = len(shared) / len(seen)
    group = [place for place, row in enumerate(rows) if shared & set(row.sketch)]
    if share < OVERLAP or len(group) < 2:
        return None
    kinds = {row.kind for row in rows}
    return {
        **_about("overlap", group, rows, ranks),
        "share": share,
        "sampler": kinds.pop() if len(kinds) == 1 else 0,
    }, True


def uneven(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    sizes = [row.size for row in rows]
    if not all(sizes) or max(sizes) < UNEVEN * min(sizes):
        return None
    usual = Counter(sizes).most_common(1)[0][0]
    group = [place for place, size in enumerate(sizes) if size != usual]
    return {**_about("sizes", group, rows, ranks), "sizes": (min(sizes), max(sizes))}, False


def same_random(rows: Sequence[Row], ranks: Sequence[int]) -> tuple[dict[str, Any], bool] | None:
    group = largest(row.random if row.drawn else 0 for row in rows)
    if len(group) > 1:
        return {**_about("random", group, rows, ranks), "is_forward": True}, False
    group = largest(row.seed for row in rows)
    return (_about("random", group, rows, ranks), False) if len(group) > 1 else None


LOOKS: Final[tuple[Look, ...]] = (
    same_batch, same_place, same_order, other_epochs, overlap, uneven, same_random,
)  # fmt: skip


def largest(values: Iterable[Any]) -> list[int]:
    """Places of the value that most have, but 0."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if value:
            places.setdefault(value, []).append(place)
    return max(places.values(), key=len, default=[])


def _about(about: str, group: Sequence[int], rows: Sequence[Row], ranks: Sequence[int]) -> dict[str, Any]:
    return {"about": about, "ranks": [ranks[place] for place in group[:NAMED]], "of": len(rows)}
