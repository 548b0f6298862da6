"""The verb that starts a job: its words become the fields of a `JobSpec`."""

from __future__ import annotations

from typing import Any, Final

from workbench.errors import UsageError
from workbench.verbs import watch
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome

# Options that are fields of the spec by the same name; None means that the spec's own default holds.
FIELDS: Final = (
    "name",
    "min_ranks",
    "nproc_per_node",
    "max_restarts",
    "snapshot_every",
    "on_nan",
    "on_mismatch",
    "consistency_every",
    "consistency_budget",
    "check_reduce",
    "bitwise",
    "cwd",
    "python",
    "cold",
    "preload",
    "backend",
    "master_port",
    "seed",
    "deterministic",
    "startup_timeout",
    "stop_grace",
    "log_limit",
    "max_steps",
    "checkpoint_dir",
    "checkpoint_keep",
    "checkpoint_keep_every",
    "progress_timeout",
)


def launch(context: Context, args: Arguments, source: str | None = None) -> Outcome:
    """Start the job; with --wait follow it to its end."""
    program = _program(args, source)
    session = context.session(args, start=True)
    if session.was_started and not context.quiet(args):
        context.screen.write(f"pool {session.name} started\n", is_error=context.is_shell)
    job = session.launch(args=args.args, **program, **_fields(args))
    context.adopt(job)
    if not context.is_shell:
        return watch.to_the_end(context, job, args) if args.wait else Outcome(value=job, document=_document(job))
    if args.json and not args.wait:
        return Outcome(document=_document(job))
    context.screen.write(f"{job.job_id}\n")
    return watch.to_the_end(context, job, args) if args.wait else Outcome(value=job)


def _document(job: Any) -> dict[str, Any]:
    state = job.state
    return {"job_id": job.job_id, "phase": state.phase.value, "reason": state.reason, "world_size": state.world_size}


def _fields(args: Arguments) -> dict[str, Any]:
    """What was asked for, in the spec's words."""
    given = {name: getattr(args, name) for name in FIELDS}
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    if args.nnodes:
        fields["min_nnodes"], fields["nnodes"] = args.nnodes
    if args.checkpoint_every:
        fields["checkpoint_every"], fields["checkpoint_seconds"] = args.checkpoint_every
    if args.exact_reduce:
        fields["exact_reduce"] = 64
    if args.env:
        fields["env"] = dict(args.env)
    return fields


def _program(args: Arguments, source: str | None) -> dict[str, Any]:
    """Which of the four kinds of program was meant."""
    given = {
        "SCRIPT": args.script is not None,
        "-m MODULE": args.module is not None,
        "--interactive": bool(args.interactive),
        "a cell": source is not None,
    }
    chosen = [what for what, is_given in given.items() if is_given]
    if not chosen:
        raise UsageError("there is nothing to launch", hint="give a SCRIPT, -m MODULE or --interactive")
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} were given", hint="a job runs one program; give one of them")
    if args.interactive and args.wait:
        raise UsageError("an interactive job has no end to wait for", hint="leave --wait out")
    if source is not None:
        return {"source": source}
    if args.script is not None:
        return {"entrypoint": args.script}
    return {"module": args.module} if args.module is not None else {"interactive": True}
