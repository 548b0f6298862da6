"""The verb that runs a saved session again, and the words of its options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.errors import JobError
from workbench.verbs import watch
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome

if TYPE_CHECKING:
    from workbench.saved.plan import Attempt, Plan
    from workbench.saved.rerun import Done, Rerun
    from workbench.saved.session import SavedSession
    from workbench.session import Job


def setting(text: str) -> tuple[str, tuple[str, ...]]:
    """NAME=VALUE, or NAME=VALUE,VALUE for a sweep; commas in brackets or quotes belong to a value."""
    name, equals, rest = text.partition("=")
    name = name.lstrip("-")
    if not equals or not name:
        raise ValueError("NAME=VALUE")
    return name, _values(rest)


def _values(text: str) -> tuple[str, ...]:
    found, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and not depth and not quote:
            found.append("")
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[({") - (char in "])}")
        found[-1] += char
    return tuple(found)


def share(text: str) -> float:
    """5% or 0.05."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("a share, such as 5% or 0.05")
    return value


def checkpoint(text: str) -> int:
    """A step, or `newest`."""
    from workbench.saved.beginning import NEWEST

    if text != "newest" and not re.fullmatch(r"\d{1,15}", text):
        raise ValueError("a step, or newest")
    return NEWEST if text == "newest" else int(text)


def run_again(context: Context, args: Arguments) -> Outcome:
    """Say what will be run, run it, say how it went."""
    from workbench.saved.plan import Changes
    from workbench.saved.rerun import Checking, demand, demand_folder, other_hardware, perform, prepare, slots_for
    from workbench.saved.session import load_session
    from workbench.views.compare import TOLERANCE

    changes = Changes(tuple(args.settings), args.nproc_per_node, args.steps, dict(args.env), args.from_checkpoint)
    with load_session(args.file) as saved:
        plans = prepare(saved, args.job, changes)
        if not context.quiet(args) or args.dry_run:
            context.screen.write("\n".join(_told(plans)) + "\n")
        if args.dry_run:
            return Outcome(document=[_document(plan) for plan in plans], code=int(any(p.problems for p in plans)))
        demand(saved, plans, yes=args.yes)
        demand_folder(args.out)
        session = context.session(args, start=True, slots=slots_for(plans))
        if (note := other_hardware(saved, session)) and not context.quiet(args):
            context.screen.write(f"  · {note}\n")
        tolerance = TOLERANCE if args.tolerance is None else args.tolerance
        checking = Checking(tolerance, args.exact) if args.check else None
        totals = iter(_totals(saved, plans))
        result = perform(plans, session, lambda job: _follow(context, job, args, next(totals)), checking)
    if args.out:
        session.save(args.out, list(result.jobs))
    return _outcome(context, args, result)


def _totals(saved: SavedSession, plans: Sequence[Plan]) -> list[tuple[str, int]]:
    """Of each job in the order in which they are followed: `2 of 3`, and how many steps it will probably take."""
    known = {line.job_id: line.step for line in saved.jobs(limit=len(saved.document.jobs))}
    steps = [attempt.spec.max_steps or known[plan.job.job_id] for plan in plans for attempt in plan.attempts]
    return [(f"{number} of {len(steps)}", most) for number, most in enumerate(steps, 1)]


def _follow(context: Context, job: Job, args: Arguments, total: tuple[str, int]) -> None:
    from workbench.views.text import bar

    place, steps = total
    if not context.quiet(args):
        context.screen.write(f"{place}: {job.job_id}\n")
    watch.follow(context, job, is_quiet=context.quiet(args), above=lambda view: bar(view.step, steps))


def _told(plans: Sequence[Plan]) -> list[str]:
    """What will be run, in lines."""
    lines = []
    for plan in plans:
        count = f", {len(plan.attempts)} times" if len(plan.attempts) > 1 else ""
        spec = plan.attempts[0].spec
        words = " ".join(word for word in (spec.entrypoint or spec.kind.value, *spec.args) if word)
        lines.append(f"{plan.job.job_id}: {words} on {spec.world_size or 'as many as fit'} ranks{count}")
        lines += [f"  set {_said(attempt)}" for attempt in plan.attempts if attempt.settings]
        lines += [f"  ! {problem}" for problem in plan.problems]
        lines += [f"  · {note}" for note in plan.notes]
    return lines


def _said(attempt: Attempt) -> str:
    return ", ".join(f"{name}={value}" for name, value in attempt.settings)


def _document(plan: Plan) -> dict[str, Any]:
    specs = [msgspec.to_builtins(attempt.spec) for attempt in plan.attempts]
    return {"job_id": plan.job.job_id, "problems": plan.problems, "notes": plan.notes, "specs": specs}


def _outcome(context: Context, args: Arguments, result: Rerun) -> Outcome:
    parts = [_summary(context, one) for one in result.done]
    if args.out:
        parts.append(f"saved as {args.out}")
    document = [
        {
            "saved": one.saved.job_id,
            "job_id": one.job.job_id,
            "settings": dict(one.attempt.settings),
            "is_well": one.is_well,
            "reason": one.reason,
            "is_deviation": one.is_deviation,
            "lines": msgspec.to_builtins(one.lines),
        }
        for one in result.done
    ]
    text = "\n\n".join(parts)
    code = 0 if result.is_well else 1
    if context.is_shell:
        return Outcome(text=text, document=document, code=code)
    context.screen.write(text + "\n")
    if not result.is_well:
        bad = next(one for one in result.done if not one.is_well or one.is_deviation)
        raise JobError(f"{bad.job.job_id}: {bad.reason if not bad.is_well else 'it deviates from the saved run'}",
                       job_id=bad.job.job_id)  # fmt: skip
    return Outcome(value=result, document=document)


def _summary(context: Context, one: Done) -> str:
    from workbench.views.text import render_lines

    how = "" if one.is_well else f": {one.reason}"
    settings = f" ({_said(one.attempt)})" if one.attempt.settings else ""
    head = f"{one.job.job_id}{settings} {one.job.phase.value}{how}"
    if not one.lines:
        return head
    verdict = "DEVIATES from" if one.is_deviation else "agrees with"
    table = render_lines(one.lines, (one.saved.job_id, one.job.job_id), context.screen.width)
    return f"{head}; it {verdict} {one.saved.job_id}\n{table}"
