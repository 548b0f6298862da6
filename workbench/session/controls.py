"""Buttons and forms of a notebook, found by name: they are above, and need what not every install has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from workbench.errors import UsageError

if TYPE_CHECKING:
    from workbench.session import Session
    from workbench.session.job import Job

CONTROLS: Final = "workbench_widgets.controls"
LAUNCH_FORM: Final = "workbench_widgets.launch_form"


def job_panel(job: Job) -> Any:
    """A job's buttons. Raises `UsageError` where what they need is not installed."""
    return _panel(CONTROLS, job)


def session_panel(session: Session) -> Any:
    """The form that launches. Raises `UsageError` where what it needs is not installed."""
    return _panel(LAUNCH_FORM, session)


def _panel(name: str, of: object) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"there is no {error.name} here", hint="pip install 'dtrain-workbench[notebook]'") from None
    return module.panel(of)
