"""What a process started by `bootstrap.py` is to do. Imported in zygotes and ranks: standard library only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


def main(argv: list[str]) -> Callable[[], None]:
    """The task that the arguments name. For a zygote this returns in its children only, with each child's own task."""
    match argv:
        case ["zygote", fd, *modules]:
            from workbench.agent.zygote import Zygote, warm_up

            return Zygote(int(fd), partial(warm_up, tuple(modules))).serve()
        case ["keeper", fd]:
            from workbench.agent.zygote import Zygote

            return Zygote(int(fd), lambda: {}).serve()
        case ["rank", *fds]:
            from workbench.agent.rank import run_cold

            return partial(run_cold, *map(int, fds))
    raise SystemExit(f"bootstrap.py: what is {argv}?")
