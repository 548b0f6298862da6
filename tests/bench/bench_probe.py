"""What watching costs a step: the same loop of about 1 ms with and without the observer, by turns, in one process.

The bar: 10 µs a step, which is 1 % of a step of 1 ms.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

BLOCKS = int(os.environ.get("BENCH_ROUNDS", "100"))  # of each kind
STEPS = 64  # a block
BAR = 10.0  # µs


def main() -> list[tuple[str, str, str]]:
    """Rows of (what, measured, bar)."""
    import torch

    torch.set_num_threads(1)
    plain, extra = _pairs(_Loop(torch, width=320))
    small, small_extra = _pairs(_Loop(torch, width=8))
    bar = f"≤ {BAR:.0f} µs"
    return [
        ("step, not watched, median", f"{plain * 1e6:.0f} µs", "about 1 ms"),
        ("watched − not watched, median of pairs", f"{extra * 1e6:.1f} µs", bar),
        ("share of the step", f"{extra / plain:.2%}", "≤ 1 %"),
        ("the same in the smallest step", f"{small_extra * 1e6:.1f} of {small * 1e6:.0f} µs", bar),
    ]


class _Loop:
    """A training loop with everything that is watched in one process: loader, backward, optimizer, `report`."""

    def __init__(self, torch: Any, width: int) -> None:
        from workbench.training import Run

        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(STEPS * 32, 64), torch.randint(0, 10, (STEPS * 32,)))
        self.loader = torch.utils.data.DataLoader(data, batch_size=32)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss = torch.nn.CrossEntropyLoss()
        self.run = Run

    def block(self) -> float:
        """Seconds a step, of processor time: what others do on the machine is not counted."""
        start = time.thread_time()
        for inputs, targets in self.loader:
            self.optimizer.zero_grad()
            self.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
        return (time.thread_time() - start) / STEPS


def _pairs(loop: _Loop) -> tuple[float, float]:
    """Median step without, and median of the differences of neighbouring blocks; the order alternates."""
    from workbench import blackbox
    from workbench.training import observe

    buffer = bytearray(blackbox.SIZE)
    blackbox.format_box(buffer)
    box = blackbox.Writer(buffer)

    def watched() -> float:
        observer = observe.install(box, offset=0.0)
        try:
            loop.block()  # Python adapts its code to what was just exchanged
            return loop.block()
        finally:
            observer.uninstall()

    def unwatched() -> float:
        loop.block()
        return loop.block()

    unwatched()
    watched()
    plain, extra = [], []
    for number in range(BLOCKS):
        first, second = (watched, unwatched) if number % 2 else (unwatched, watched)
        one, two = first(), second()
        without, with_it = (two, one) if number % 2 else (one, two)
        plain.append(without)
        extra.append(with_it - without)
    assert blackbox.read_header(buffer).head == STEPS * 2 * (BLOCKS + 1), "not every step was counted"
    return statistics.median(plain), statistics.median(extra)


if __name__ == "__main__":
    for row in main():
        print("  ".join(row))
