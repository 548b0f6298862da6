"""The verbs about saved sessions, declared; what they do is in `saved`."""

from __future__ import annotations

from typing import Final

from workbench.verbs import beside, read, rerun, saved
from workbench.verbs.declare import COMMON, HELP, JSON, QUIET, Operand, Option, Verb

FILE: Final = Operand("FILE", "a saved session, such as run.dtrain", required=True, offers="session")
SOURCE: Final = Operand("SOURCE", "a saved session, FILE:JOB, or a job of the pool", required=True, offers="session")
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
            Option(("--at",), "how it stood so long after its submission", "TIME", read.seconds),
            *_LOOK,
        ),
        examples=("show run.dtrain", "show run.dtrain train-1f2e --at 30s", "show run.dtrain --code"),
    ),
    Verb(
        "rerun", "run a saved session's jobs again; exit code 0 only when all of them ended well", rerun.run_again,
        operands=(FILE,),
        options=(
            Option(("--job",), "only that one of its jobs", "JOB", named="job"),
            Option(("--set",), "another value for a parameter or an option; several values are a sweep", "NAME=VALUE",
                   rerun.setting, repeats=True, named="settings"),
            Option(("-n", "--nproc-per-node"), "another number of ranks a node", "N", read.count,
                   named="nproc_per_node"),
            Option(("--steps",), "end well after so many optimizer steps", "N", read.count),
            Option(("--from-checkpoint",), "begin from the saved checkpoint of that step, or the newest", "STEP|newest",
                   rerun.checkpoint),
            Option(("--env",), "an environment variable of the ranks", "KEY=VALUE", read.setting, repeats=True),
            Option(("--check",), "compare each job with the saved one; exit code 1 when it deviates"),
            Option(("--tolerance",), "how far losses may lie apart that need not be the same bit for bit (default 5%)",
                   "SHARE", rerun.share),
            Option(("--exact",), "bit for bit, also when the job was not launched as deterministic"),
            Option(("--out",), "save what was run", "FILE", offers="file"),
            Option(("--yes",), "run code that was not saved from this DTRAIN_HOME"),
            Option(("--dry-run",), "say what would be run, and what is not as it was"),
            *COMMON,
        ),
        notes="No notebook is needed. Names for --set are assignments below a line '# dtrain: parameters' and options "
        "of the program's command line.",
        examples=(
            "rerun run.dtrain --check", "rerun run.dtrain --job trial-1f2e --set lr=0.1,0.01",
            "rerun run.dtrain -n 4 --steps 100 --out new.dtrain",
        ),
    ),
    Verb(
        "compare", "show runs beside each other: what was asked for, losses, states, throughput", beside.compare,
        operands=(
            Operand("A", "a saved session, one job of it (FILE:JOB), or a job of the pool", required=True,
                    offers="session"),
            Operand("B", "the other one", required=True, offers="session"),
            Operand("MORE", "more of them, six in all at most", offers="session", repeats=True),
        ),
        options=(Option(("--open",), "show it as a page in a browser, with curves"), *COMMON),
        examples=("compare run.dtrain new.dtrain", "compare run.dtrain:train-1f2e train-77aa",
                  "compare train-1f2e train-77aa --open"),
    ),
    Verb(
        "report", "write a page about a saved session, or a job, that needs no server and no network", beside.report,
        operands=(SOURCE,),
        options=(
            Option(("-o", "--output"), "the file (default: the source's name with .html)", "FILE", offers="file"),
            Option(("--title",), "its heading", "TEXT"),
            *COMMON,
        ),
        examples=("report run.dtrain -o report.html",), is_act=True,
    ),
    Verb(
        "export", "write a job's steps in another program's format", beside.export,
        operands=(SOURCE,),
        options=(
            Option(("--format",), " | ".join(beside.FORMATS), "FORMAT", beside.form, required=True),
            Option(("-o", "--output"), "the file, or TensorBoard's folder", "PATH", offers="file"),
            *COMMON,
        ),
        notes="chrome-trace opens in Perfetto and chrome://tracing; parquet needs pyarrow.",
        examples=("export run.dtrain --format csv -o steps.csv", "export run.dtrain --format tensorboard -o runs"),
    ),
    Verb(
        "notebook", "make a notebook that looks at a saved session, and can run it again", beside.notebook,
        operands=(FILE,),
        options=(
            Option(("-o", "--output"), "the file (default: the session's name with .ipynb)", "FILE", offers="file"),
            Option(("--force",), "in place of one that is there"),
            JSON, QUIET, HELP,
        ),
        examples=("notebook run.dtrain",), is_act=True,
    ),
)  # fmt: skip
