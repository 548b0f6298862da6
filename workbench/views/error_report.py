"""A job's failure told to somebody else: what, where, what is likely behind it, with which versions, the traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workbench.views.advice import advise_on
from workbench.views.job import JobView
from workbench.views.story import earlier_lines
from workbench.views.wording import plural

PACKAGES: Final = ("torch", "numpy", "distributed", "dtrain-workbench")


def error_report(view: JobView, packages: Mapping[str, str]) -> str:
    """As text; empty when nothing failed. `packages`: versions by distribution."""
    failure = view.failure
    if failure is None:
        return ""
    at = "" if failure.step is None else f" at step {failure.step:,}"
    host = next((row.worker for row in view.rows if row.rank == failure.rank), "")
    again = " (it has recovered)" if view.has_recovered else ""
    advice = advise_on(view)
    versions = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
    lines = [
        f"dtrain job {view.job_id} ({view.label}): {view.phase.value}{again}, {plural(view.world_size, 'rank')}",
        f"{failure.reason}{at if at not in failure.reason else ''}",
        *([f"worker: {host}"] if host else []),
        *([f"log: {failure.log_path}"] if failure.log_path else []),
        *(advice.remedy() if advice else ()),
        *(earlier_lines(view.timeline) if view.timeline is not None else ()),
        *([f"versions: {versions}"] if versions else []),
    ]
    return "\n".join(lines) + (f"\n\n{failure.traceback.rstrip()}" if failure.traceback else "") + "\n"
