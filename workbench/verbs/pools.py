"""Verbs about pools: up, down, pool status, pool list."""

from __future__ import annotations

from typing import Any

from workbench.errors import PoolUnavailableError, UsageError
from workbench.verbs.context import Context
from workbench.verbs.declare import Arguments, Outcome
from workbench.verbs.shown import Listing, Text


def start(context: Context, args: Arguments) -> Outcome:
    """Find the pool running, or start it."""
    session = context.session(args, start=True, slots=args.slots)
    status = session.pool_status()
    was_started = session.was_started
    text = _render(status, context)
    if not was_started and args.slots is not None and args.slots != status.slots:
        text += f"\nit runs with {status.slots} slots already; to change that, stop it first: {context.prefix} down"
    return Outcome(value=Text(text), text=text, document={**_plain(status), "running": True, "started": was_started})


def stop(context: Context, args: Arguments) -> Outcome:
    """End a pool of this machine with all its jobs."""
    from workbench.session import stop_pool

    address, name = context.target(args)
    if address:
        raise UsageError(f"{address} is a cluster of your own", hint="stop it by the means that started it")
    ran = stop_pool(name)
    context.forget_session()
    text = f"pool {name} stopped" if ran else f"pool {name} did not run"
    return Outcome(value=Text(text), text=text, document={"name": name, "stopped": ran})


def status(context: Context, args: Arguments) -> Outcome:
    """Workers, slots and jobs; exit code 1 when the pool does not run."""
    try:
        found = context.session(args).pool_status()
    except PoolUnavailableError as error:
        address, name = context.target(args)
        if address:
            raise
        text = f"{error.args[0]}; {error.hint}" if error.hint else str(error.args[0])
        return Outcome(value=Text(text), text=text, document={"name": name, "running": False}, code=1)
    text = _render(found, context)
    return Outcome(value=Text(text), text=text, document={**_plain(found), "running": True})


def listing(context: Context, args: Arguments) -> Outcome:
    """Every pool of this home."""
    from workbench.pool.local import list_pools

    pools = list_pools()
    rows = [
        {"name": name, "running": mark is not None, "address": mark.address if mark else "", "pid": _pid(mark)}
        for name, mark in pools
    ]
    lines = [f"{row['name']:20} {'running  ' + str(row['address']) if row['running'] else 'stopped'}" for row in rows]
    text = "\n".join(lines) or f"no pool has been started yet; start one with: {context.prefix} up"
    return Outcome(value=Listing(rows, text), text=text, document=rows)


def _pid(mark: Any) -> int | None:
    return mark.pid if mark else None


def _plain(value: object) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _render(status: Any, context: Context) -> str:
    from workbench.views.text import render_pool

    return render_pool(status, width=context.screen.width, color=context.screen.has_color)
