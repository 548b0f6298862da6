"""Verbs about what ranks print: logs, and attach in a shell.

Both read the log files page by page, which hold all of it, and never the bounded ring that the live view is fed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from workbench.errors import UsageError
from workbench.state import JobPhase
from workbench.verbs.context import Context, WaitInterrupted
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.lines import Labeller, joined, visible
from workbench.verbs.shown import Text

if TYPE_CHECKING:
    from workbench.feed import Update
    from workbench.session import Job

PAUSE: Final = 0.1  # s between two looks at the logs while output comes
POLL: Final = 1.0
PAGE: Final = 2**17  # a page of at least that many bytes may have more behind it
DEFAULT_TAIL: Final = 50


def logs(context: Context, args: Arguments) -> Outcome:
    """The last lines by rank; with -f what follows as well."""
    if args.follow and args.json:
        raise UsageError("what is followed has no end, so it is no document", hint="leave out -f or --json")
    job = context.job(args)
    ranks = _ranks(job, args.rank)
    if args.follow:
        stream(context, job, ranks, tail=DEFAULT_TAIL if args.tail is None else args.tail, grep=args.grep)
        return Outcome()
    pages = {rank: job.log_page(rank, tail=_tail(args), grep=args.grep).text for rank in ranks}
    text = "".join(pages.values()) if len(pages) == 1 else "".join(_labelled(pages.items()))
    document = {"job_id": job.job_id, "ranks": {str(rank): page for rank, page in pages.items()}}
    return Outcome(value=Text(text.rstrip("\n")), text=text.rstrip("\n"), document=document)


def attach(context: Context, args: Arguments) -> Outcome:
    """Make it the current job. A shell shows all its output, then what comes, until the job ends."""
    job = context.job(args)
    context.adopt(job)
    if not context.is_shell:
        return Outcome(value=job)
    update = stream(context, job, None, tail=None, grep=None)
    phase = update.state.phase
    context.screen.write(f"{job.job_id} {phase.value}: {update.state.reason}\n", is_error=True)
    document = {"job_id": job.job_id, "phase": phase.value, "reason": update.state.reason}
    return Outcome(document=document, code=0 if phase is JobPhase.SUCCEEDED else 1)


def stream(context: Context, job: Job, ranks: Sequence[int] | None, *, tail: int | None, grep: str | None) -> Update:
    """Write lines of the ranks' logs as they come, until the job has ended. Raises `WaitInterrupted`."""
    reader = Reader(context, job, grep)
    try:
        update = job.follow(timeout=0.0)
        reader.read(_existing(update, ranks), tail=tail)
        while not update.state.phase.is_terminal:
            context.sleep(PAUSE)
            update = job.follow(update.cursor, timeout=POLL)
            reader.read(_existing(update, ranks))
        reader.finish()
    except KeyboardInterrupt:
        reader.finish()
        raise WaitInterrupted(f"left {job.job_id}; it goes on") from None
    return update


class Reader:
    """How far each rank's log has been read."""

    def __init__(self, context: Context, job: Job, grep: str | None) -> None:
        self.context, self.job, self.grep = context, job, grep
        self.read_to: dict[int, int] = {}
        self.labeller = Labeller()

    def read(self, ranks: Iterable[int], tail: int | None = None) -> None:
        """Write what the logs have more of. `tail` holds for a rank that is read for the first time."""
        self._write(self.labeller.overdue(self.context.clock()))
        for rank in ranks:
            first = tail if rank not in self.read_to else None
            while self._read_page(rank, first) >= PAGE and first is None:
                pass

    def _read_page(self, rank: int, tail: int | None) -> int:
        """Write a page; how far it went."""
        since = self.read_to.get(rank, 0)
        page = self.job.log_page(rank, tail=tail, grep=self.grep, since=since)
        if tail is None and page.start > since:
            gone = f"[rank {rank}: {page.start - since:,} bytes were given up, by the limit on its log]\n"
            self.context.screen.write(gone, is_error=True)
        self.read_to[rank] = page.next
        self._write(self.labeller.add(rank, page.text, self.context.clock()))
        return page.next - since

    def finish(self) -> None:
        self._write(self.labeller.overdue(self.context.clock(), patience=0.0))

    def _write(self, lines: list[tuple[bool, str]]) -> None:
        for _, text in joined(lines):
            self.context.screen.write(text)


def _existing(update: Update, ranks: Sequence[int] | None) -> Sequence[int]:
    there = range(len(update.state.ranks))
    return there if ranks is None else [rank for rank in ranks if rank in there]


def _tail(args: Arguments) -> int | None:
    return DEFAULT_TAIL if args.tail is None else args.tail


def _ranks(job: Job, asked: Sequence[int] | None) -> Sequence[int]:
    return tuple(asked) if asked is not None else range(job.state.world_size)


def _labelled(pages: Iterable[tuple[int, str]]) -> list[str]:
    """A progress bar's line is its last state; other control characters are the log's own business."""
    split = [(rank, page.removesuffix("\n").split("\n")) for rank, page in pages if page]
    return [f"[rank {rank}] {visible(line)}\n" for rank, lines in split for line in lines]
