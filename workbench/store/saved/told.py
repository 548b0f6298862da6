"""What a saved session tells people who have nothing but the file: a page in it, and what the page's head says."""

from __future__ import annotations

import functools
import time

from msgspec.structs import replace

from workbench.blackbox import iter_steps
from workbench.controller import transition
from workbench.feed import Update
from workbench.state import JobState
from workbench.store.saved.document import Document, JobEntry
from workbench.store.saved.records import JobRecord
from workbench.store.saved.scrub import HOME_IN_CODE
from workbench.views.job import ViewBuilder
from workbench.views.report import Chapter, report_html
from workbench.views.trace import in_order, origin_of, trace_from


def facts_of(document: Document) -> list[tuple[str, str]]:
    """When, by what and where it was saved."""
    packages = document.host.packages
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "numpy") if name in packages)
    pool = f", a pool of {document.pool.slots} {document.pool.accelerator} slots" if document.pool else ""
    commits = {f"{job.git.commit[:12]} {job.git.branch}".strip() for job in document.jobs if job.git is not None}
    return [
        ("saved", day_text(document.saved_at)),
        ("by", f"dtrain workbench {document.dtrain}, python {document.host.python}, {versions}"),
        ("on", f"{document.host.platform}, {document.host.cores} cores{pool}"),
        *([("commit", ", ".join(sorted(commits)))] if commits else []),
    ]


def day_text(when: float) -> str:
    """A day and time in UTC: the page is read anywhere."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(when))} UTC"


def page(document: Document, chapters: list[Chapter]) -> bytes:
    """The page about all of its jobs."""
    title = ", ".join(entry.job_id for entry in document.jobs[:3]) + (" …" if len(document.jobs) > 3 else "")
    return report_html(title, facts_of(document), chapters, document.left_out).encode()


def chapter_of(record: JobRecord, entry: JobEntry, update: Update) -> Chapter:
    """One job, told only by what is kept of it; of `update` what holds no text."""
    state: JobState | None = functools.reduce(lambda state, event: transition(state, event)[0], record.events, None)
    assert state is not None  # a record begins with the launch
    told = record.telemetry
    builder = ViewBuilder(is_saved=True)
    builder.add(
        replace(update, state=state, events=record.events, output=told.output, cells=told.cells, problems=told.problems)
    )
    steps = in_order((rank, iter_steps(block)) for rank, block in record.steps)
    own = {state.spec.label: state.spec.source} if state.spec.source else {}
    code = own | {source.path: source.text for source in origin_of(record.events).sources if source.text}
    return Chapter(
        view=builder.view(),
        trace=trace_from(state, record.events, steps, output=record.logs.get(0, ""), states=entry.contents),
        code={name: text.replace(HOME_IN_CODE, "~") for name, text in code.items()},
    )
