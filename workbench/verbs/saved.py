"""What the verbs about saved sessions do: save, show."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.errors import UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Text
from workbench.verbs.story import clock_of, launches

if TYPE_CHECKING:
    from workbench.saved.session import SavedJob, SavedSession


def file_and_job(word: str) -> tuple[str, str] | None:
    """FILE or FILE:JOB; None for what names a job of the pool."""
    name, _, job_id = word.partition(":")
    return (name, job_id) if name.endswith(".dtrain") or Path(name).is_file() else None


def save(context: Context, args: Arguments) -> Outcome:
    """Write jobs to a file."""
    session = context.session(args)
    chosen = _chosen(context, args, session)
    left_out = session.save(args.file, chosen, env=args.env, with_checkpoints=args.with_checkpoints)
    size = Path(args.file).stat().st_size
    what = f"{len(chosen)} job{'s' if len(chosen) > 1 else ''}"
    lines = [f"{args.file}: {what}, {size / 1000:,.0f} kB", *(f"  left out: {line}" for line in left_out)]
    document = {"file": args.file, "jobs": chosen, "bytes": size, "left_out": left_out}
    return Outcome(text="\n".join(lines), document=document)


def _chosen(context: Context, args: Arguments, session: Any) -> list[str]:
    if args.all:
        if args.jobs:
            raise UsageError("--all and names of jobs were given", hint="give one of them")
        return list(session.job_ids(limit=100_000))
    if args.jobs:
        return [session.attach(job_id).job_id for job_id in args.jobs]
    if session.touched:
        return list(session.touched)
    args.job = None
    return [context.job(args).job_id]


def show(context: Context, args: Arguments) -> Outcome:
    """What is in a file."""
    from workbench.saved.session import load_session

    session = load_session(args.file)
    named = args.job or (args.code or args.timeline or args.logs or args.at is not None)
    if not named:
        text = _overview(context, session)
        document = msgspec.to_builtins(msgspec.structs.replace(session.document, files={}))
        return Outcome(value=session, text=text, document=document)
    jobs = [session.attach(args.job)] if args.job else [session.attach(entry.job_id) for entry in session.document.jobs]
    texts = [_told(context, args, job) for job in jobs]
    documents = [_document(args, job) for job in jobs]
    text = "\n\n".join(texts)
    return Outcome(value=Text(text), text=text, document=documents[0] if args.job else documents)


def _overview(context: Context, session: SavedSession) -> str:
    from workbench.views.text import render_jobs

    told, screen = session.document, context.screen
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told.saved_at))
    pool = f", a pool of {told.pool.slots} {told.pool.accelerator} slots" if told.pool else ""
    packages = ", ".join(
        f"{name} {told.host.packages[name]}" for name in ("torch", "numpy") if name in told.host.packages
    )
    whose = "saved here" if session.is_ours else "not saved with this DTRAIN_HOME's key"
    lines = [
        f"{session.archive.path.name}: saved {saved_at} by dtrain {told.dtrain} ({whose})",
        f"python {told.host.python}, {packages}, {told.host.platform}, {told.host.cores} cores{pool}",
        *dict.fromkeys(_commit(entry.git) for entry in told.jobs if entry.git is not None),
        "",
        render_jobs(
            session.jobs(limit=1000),
            launches(context),
            screen.width,
            color=screen.has_color,
        ),
        *(["", "left out:", *(f"  {line}" for line in told.left_out)] if told.left_out else []),
    ]
    return "\n".join(lines)


def _commit(git: Any) -> str:
    where = f" on {git.branch}" if git.branch else ""
    if git.changed is None:
        state = ""
    else:
        state = f"; changed since: {', '.join(git.changed)}" if git.changed else "; the code is that of the commit"
    return f"commit {git.commit[:12]}{where}{state}"


def _told(context: Context, args: Arguments, job: SavedJob) -> str:
    from workbench.views.lane_text import render_timeline
    from workbench.views.text import render_status

    screen = context.screen
    if args.code:
        return "\n\n".join(f"# --- {job.job_id}: {name} ---\n{text}" for name, text in job.code.items())
    if args.logs:
        return job.logs(tail=None)
    view = job.view(None if args.at is None else job.state.submitted_at + args.at)
    if args.timeline and view.timeline is not None:
        return render_timeline(view.timeline, job.job_id, clock_of(view.timeline), screen.width, color=screen.has_color)
    return render_status(view, width=screen.width, color=screen.has_color, clock=clock_of(view.timeline))


def _document(args: Arguments, job: SavedJob) -> Any:
    if args.code:
        return {"job_id": job.job_id, "code": job.code}
    if args.logs:
        return {"job_id": job.job_id, "logs": job.logs(tail=None)}
    view = job.view(None if args.at is None else job.state.submitted_at + args.at)
    return msgspec.to_builtins(view.timeline if args.timeline else view)
