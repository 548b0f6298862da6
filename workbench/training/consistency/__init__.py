"""Proves while a job trains that its replicas agree: the ranks that should hold the same gradients, parameters,
optimizer state and buffers do, bit for bit; and finds out who does not, in what.

    watch       where torch is watched            replicas    what is compared, on which ranks
    wrapping    when DDP is made                  loops       loops that all_reduce by themselves
    check       one check                         lanes       the numbers that ranks exchange
    measure     digests of what is compared       digest      exact digests of tensors
    inquiry     after a difference                locate      who, which tensor, element and bit
    repair      what the majority has, sent       cadence     how often, from what it costs
    data        what a rank reads             rows        what the rows of all ranks say of that
    room        a process group of its own        reports     what is told
    origin      the first loss that is not finite
    reducing    hooks in DDP models             reduce      one: sums, or integers, with each bucket
    sums        linear checksums, their bound   fixed       gradients as integers
    settle      after backward: again, or who   blame       whose bit explains a wrong sum
    sharding    models of fully_shard           scatter     its reduce-scatters
    looks       what gradients are like         summary     of all ranks, in a report

What a difference means and what to do about it is `workbench.policy.consistency`'s. Standard library and torch only.
"""

from __future__ import annotations

import atexit
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.training.consistency.watch import Watch
    from workbench.training.control import Control


def install(control: Control) -> Watch | None:
    """Compare this rank with its replicas from now on, as the job's settings say; None: they say never.

    To be called before the observer's probes are put on, so that a check is no part of the optimizer's time, and before
    the program is. Needs torch.
    """
    from workbench.training.consistency import reducing, sharding
    from workbench.training.consistency import watch as watching
    from workbench.training.consistency.check import Checker
    from workbench.training.consistency.reports import Reports
    from workbench.training.observe import Observer

    settings = control.settings
    if settings.get("consistency_every", 0) < 0:
        return None

    def send(**fields: Any) -> None:
        control.send({"op": "consistency", "fields": fields})

    checker = Checker(
        Reports(control.fact, send, time.time),
        lambda: Observer.current.step if Observer.current is not None else 0,
        policy=settings.get("on_mismatch", "warn"),
        every=settings.get("consistency_every", 0),
        budget=settings.get("consistency_budget", 0.02),
    )
    watch = watching.Watch(checker)
    watching.install(watch)
    if (wish := reducing.Wish.of(settings)) is not None:
        reducing.install(watch, wish)
    sharding.install(watch, checks_reduces=wish is not None)
    atexit.register(watch.flush)
    return watch
