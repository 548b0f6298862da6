"""What each fault does, once the rank is where it can happen. The names are those of `workbench.faults`."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from workbench.training.points import ANYWHERE, BACKWARD, BATCH, COLLECTIVE, FORWARD, WRITE, Call

if TYPE_CHECKING:
    from workbench.training.faults import Faults

NAP: Final = 0.02  # s
SLOWER: Final = 2.0  # times its own part of a step is added to it
ROOM: Final = 64 * 2**20  # bytes of address space left to a rank whose memory is to run out
BLOCK: Final = 4 * 2**20
ODD: Final = 7  # elements of an all_reduce that nobody else makes


def _always(call: Call) -> bool:
    return True


class Deed(NamedTuple):
    """`act(faults, call)` makes the call as well, or not, and gives what it gives. `points`: where; none: at once.

    `fits` says whether this call will do. `stays`: done at every such call until `continue`.
    """

    act: Callable[[Faults, Call], Any]
    points: tuple[str, ...] = ANYWHERE
    fits: Callable[[Call], bool] = _always
    stays: bool = False


class Done:
    """In place of the work of a collective that was never begun."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


# --- anywhere ---------------------------------------------------------------------------------------------------------


def _raise(faults: Faults, call: Call) -> Any:
    raise RuntimeError("exception injected on purpose")


def _exit(faults: Faults, call: Call) -> Any:
    sys.exit(1)


def _crash(faults: Faults, call: Call) -> Any:
    ctypes.string_at(0)


def _abort(faults: Faults, call: Call) -> Any:
    os.abort()


def _run_out_of_memory(faults: Faults, call: Call) -> Any:
    """Under a limit on this process' addresses, which is taken back: the machine does not feel it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    hoard: list[bytearray] = []
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + ROOM, limits[1]))
    try:
        while True:
            hoard.append(bytearray(BLOCK))
    finally:
        hoard.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)


def address_space() -> int:
    """Bytes of addresses that this process has in use."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 - as early as this nothing heavier is needed
        return int(file.read().split()[0]) * mmap.PAGESIZE


def _exhaust(faults: Faults, call: Call) -> Any:
    """Use memory until the kernel ends us, but not more than `size`: the agent has set a limit below that."""
    hoard = [b"x" * BLOCK for _ in range(faults.size // BLOCK)]
    return call.run() if hoard else None


def _hang(faults: Faults, call: Call) -> Any:
    while not faults.is_released:
        time.sleep(NAP)
    return call.run()


def _keep_the_gil(faults: Faults, call: Call) -> Any:
    re.match("(a?){60}a{60}", "a" * 60)
    return call.run()


def _slow_down(faults: Faults, call: Call) -> Any:
    """What the rank has done by itself since it last waited takes longer; what it waits for does not."""
    time.sleep(SLOWER * max(0.0, time.monotonic() - faults.at_work_since))
    try:
        faults.at_work_since = time.monotonic()
        return call.run()
    finally:
        if call.point in (BATCH, COLLECTIVE):
            faults.at_work_since = time.monotonic()


# --- in a backward, a collective, a loader, a checkpoint --------------------------------------------------------------


def _spoil(faults: Faults, call: Call) -> Any:
    """NaN flows back from the loss, and the loss itself is NaN afterwards."""
    nan = float("nan")
    losses, gradients, *rest = call.args
    made = call.plain(losses, tuple(None if g is None else g * nan for g in gradients), *rest, **call.kwargs)
    for loss in losses:
        loss.data.fill_(nan)  # by .data: what was saved for a second backward is not to complain of it
    return made


def _can_be_spoilt(call: Call) -> bool:
    return len(call.args) > 1 and all(loss.is_floating_point() for loss in call.args[0])


def _flip_parameter(faults: Faults, call: Call) -> Any:
    """Once the backward is done, so that the all-reduce has spread nothing of it."""
    made = call.run()
    flip(next(p.data for optimizer in optimizers() for p in _stepped(optimizer)))
    return made


def _flip_gradient(faults: Faults, call: Call) -> Any:
    made = call.run()
    found = next((p.grad for optimizer in optimizers() for p in _stepped(optimizer) if p.grad is not None), None)
    if found is not None:
        flip(found)
    return made


def _flip_state(faults: Faults, call: Call) -> Any:
    made = call.run()
    flip(next(_states()))
    return made


def flip(tensor: Any, element: int | None = None, bit: int | None = None) -> None:
    """One bit of one element, in place: the middle one, and of a floating point number the highest of its fraction."""
    import torch

    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    fraction = {torch.float16: 9, torch.bfloat16: 6, torch.float32: 22, torch.float64: 51}
    place = tensor.numel() // 2 if element is None else element
    which = fraction.get(tensor.dtype, 0) if bit is None else bit
    one = tensor.detach().view(-1)[place : place + 1]
    one.view(types[tensor.element_size()]).bitwise_xor_(1 << which)


def optimizers() -> list[Any]:
    """Those that replicas are compared of; where nothing is compared, all that there are."""
    from torch.optim import Optimizer

    from workbench.training.consistency.watch import Watch

    units = Watch.current.units.values() if Watch.current is not None else ()
    compared = [unit.optimizer for unit in units if unit is not None and unit.optimizer is not None]
    return compared or [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]


def _stepped(optimizer: Any) -> list[Any]:
    """Parameters with more than one element, the largest first: a bit of it is hardest to see."""
    found = [p for group in optimizer.param_groups for p in group["params"] if p.numel() > 1 and p.is_contiguous()]
    return sorted(found, key=lambda p: -p.numel())


def _states() -> Iterator[Any]:
    for optimizer in optimizers():
        for parameter in _stepped(optimizer):
            for value in optimizer.state.get(parameter, {}).values():
                if hasattr(value, "numel") and value.numel() > 1 and value.is_contiguous():
                    yield value


def _has_parameters(call: Call) -> bool:
    return any(_stepped(optimizer) for optimizer in optimizers())


def _has_state(call: Call) -> bool:
    return next(_states(), None) is not None


def _is_reduced(call: Call) -> bool:
    """This backward is followed by an all-reduce: what is changed before one is everybody's afterwards."""
    from workbench.training.consistency.watch import Watch

    models = Watch.current.models.values() if Watch.current is not None else ()
    return _has_parameters(call) and all(model.was_synced for model in models)


def _skip(faults: Faults, call: Call) -> Any:
    if call.point == COLLECTIVE:
        return unmade(call)
    model = call.args[0]
    model.require_backward_grad_sync = False
    try:
        return call.run()
    finally:
        model.require_backward_grad_sync = True


def unmade(call: Call) -> Done | None:
    """What the caller of a collective that was left out gets."""
    return Done() if call.kwargs.get("async_op") else None


def _will_synchronise(call: Call) -> bool:
    """Whether others make this collective, or DDP's of this step, as well."""
    if call.point == COLLECTIVE:
        return True
    import torch

    model = call.args[0]
    return bool(model.require_backward_grad_sync and model.training and torch.is_grad_enabled())


def _mismatch(faults: Faults, call: Call) -> Any:
    import torch

    if call.point == COLLECTIVE:
        tensor, *rest = call.args
        return call.plain(tensor.new_zeros(tensor.numel() + ODD), *rest, **call.kwargs)
    device = next(call.args[0].parameters()).device
    torch.distributed.all_reduce(torch.zeros(ODD, device=device))
    return call.run()


def _has_a_shape(call: Call) -> bool:
    if call.point == COLLECTIVE:
        return call.name == "all_reduce" and bool(call.args)
    return _will_synchronise(call)


def _put_off(faults: Faults, call: Call) -> Any:
    faults.put_off = call
    faults.want({"fault": LATE})
    return unmade(call)


def _catch_up(faults: Faults, call: Call) -> Any:
    """The other one first, then the one that was put off."""
    made = call.run()
    if faults.put_off is not None:
        faults.put_off.run()
    return made


def _fill_disk(faults: Faults, call: Call) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _kill_loader(faults: Faults, call: Call) -> str:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    iterators = [found for found in gc.get_objects() if issubclass(type(found), _MultiProcessingDataLoaderIter)]
    workers = [worker for iterator in iterators for worker in iterator._workers if worker.is_alive()]
    if not workers or workers[0].pid is None:
        raise LookupError("it has no DataLoader worker now")
    os.kill(workers[0].pid, signal.SIGKILL)
    return f"DataLoader worker {workers[0].pid}"


LATE: Final = "late"
ON_COLLECTIVES: Final = (COLLECTIVE, FORWARD)
DEEDS: Final[dict[str, Deed]] = {
    "exception": Deed(_raise),
    "exit": Deed(_exit),
    "segfault": Deed(_crash),
    "abort": Deed(_abort),
    "oom": Deed(_run_out_of_memory),
    "slow": Deed(_slow_down, (BATCH, FORWARD, BACKWARD, COLLECTIVE), stays=True),
    "hang": Deed(_hang),
    "gil": Deed(_keep_the_gil),
    "loader": Deed(_hang, (BATCH,)),
    "kill-loader": Deed(_kill_loader, ()),
    "nan": Deed(_spoil, (BACKWARD,), _can_be_spoilt),
    "flip": Deed(_flip_parameter, (BACKWARD,), _has_parameters),
    "flip-gradient": Deed(_flip_gradient, (BACKWARD,), _is_reduced),
    "flip-momentum": Deed(_flip_state, (BACKWARD,), _has_state),
    "skip": Deed(_skip, ON_COLLECTIVES, _will_synchronise),
    "mismatch": Deed(_mismatch, ON_COLLECTIVES, _has_a_shape),
    "reorder": Deed(_put_off, (COLLECTIVE,)),
    "full-disk": Deed(_fill_disk, (WRITE,)),
}
PARTS: Final[dict[str, Deed]] = {  # of others: nobody asks for them
    "exhaust": Deed(_exhaust),  # of oom-kill
    LATE: Deed(_catch_up, (COLLECTIVE, BACKWARD)),  # of reorder
}
