"""dtrain workbench: launch, watch, check and recover multi-rank torch.distributed jobs from a notebook.

Nothing heavy is imported here: neither torch, Dask nor IPython. Names load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.errors import WorkbenchError
    from workbench.feed import JobSummary
    from workbench.magics import load_ipython_extension, unload_ipython_extension
    from workbench.saved.page import report
    from workbench.saved.rerun import rerun
    from workbench.saved.session import load_session
    from workbench.session import Job, Session
    from workbench.spec import JobSpec
    from workbench.state import JobPhase, RankPhase

__version__ = "0.1.0"

_HOMES = {
    "Job": "workbench.session",
    "JobPhase": "workbench.state",
    "JobSpec": "workbench.spec",
    "JobSummary": "workbench.feed",
    "RankPhase": "workbench.state",
    "Session": "workbench.session",
    "WorkbenchError": "workbench.errors",
    "load_ipython_extension": "workbench.magics",
    "load_session": "workbench.saved.session",
    "report": "workbench.saved.page",
    "rerun": "workbench.saved.rerun",
    "unload_ipython_extension": "workbench.magics",
}

__all__ = [
    "Job",
    "JobPhase",
    "JobSpec",
    "JobSummary",
    "RankPhase",
    "Session",
    "WorkbenchError",
    "load_ipython_extension",
    "load_session",
    "report",
    "rerun",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
