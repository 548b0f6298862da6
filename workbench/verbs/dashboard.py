"""The live pages in a browser: a tab in a shell, the cell in a notebook.

A notebook's output is kept in its file, so no link is shown there: the page comes through Jupyter's own login.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workbench.errors import PoolError, UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.saved import file_and_job
from workbench.verbs.story import launches

if TYPE_CHECKING:
    from workbench.session import Session

TAB: Final = "workbench_widgets.tab"  # by name: they are above
PAGES: Final = "workbench_widgets.saved"
ENDS: Final = "Ctrl-C ends it"
NEEDED: Final = ("workbench_widgets", "panel")  # what not every install has


def dashboard(context: Context, args: Arguments) -> Outcome:
    """All jobs, or one; or what is in a saved session."""
    if args.job and (found := file_and_job(args.job)) is not None:
        return _saved(context, args, Path(found[0]), found[1])
    if context.target(args)[0]:
        raise UsageError("the pages show the pools of this machine", hint="leave out --address")
    session = context.session(args)
    job = context.job(args) if args.job else None
    if not context.is_shell:
        _refuse_options(args)
        return Outcome(value=AllJobs(session) if job is None else job)
    return open_page(args, *([] if job is None else [job.job_id]))


def _saved(context: Context, args: Arguments, path: Path, job_id: str) -> Outcome:
    """In a shell until Ctrl-C, with a server of its own; in a notebook as long as the kernel lives."""
    from workbench.saved.session import load_session, show_live

    session = load_session(path)
    jobs = [entry.job_id for entry in session.document.jobs]
    job_id = session.attach(job_id).job_id if job_id else jobs[0] if len(jobs) == 1 else ""
    if not context.is_shell:
        _refuse_options(args)
        show_live(path, start=True)
        return Outcome(value=session.attach(job_id) if job_id else session)
    session.close()
    demand_pages()
    try:
        server = importlib.import_module(PAGES).Server(path, args.port or 0)
    except OSError as error:
        hint = "give another --port, or leave it out" if args.port else ""
        raise PoolError(f"the pages cannot be shown: {error.strerror or error}", hint=hint) from None
    link = server.tab.link(job_id, read_only=True)
    is_shown = not (args.no_browser or args.json) and _browse(server.tab.link(job_id, read_only=True, once=True))
    return Outcome(
        text=_told(link, is_shown=is_shown, read_only=True, until=ENDS),
        document={"url": link, "port": server.tab.port, "read_only": True},
        then=server.run,
    )


def _refuse_options(args: Arguments) -> None:
    if args.port or args.read_only or args.no_browser:
        raise UsageError("a notebook shows the page in the cell", hint="links are given in a terminal")


def demand_pages() -> None:
    """Raises `UsageError` where they are not installed."""
    if missing := next((name for name in NEEDED if importlib.util.find_spec(name) is None), ""):
        raise UsageError(f"there is no {missing} here", hint="pip install 'dtrain-workbench[dashboard]'")


def open_page(args: Arguments, *jobs: str, is_guest: bool = False, read_only: bool = False) -> Outcome:
    """The page of all jobs, of one, or of several beside each other, in a browser as far as there is one.

    `is_guest`: something on it is shown as long as this process lives, so that a shell waits for Ctrl-C.
    """
    read_only = read_only or bool(getattr(args, "read_only", False))
    tab = _tab(args, read_only)
    link = tab.link(*jobs, read_only=read_only)
    is_hidden = getattr(args, "no_browser", False) or args.json
    is_shown = not is_hidden and _browse(tab.link(*jobs, read_only=read_only, once=True))
    return Outcome(
        text=_told(link, is_shown=is_shown, read_only=read_only, **({"until": ENDS} if is_guest else {})),
        document={"url": link, "port": tab.port, "read_only": read_only},
        then=_until_interrupted if is_guest else None,
    )


def _until_interrupted() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _told(link: str, *, is_shown: bool, read_only: bool, until: str = "It is good until dtrain down") -> str:
    what = "whoever has it may look" if read_only else "whoever has it may act for you"
    first = "opened in your browser; the same again:" if is_shown else "open in a browser on this machine:"
    return f"{first}\n\n    {link}\n\nThe link is a secret: {what}. {until}."


def _tab(args: Arguments, read_only: bool) -> Any:
    from workbench.pool.local import start_dashboard
    from workbench.store.home import home_dir

    demand_pages()
    tab = importlib.import_module(TAB)
    start_dashboard()
    port = getattr(args, "port", None)
    try:
        return tab.open_tab(home_dir(), port or 0, read_only=read_only)
    except tab.TabError as error:
        hint = "give another --port, or leave it out" if port else f"see {home_dir()}/dashboard/dashboard.log"
        raise PoolError(str(error), hint=hint) from None


def _browse(link: str) -> bool:
    """Show it where there is a screen; a browser of a text terminal would take that over."""
    import webbrowser

    has_screen = sys.platform == "darwin" or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    return has_screen and webbrowser.open(link)


class AllJobs:
    """All jobs of this machine's pools, as a notebook shows them: the list now, which becomes the live page."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return "<all jobs>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from workbench.views.html import snapshot_jobs_html
        from workbench.views.text import render_jobs

        jobs, clock = self._session.jobs(), launches()
        return {"text/plain": render_jobs(jobs, clock), "text/html": snapshot_jobs_html(jobs, clock, is_live=True)}
