"""The live pages in a browser: a tab in a shell, the cell in a notebook.

A notebook's output is kept in its file, so no link is shown there: the page comes through Jupyter's own login.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from workbench.errors import PoolError, UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome

if TYPE_CHECKING:
    from workbench.session import Session

TAB: Final = "workbench_widgets.tab"  # by name: it is above
NEEDED: Final = ("workbench_widgets", "panel")  # what not every install has


def dashboard(context: Context, args: Arguments) -> Outcome:
    """All jobs, or one."""
    if context.target(args)[0]:
        raise UsageError("the pages show the pools of this machine", hint="leave out --address")
    session = context.session(args)
    job = context.job(args) if args.job else None
    if not context.is_shell:
        if args.port or args.read_only or args.no_browser:
            raise UsageError("a notebook shows the page in the cell", hint="links are given in a terminal")
        return Outcome(value=AllJobs(session) if job is None else job)
    tab = _tab(args)
    job_id = job.job_id if job is not None else ""
    link = tab.link(job_id, read_only=args.read_only)
    is_shown = not (args.no_browser or args.json) and _browse(tab.link(job_id, read_only=args.read_only, once=True))
    return Outcome(
        text=_told(link, is_shown=is_shown, read_only=args.read_only),
        document={"url": link, "port": tab.port, "read_only": args.read_only},
    )


def _told(link: str, *, is_shown: bool, read_only: bool) -> str:
    what = "whoever has it may look" if read_only else "whoever has it may act for you"
    first = "opened in your browser; the same again:" if is_shown else "open in a browser on this machine:"
    return f"{first}\n\n    {link}\n\nThe link is a secret: {what}. It is good until dtrain down."


def _tab(args: Arguments) -> Any:
    from workbench.pool.local import start_dashboard
    from workbench.store.home import home_dir

    if missing := next((name for name in NEEDED if importlib.util.find_spec(name) is None), ""):
        raise UsageError(f"there is no {missing} here", hint="pip install 'dtrain-workbench[dashboard]'")
    tab = importlib.import_module(TAB)
    start_dashboard()
    try:
        return tab.open_tab(home_dir(), args.port or 0, read_only=args.read_only)
    except tab.TabError as error:
        hint = "give another --port, or leave it out" if args.port else f"see {home_dir()}/dashboard/dashboard.log"
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

        jobs = self._session.jobs()
        return {"text/plain": render_jobs(jobs), "text/html": snapshot_jobs_html(jobs, is_live=True)}
