"""The verbs about saved sessions, declared; what they do is in `saved`."""

from __future__ import annotations

from typing import Final

from workbench.verbs import saved
from workbench.verbs.declare import COMMON, HELP, JSON, QUIET, Operand, Option, Verb

FILE: Final = Operand("FILE", "a saved session, such as run.dtrain", required=True, offers="session")
_LOOK: Final = (JSON, QUIET, HELP)

SAVED: Final = (
    Verb(
        "save", "write jobs to one file that can be looked at anywhere, and run again", saved.save,
        operands=(
            FILE,
            Operand("JOB", "jobs; left out: those of this notebook, in a shell the current one", offers="job",
                    named="jobs", repeats=True),
        ),
        options=(
            Option(("--all",), "all jobs of the pool"),
            Option(("--env",), "keep the value of that environment variable as well (a pattern)", "NAME", repeats=True),
            Option(("--with-checkpoints",), "put each job's newest whole checkpoint into it; else they are named"),
            *COMMON,
        ),
        notes="Secrets, home paths and values of environment variables are left out; it says what. A running job is "
        "saved as it stands.",
        examples=("save run.dtrain", "save run.dtrain train-1f2e train-77aa --with-checkpoints"), is_act=True,
    ),
    Verb(
        "show", "look at a saved session: its jobs, or all about one; no pool, and none of its code is run", saved.show,
        operands=(FILE, Operand("JOB", "one of its jobs", offers="")),
        options=(
            Option(("--code",), "its code, which a rerun would run"),
            Option(("--timeline",), "attempts, failures and recoveries, what every rank did when"),
            Option(("--logs",), "the end of what its ranks printed"),
            Option(("--at",), "how it stood so long after its submission", "TIME", saved.seconds),
            *_LOOK,
        ),
        examples=("show run.dtrain", "show run.dtrain train-1f2e --at 30s", "show run.dtrain --code"),
    ),
)  # fmt: skip
