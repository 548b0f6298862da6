"""The report of jobs, saved or live: what is read from where; what it looks like is in `views.report`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from workbench.saved.session import SavedJob, origin_of
from workbench.saved.traces import trace_of
from workbench.session import Job
from workbench.views.report import Chapter, report_html


def report(jobs: Job | Sequence[Job], title: str = "", *, with_code: bool = True) -> bytes:
    """A page about a job or several, in HTML, that needs no server, script or network. `with_code`: with programs."""
    jobs = [jobs] if isinstance(jobs, Job) else jobs
    title = title or ", ".join(job.job_id for job in jobs)
    first = jobs[0] if jobs else None
    facts: list[tuple[str, str]] = []
    left_out: tuple[str, ...] = ()
    if isinstance(first, SavedJob):
        told = first.session.document
        packages = told.host.packages
        versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "numpy") if name in packages)
        pool = f", a pool of {told.pool.slots} {told.pool.accelerator} slots" if told.pool else ""
        facts = [
            ("saved", day_text(told.saved_at)),
            ("by", f"dtrain workbench {told.dtrain}, python {told.host.python}, {versions}"),
            ("on", f"{told.host.platform}, {told.host.cores} cores{pool}"),
        ]
        commits = {f"{job.git.commit[:12]} {job.git.branch}".strip() for job in told.jobs if job.git is not None}
        facts += [("commit", ", ".join(sorted(commits)))] if commits else []
        left_out = told.left_out
    return report_html(title, facts, [_chapter(job, with_code=with_code) for job in jobs], left_out).encode()


def day_text(when: float) -> str:
    """A day and time in UTC: the page is read anywhere."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(when))} UTC"


def _chapter(job: Job, *, with_code: bool) -> Chapter:
    code = {} if not with_code else job.code if isinstance(job, SavedJob) else _code_of(job)
    return Chapter(view=job.view(), trace=trace_of(job), code=code)


def _code_of(job: Job) -> dict[str, str]:
    spec = job.spec
    own = {spec.label: spec.source} if spec.source else {}
    return own | {source.path: source.text for source in origin_of(job.events()).sources if source.text}
