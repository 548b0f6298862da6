"""All-reduces of 100 kB with something on and off by turns; rank 0 writes `plain extra` (s each) to the file argv[1].

argv[2]: `naming`, what the black box is told of each collective, or `watching`, all probes. Both ranks change at the
same block. A block's time is its fastest half's mean: others use the machine as well.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from workbench.training import communication, observe

Switch = Callable[[bool], None]
BLOCKS, EACH = 120, 40


def block(data: torch.Tensor) -> float:
    times = []
    for _ in range(EACH):
        start = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - start)
    return statistics.fmean(sorted(times)[: EACH // 2])


def watching(observer: observe.Observer) -> Switch:
    box, offset = observer.box, observer.offset

    def switch(is_on: bool) -> None:
        if is_on:
            observe.install(box, offset=offset)
        elif (current := observe.Observer.current) is not None:
            current.uninstall()

    return switch


def naming(observer: observe.Observer) -> Switch:
    observer.uninstall()
    plain, texts = observe.Observer.begin_collective, communication.describe
    installed = []

    def unnamed(self: observe.Observer, name: str, numbered: bool) -> object:
        return self.enter(observe.COMM)

    def switch(is_on: bool) -> None:
        if installed:
            installed.pop().uninstall()
        observe.Observer.begin_collective = plain if is_on else unnamed
        communication.describe = texts if is_on else lambda name, args, kwargs: name
        installed.append(observe.install(observer.box, offset=observer.offset))

    return switch


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = torch.ones(25_000)
    observer = observe.Observer.current
    assert observer is not None
    switch = {"watching": watching, "naming": naming}[sys.argv[2]](observer)
    plain, extra = [], []
    for number in range(BLOCKS):
        found = {}
        for is_on in (True, False) if number % 2 else (False, True):
            switch(is_on)
            block(data)
            found[is_on] = block(data)
        plain.append(found[False])
        extra.append(found[True] - found[False])
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{statistics.median(plain)!r} {statistics.median(extra)!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
