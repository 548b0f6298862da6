"""The report of jobs, saved or live: what is read from where; what it looks like is in `views.report`."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.saved.session import SavedJob
from workbench.saved.traces import trace_of
from workbench.session import Job
from workbench.store.saved.told import facts_of
from workbench.views.report import Chapter, report_html
from workbench.views.trace import origin_of


def report(jobs: Job | Sequence[Job], title: str = "", *, with_code: bool = True) -> bytes:
    """A page about a job or several, in HTML, that needs no server, script or network. `with_code`: with programs."""
    jobs = [jobs] if isinstance(jobs, Job) else jobs
    title = title or ", ".join(job.job_id for job in jobs)
    first = jobs[0] if jobs else None
    chapters = [_chapter(job, with_code=with_code) for job in jobs]
    if not isinstance(first, SavedJob):
        return report_html(title, [], chapters, ()).encode()
    told = first.session.document
    return report_html(title, facts_of(told), chapters, told.left_out).encode()


def _chapter(job: Job, *, with_code: bool) -> Chapter:
    code = {} if not with_code else job.code if isinstance(job, SavedJob) else _code_of(job)
    return Chapter(view=job.view(), trace=trace_of(job), code=code)


def _code_of(job: Job) -> dict[str, str]:
    spec = job.spec
    own = {spec.label: spec.source} if spec.source else {}
    return own | {source.path: source.text for source in origin_of(job.events()).sources if source.text}
