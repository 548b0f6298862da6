"""Verbs that make something of saved sessions, or of jobs of the pool: compare, report, export, notebook."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.errors import StoreError, UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.saved import file_and_job
from workbench.verbs.shown import Text

if TYPE_CHECKING:
    from workbench.session import Job

FORMATS = ("csv", "parquet", "chrome-trace", "tensorboard")  # `saved.export` has what they are; not loaded for --help


def form(text: str) -> str:
    """One of the formats."""
    if text not in FORMATS:
        raise ValueError(f"one of {', '.join(FORMATS)}")
    return text


@contextlib.contextmanager
def _jobs(context: Context, args: Arguments, word: str) -> Iterator[list[Job]]:
    """FILE, FILE:JOB or a job of the pool: the jobs that are meant."""
    from workbench.saved.session import load_session

    found = file_and_job(word)
    if found is not None:
        name, job_id = found
        with load_session(name) as saved:
            ids = [job_id] if job_id else [entry.job_id for entry in saved.document.jobs]
            yield [saved.attach(one) for one in ids]
    else:
        yield [context.session(args).attach(word)]


class Beside(Text):
    """A comparison as a notebook shows it: tables, which become the live page where the jobs are of a pool."""

    html = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html}


def compare(context: Context, args: Arguments) -> Outcome:
    """Runs beside the first of them; of files of several jobs those of the same place."""
    from workbench.saved.traces import trace_of
    from workbench.views.compare import compare as compared
    from workbench.views.sides import MOST
    from workbench.views.text import render_lines

    words = [args.a, args.b, *(args.more or [])]
    if len(words) > MOST:
        raise UsageError(f"{len(words)} runs", hint=f"give at most {MOST}")
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(_jobs(context, args, word)) for word in words]
        for jobs in found[1:]:
            if len(jobs) != len(found[0]):
                there = ", ".join(job.job_id for job in [*found[0], *jobs][:12])
                raise UsageError(
                    f"{len(found[0])} jobs against {len(jobs)}", hint=f"name one with FILE:JOB; there are: {there}"
                )
        if args.open and context.is_shell:
            return _opened(context, args, found)
        first, *others = ([trace_of(job) for job in jobs] for jobs in found)
        told = [(a.name, b.name, compared(a, b)) for traces in others for a, b in zip(first, traces, strict=True)]
        html = "" if context.is_shell or len(first) > 1 else _html(context, args, [jobs[0] for jobs in found])
    text = "\n\n".join(render_lines(lines, (a, b), context.screen.width) for a, b, lines in told)
    document = [{"a": a, "b": b, "lines": msgspec.to_builtins(lines)} for a, b, lines in told]
    value = Beside(text)
    value.html = html
    return Outcome(value=value if html else Text(text), text=text, document=document)


def _opened(context: Context, args: Arguments, found: list[list[Job]]) -> Outcome:
    """Its page in a browser; where saved sessions are on it, as long as this process lives."""
    from workbench.verbs.dashboard import demand_pages, open_page
    from workbench.views.sides import MOST

    jobs = [job for group in found for job in group]
    if context.target(args)[0] and not all(job.is_saved for job in jobs):
        raise UsageError("the pages show jobs of the pools of this machine", hint="leave out --open")
    if len(jobs) > MOST:
        raise UsageError(f"{len(jobs)} jobs", hint=f"a page has room for {MOST}: name them with FILE:JOB")
    demand_pages()
    return open_page(args, *_addresses(jobs, start=True), is_guest=any(job.is_saved for job in jobs),
                     read_only=all(job.is_saved for job in jobs))  # fmt: skip


def _addresses(jobs: list[Job], *, start: bool) -> list[str]:
    """How the live pages call these jobs; `start`: have them serve saved sessions. '' for what they cannot show."""
    from workbench.saved.session import SavedJob, show_live

    keys: dict[Path, str] = {}

    def address(job: Job) -> str:
        if not isinstance(job, SavedJob):
            return job.job_id
        path = job.session.archive.path
        if path not in keys:
            keys[path] = show_live(path, start=start)
        return f"{keys[path]}:{job.job_id}" if keys[path] else ""

    return [address(job) for job in jobs]


def _html(context: Context, args: Arguments, jobs: list[Job]) -> str:
    from workbench.views.html import snapshot_sides_html
    from workbench.views.job import ViewBuilder
    from workbench.views.panels import PanelBuilder
    from workbench.views.sides import Side

    sides = []
    for job in jobs:
        builder, panels, update = ViewBuilder(is_saved=job.is_saved), PanelBuilder(), job.follow(timeout=0.0)
        builder.add(update)
        panels.add(update)
        sides.append(Side(job.job_id, builder.view(), panels.view()))
    ids = _addresses(jobs, start=False)
    is_live = all(ids) and (context.target(args)[0] is None or all(job.is_saved for job in jobs))
    return snapshot_sides_html(sides, ids if is_live else ())


def report(context: Context, args: Arguments) -> Outcome:
    """One page about all jobs of a file, or one job of the pool."""
    from workbench.saved.page import report as page_of

    target = Path(args.output or f"{Path(args.source.partition(':')[0]).stem}.html")
    with _jobs(context, args, args.source) as jobs:
        data = page_of(jobs, args.title or Path(args.source.partition(":")[0]).stem)
    _write(target, data)
    return Outcome(
        text=f"{target}: {len(jobs)} job{'s' if len(jobs) > 1 else ''}, {len(data) / 1000:,.0f} kB",
        document={"file": str(target), "bytes": len(data)},
    )


def export(context: Context, args: Arguments) -> Outcome:
    """Steps in another program's format."""
    from workbench.saved.export import SUFFIXES
    from workbench.saved.export import export as exported

    if args.output:
        _demand_folder(Path(args.output))
        if args.format == "tensorboard" and Path(args.output).is_file():
            raise UsageError(f"{args.output} is a file", hint="TensorBoard's files go into a folder")
    with _jobs(context, args, args.source) as jobs:
        if len(jobs) > 1 and args.output and args.format != "tensorboard":
            raise UsageError(f"{args.source} has {len(jobs)} jobs", hint=f"name one: {args.source}:{jobs[0].job_id}")
        targets = [
            exported(job, args.format, Path(args.output or f"{job.job_id}{SUFFIXES[args.format] or '-tensorboard'}"))
            for job in jobs
        ]
    names = [str(target) for target in dict.fromkeys(targets)]
    return Outcome(text="\n".join(names), document={"files": names})


def notebook(context: Context, args: Arguments) -> Outcome:
    """A notebook that looks at a file, and can run it again."""
    from workbench.saved.notebook import notebook_of
    from workbench.saved.session import load_session

    target = Path(args.output or Path(args.file).with_suffix(".ipynb"))
    with load_session(args.file) as saved:
        data = notebook_of(saved, os.path.relpath(args.file, target.absolute().parent))
    if target.exists() and not args.force:
        raise UsageError(f"{target} is there already", hint="choose another name with -o, or add --force")
    _write(target, data)
    return Outcome(text=str(target), document={"file": str(target)})


def _write(target: Path, data: bytes) -> None:
    from workbench.store.home import atomic_write

    _demand_folder(target)
    atomic_write(target.absolute(), data, mode=0o644)


def _demand_folder(target: Path) -> None:
    if not target.absolute().parent.is_dir():
        raise StoreError(f"there is no directory {target.absolute().parent}", hint="make it, or write elsewhere")
