"""Launches what a form asks for, once for two clicks, in a thread of its own; says what came of it. Never raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from workbench import Session, WorkbenchError
from workbench.views.acts import Act
from workbench.views.launching import Form, launch_options, wrong
from workbench_widgets.actions import Once
from workbench_widgets.pools import Pools, no_pool

logger = logging.getLogger(__name__)


class Launched(NamedTuple):
    """In words, and the job where there is one."""

    said: str
    job_id: str = ""


class Launcher:
    """For all pages of a server; its methods are for the event loop."""

    def __init__(self, pools: Pools) -> None:
        self._pools, self._once, self._lock = pools, Once(), threading.Lock()

    def names(self) -> list[str]:
        """Pools that there may be."""
        return self._pools.names()

    def launch(self, form: Form, done: Callable[[Launched], None]) -> None:
        """Begin it; `done` hears of it from any thread."""
        act = Act("launch", path=repr(form))
        if reason := wrong(form):
            done(Launched(f"Nothing done: {reason}."))
            return
        with self._lock:
            refusal = self._once.begin(act)
        if refusal:
            done(Launched(f"Nothing done: {refusal}."))
            return

        def work() -> None:
            try:
                done(self._launch(form))
            finally:
                with self._lock:
                    self._once.end(act)

        threading.Thread(target=work, name="launch", daemon=True).start()

    def _launch(self, form: Form) -> Launched:
        def session() -> Session:
            names = self.names()
            name = form.pool or next((one for one in names if one == "default"), next(iter(names), ""))
            if not name:
                raise no_pool()
            return self._pools.session(name)

        return launched(form, session)


def launched(form: Form, session: Callable[[], Session]) -> Launched:
    """Start what a form that is not wrong asks for. Never raises."""
    try:
        pool = session()
        job = pool.launch(form.script.strip(), **launch_options(form))
        return Launched(f"was launched on pool {pool.name}.", job.job_id)
    except WorkbenchError as error:
        return Launched(f"It did not work: {error}")
    except Exception as error:
        logger.exception("launch")
        return Launched(f"It did not work: {type(error).__name__}: {error}")
