"""Values that show themselves as the text a person reads: what a magic gives back is both data and its own display."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Text(str):
    """Text that a notebook shows as it is, without quotes and `\\n`."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


class Listing(list[T], Generic[T]):
    """A list that a notebook shows as its table."""

    def __init__(self, items: Iterable[T], table: str) -> None:
        super().__init__(items)
        self.table = table

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.table)
