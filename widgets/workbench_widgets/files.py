"""What a job's page makes of the job for the reader to keep: its report, and a saved session. Never raises."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from workbench import Job, WorkbenchError, report
from workbench.views.wording import plural, size

MOST: Final = 8_000_000  # bytes that go to a browser at once: proxies on the way may take no more than 10 MB
KINDS: Final = {"report": "text/html", "save": "application/vnd.dtrain.session"}
SUFFIXES: Final = {"report": ".html", "save": ".dtrain"}
logger = logging.getLogger(__name__)


class Made(NamedTuple):
    """What came of it in words; the file's kind and what is in it, empty when there is none."""

    said: str
    kind: str = ""
    data: bytes = b""


def make(what: str, job: Job | None, *, with_code: bool) -> Made:
    """A file of the kind `what` about the job; reads its record, so it takes a while."""
    if job is None:
        return Made("Nothing done: the pool does not answer. Is it running? See: %dtrain pool")
    try:
        data, more = _report(job, with_code) if what == "report" else _session(job)
    except WorkbenchError as error:
        return Made(f"It did not work: {error}")
    except Exception as error:
        logger.exception("%s of %s", what, job.job_id)
        return Made(f"It did not work: {type(error).__name__}: {error}")
    if len(data) > MOST:
        how = f"%dtrain {'report' if what == 'report' else 'save run.dtrain'} {job.job_id}"
        return Made(f"Nothing done: {size(len(data))} are too much for the browser. Write it with: {how}")
    name = "The report" if what == "report" else "The saved session"
    return Made(f"{name} went to your browser: {size(len(data))}{more}.", KINDS[what], data)


def _report(job: Job, with_code: bool) -> tuple[bytes, str]:
    return report(job, with_code=with_code), "" if with_code else ", without the program"


def _session(job: Job) -> tuple[bytes, str]:
    """As `%dtrain save` writes it."""
    with tempfile.TemporaryDirectory(prefix="dtrain-save-") as folder:
        path = Path(folder) / "run.dtrain"
        left_out = job.session.save(path, [job.job_id])
        return (
            path.read_bytes(),
            f"; {plural(len(left_out), 'thing')} left out: %dtrain show says what" if left_out else "",
        )
