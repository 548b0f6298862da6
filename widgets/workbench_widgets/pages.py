"""The pages as Bokeh applications: a job, jobs beside each other, the list of jobs. Here documents meet followers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bokeh.application.handlers.function import FunctionHandler
from panel.io.application import Application
from tornado.ioloop import IOLoop

from workbench import Job, __version__
from workbench.views.sides import MOST, By
from workbench_widgets import page
from workbench_widgets.comparison import Comparison, names_of
from workbench_widgets.dashboard import Dashboard, Later
from workbench_widgets.follower import Followers
from workbench_widgets.gate import RIGHTS
from workbench_widgets.launcher import Launcher
from workbench_widgets.live import Frame
from workbench_widgets.overview import Listing, Overview
from workbench_widgets.pacer import Pacer
from workbench_widgets.panels.jobs import Jobs
from workbench_widgets.panels.launch import Launch
from workbench_widgets.pools import Pools
from workbench_widgets.saved import Guests, Shelf
from workbench_widgets.source import Choice
from workbench_widgets.theme import known_theme


class Pages:
    """What all open pages share: the lines to the pools, the saved sessions that are shown, and a follower a job.

    `may_act` False: none of them acts.
    """

    def __init__(self, pools: Pools, *, may_act: bool = True) -> None:
        self._pools, self._may_act = pools, may_act
        self.shelf, self.guests = Shelf(), Guests()
        self._followers = Followers(self._find, lost=self._lost)
        self._overview, self._launcher = Overview(pools), Launcher(pools)
        self.count_sessions: Callable[[], int] = lambda: 0

    def health(self) -> dict[str, object]:
        """What `/healthz` says: that it lives, and for how many."""
        return {
            "status": "ok",
            "version": __version__,
            "pages": self.count_sessions(),
            "followed": len(self._followers),
        }

    def is_needed(self) -> bool:
        """Whether a server that was started for its guests has to go on. Waits for pools' answers."""
        return not self.guests.are_gone or self._pools.is_any_running()

    def close(self) -> None:
        self._followers.close()
        self.shelf.close()  # the lines to the pools go with the process; to close them takes seconds

    def job_app(self) -> Any:
        return _application(self._job_page)

    def compare_app(self) -> Any:
        return _application(self._compare_page)

    def list_app(self) -> Any:
        return _application(self._list_page)

    def _find(self, job_id: str) -> Job:
        return self.shelf.find(job_id) if is_saved(job_id) else self._pools.find(job_id)

    def _lost(self, job: Job) -> None:
        if not job.is_saved:
            self._pools.forget(job.session)

    def _job_page(self, doc: Any) -> None:
        request = doc.session_context.request
        arguments = request.arguments
        job_id, theme = page.argument(arguments, "id"), page.argument(arguments, "theme")
        may_act = self._may_act and not is_saved(job_id) and request.headers.get(RIGHTS, "act") == "act"
        _prepare(
            doc, f"{job_id.partition(':')[2] or job_id or 'no job'} · dtrain", page.JOB_BODY, theme, file_of(job_id)
        )
        choice = Choice(page.number(arguments, "rank"), page.number(arguments, "step"))
        follower, at = self._followers.get(job_id), page.seconds(arguments, "at")
        dashboard = Dashboard(follower, known_theme(theme), later_on(doc), may_act=may_act, choice=choice, at=at)
        _place(doc, dashboard.roots, dashboard.pacer)
        doc.on_session_destroyed(lambda _: dashboard.close())

    def _compare_page(self, doc: Any) -> None:
        arguments = doc.session_context.request.arguments
        ids, theme = page.values(arguments, "id"), page.argument(arguments, "theme")
        files = {file_of(one) for one in ids}
        file = files.pop() if len(files) == 1 else ""  # of several, or of pools too, there is no one list
        _prepare(doc, f"{' and '.join(names_of(ids)) or 'no job'} · dtrain", page.COMPARE_BODY, theme, file)
        by = next((one for one in By if one.value == page.argument(arguments, "by")), By.STEP)
        sources = [self._followers.get(job_id) for job_id in ids[:MOST]]
        comparison = Comparison(sources, theme, later_on(doc), by=by)
        _place(doc, comparison.roots, comparison.pacer)
        doc.on_session_destroyed(lambda _: comparison.close())

    def _list_page(self, doc: Any) -> None:
        arguments = doc.session_context.request.arguments
        theme, saved = page.argument(arguments, "theme"), self.shelf.get(page.argument(arguments, "file"))
        overview = self._overview if saved is None else Overview(saved)
        _prepare(doc, "jobs · dtrain", page.LIST_BODY, theme)
        later, rights = later_on(doc), doc.session_context.request.headers.get(RIGHTS, "act")
        may_act = self._may_act and saved is None and rights == "act"
        forms = [Launch(self._launcher, later, theme)] if may_act else []
        jobs = Jobs(theme, overview.ask_now, above=[form.root for form in forms])
        newest = [Listing()]

        def draw() -> None:
            jobs.update(newest[0])
            for form in forms:
                form.draw()  # another pool may have come
            frame.pulse += 1

        def paint(name: str) -> None:
            panels: list[Any] = [jobs, *forms] if theme else []
            for panel in panels:
                panel.paint(name)

        def changed(listing: Listing) -> None:
            newest[0] = listing
            later(0.0, pacer.want)

        pacer = Pacer(draw, later, IOLoop.current().time)
        frame = Frame(pacer.shown, paint)
        end = overview.subscribe(lambda: jobs.query, changed)
        draw()
        _place(doc, {"jobs": jobs.root, "frame": frame}, pacer)

        def close(_: object) -> None:
            end()
            pacer.close()

        doc.on_session_destroyed(close)


def _application(fill: Callable[[Any], None]) -> Any:
    """A Panel application: with Bokeh's own, Panel would not hear that a page is connected, and hold its news back."""
    return Application(FunctionHandler(fill))  # type: ignore[no-untyped-call]


def later_on(doc: Any) -> Later:
    """A page's `later`: with its document locked, until its session ends."""
    loop = IOLoop.current()
    is_open = [True]
    doc.on_session_destroyed(lambda _: is_open.clear())

    def later(seconds: float, call: Callable[[], None]) -> None:
        def plan() -> None:
            if is_open:
                if seconds > 0:
                    doc.add_timeout_callback(call, round(seconds * 1000))
                else:
                    doc.add_next_tick_callback(call)

        loop.add_callback(plan)

    return later


def is_saved(job_id: str) -> bool:
    """Whether a page's id is that of a job of a saved session: `KEY:JOB`."""
    return ":" in job_id


def file_of(job_id: str) -> str:
    """The key of the saved session that it is of, or ''."""
    return job_id.partition(":")[0] if is_saved(job_id) else ""


def _prepare(doc: Any, title: str, body: str, theme: str, file: str = "") -> None:
    doc.title, doc.template = title, page.template(body)
    doc.template_variables.update(page.variables(theme, "loading …", file))
    doc.config.reconnect_session = doc.config.notify_connection_status = False  # the page says it in its own words


def _place(doc: Any, roots: dict[str, Any], pacer: Pacer) -> None:
    doc.on_event("document_ready", lambda _: pacer.shown())
    with doc.models.freeze():  # else all models are gone through once a root
        for name, viewable in roots.items():
            model = viewable.server_doc(doc, location=False).roots[-1]
            model.name = name
