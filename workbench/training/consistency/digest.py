"""Exact 64-bit digests of tensors: equal bits give equal digests, on any device, with any number of threads.

The bytes are read as 64-bit words, and summed modulo 2^64 along rows of `ROW` words and along columns of a table
`COLUMN` words wide: two sums that each go over memory once, at its speed. `ROW` is smaller than `COLUMN`, so no two
words share both; a word that changes, and two that change places, change a sum. What is left, about one word in 500,
is mixed with its position by steps that have an inverse, and added up.

A single changed word, whatever its bits, is always found (but for two residues that collide: 2^-64). What cancels in
every row and in every column at once is not: four words at the corners of a rectangle, in which the same amount is
added and taken away. `ROW` is odd and `COLUMN` a power of two, so that no regular stride falls into such rectangles.

Nothing here waits for a device: the result is a tensor of one element where the data is. Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch

ROW: Final = 511
COLUMN: Final = 512
PIECE: Final = 128  # rows of `COLUMN` words: half a megabyte, which a core's cache holds
LARGE: Final = 2**16  # bytes from which a tensor is summed by itself; smaller ones are put together first
GOLDEN: Final = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number
MIX: Final = -4658895280553007687  # splitmix64's first multiplier
Seen: TypeAlias = dict[int, list[torch.Tensor]]  # by `id`


class Digests:
    """Keeps the weights of positions, by device, from one digest to the next."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def of(self, tensors: Iterable[torch.Tensor], seen: Seen | None = None) -> torch.Tensor:
        """One digest of all of them, in this order, which are on one device; int64, of shape ().

        `seen`: what large tensors came down to in the digest before, which live still and have not changed.
        """
        seen = {} if seen is None else seen
        rests: list[torch.Tensor] = []
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() >= LARGE:
                if (found := seen.get(id(tensor))) is None:
                    found = seen[id(tensor)] = residues(flat(tensor))
                rests += found
            elif tensor.numel():
                small.setdefault(tensor.dtype, []).append(flat(tensor))
        for some in small.values():
            rests += residues(torch.cat(some))
        if not rests:
            return torch.zeros((), dtype=torch.int64)
        return self._mix(rests[0] if len(rests) == 1 else torch.cat(rests))

    def each(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """A digest of each; waits for the device."""
        return [int(self.of([tensor])) for tensor in tensors]

    def _mix(self, words: torch.Tensor) -> torch.Tensor:
        mixed = words * self._weight(words)
        mixed ^= mixed >> 32
        mixed *= MIX
        mixed ^= mixed >> 29
        return mixed.sum()

    def _weight(self, words: torch.Tensor) -> torch.Tensor:
        size, device = words.numel(), words.device
        known = self._weights.get(device)
        if known is None or known.numel() < size:
            known = self._weights[device] = weights(max(1024, 2 ** (size - 1).bit_length()), device)
        return known[:size]


def weights(size: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers by position, the same everywhere."""
    made = torch.arange(1, size + 1, dtype=torch.int64, device=device) * GOLDEN
    made ^= made >> 31
    return made * MIX | 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory where they lie without gaps, else in that of indices."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def residues(values: torch.Tensor) -> list[torch.Tensor]:
    """What stands for a flat tensor: words, few where it is large."""
    if values.device.type == "cpu" and (numpy := _numpy()) is not None:
        return residues_in_memory(values, numpy)
    each = values.element_size()
    whole = values.numel() * each // 8 * 8 // each
    words = as_words(values[:whole])
    if words.numel() * 8 < LARGE:
        found = [words]
    else:
        columns = words.numel() // COLUMN
        rows = columns * COLUMN // ROW
        table = words[: columns * COLUMN].view(-1, COLUMN)
        found = [words[: rows * ROW].view(-1, ROW).sum(1), table.sum(0), words[rows * ROW :]]
    return [*found, padded(values[whole:])] if whole < values.numel() else found


def as_words(values: torch.Tensor) -> torch.Tensor:
    if values.dtype is torch.bool:
        values = values.view(torch.uint8)
    if values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    return values.view(torch.int64)


def padded(values: torch.Tensor) -> torch.Tensor:
    """Fewer bytes than a word, as one."""
    data = values.view(torch.uint8)
    word = torch.zeros(8, dtype=torch.uint8, device=values.device)
    word[: data.numel()] = data
    return word.view(torch.int64)


# --- on a CPU, by numpy: the same with calls that cost less than torch's, and sums of columns that go row by row ------


def residues_in_memory(values: torch.Tensor, numpy: Any) -> list[torch.Tensor]:
    data = values.view(torch.uint8).numpy()
    whole = data.size // 8 * 8
    words = data[:whole].view(numpy.int64)
    if not words.flags.aligned:
        words = words.copy()
    found = [words] if whole < LARGE else sums(words, numpy)
    if whole < data.size:
        last = numpy.zeros(8, dtype=numpy.uint8)
        last[: data.size - whole] = data[whole:]
        found.append(last.view(numpy.int64))
    return [torch.from_numpy(one) for one in found]


def sums(words: Any, numpy: Any) -> list[Any]:
    """By row, by column, and the words that are in no whole row; modulo 2^64.

    What is larger than a core's cache goes through it in pieces that are summed both ways while they are there, so that
    memory is read once.
    """
    add = numpy.add.reduce
    height = words.size // COLUMN
    rows = height * COLUMN // ROW
    rest = words[rows * ROW :]
    if height <= 4 * PIECE:
        table = words[: height * COLUMN].reshape(-1, COLUMN)
        return [add(words[: rows * ROW].reshape(-1, ROW), axis=1), add(table, axis=0), rest]
    by_row, by_column, done = numpy.empty(rows, dtype=numpy.int64), numpy.zeros(COLUMN, dtype=numpy.int64), 0
    for start in range(0, height, PIECE):
        end = min(start + PIECE, height)
        whole = end * COLUMN // ROW
        by_column += add(words[start * COLUMN : end * COLUMN].reshape(-1, COLUMN), axis=0)
        add(words[done * ROW : whole * ROW].reshape(-1, ROW), axis=1, out=by_row[done:whole])
        done = whole
    return [by_row, by_column, rest]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
