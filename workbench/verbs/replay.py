"""The verb that asks whether a program gives the same bits again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from workbench.errors import UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Text

FIELDS: Final = ("nproc_per_node", "cwd", "python", "preload", "backend", "seed", "deterministic")


def check(context: Context, args: Arguments) -> Outcome:
    """Of a script, a module, or a job's program; exit code 1 when bits differ."""
    told = {"steps": args.steps, "timeout": args.timeout, "tell": _teller(context, args)}
    told = {name: value for name, value in told.items() if value is not None}
    fields = _fields(args)
    if args.module is not None or _is_script(args):
        session = context.session(args, start=True)
        program = {"module": args.module} if args.module is not None else {"entrypoint": args.script}
        report = session.replay_check(**program, args=args.args, **told, **fields)
    else:
        args.job = args.script
        report = context.job(args).replay_check(**told, **fields)
    text = "\n".join(report.lines())
    document = {"is_same": report.is_same, **msgspec.to_builtins(report)}
    return Outcome(value=Text(text), text=text, document=document, code=0 if report.is_same else 1)


def _is_script(args: Arguments) -> bool:
    """Whether the word names a program and not a job."""
    if args.script is None:
        return False
    is_file: bool = args.script.endswith(".py") or (Path(args.cwd or ".").expanduser() / args.script).is_file()
    if args.args and not is_file:
        raise UsageError(f"{args.script} is no script here", hint="arguments are for a script; a job has its own")
    return is_file


def _fields(args: Arguments) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in FIELDS}
    fields = {name: value for name, value in given.items() if value is not None and value is not False}
    if args.nnodes:
        fields["nnodes"] = args.nnodes[1]
    if args.env:
        fields["env"] = dict(args.env)
    return fields


def _teller(context: Context, args: Arguments) -> Any:
    """A line as each run begins; none where only the verdict is wanted."""
    if context.quiet(args) or args.json:
        return None
    return lambda line: context.screen.write(f"{line} …\n", is_error=context.is_shell)
