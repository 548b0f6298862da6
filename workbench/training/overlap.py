"""What DDP's own timers and buckets say: how long its backward waits for communication, how much of it is hidden."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from workbench.training.observe import Observer

EVERY: Final = 0.3  # s between two looks at one model; a look costs some 20 µs
NAME: Final = "all_reduce (DDP)"  # of its buckets, which it reduces outside of Python
NEVER: Final = (0.0, 0)


class Overlap:
    """Keeps `observer.exposed`, the share of the backward in which nothing is computed any more."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._looks: dict[int, tuple[float, int]] = {}  # by model: when to look again, the step when it last did

    def look(self, model: Any) -> None:
        """At the start of a forward of this DDP model, which has finished timing some earlier step."""
        now = monotonic()
        due, then = self._looks.get(id(model), NEVER)
        if now < due:
            return
        observer = self._observer
        self._looks[id(model)] = now + EVERY, observer.step
        try:
            data, steps = model._get_ddp_logging_data(), observer.step - then
            observer.exposed = exposed(data)
            share = hidden(data)
            if share is not None:
                observer.box.hidden(share)
            if steps > 0 and due:
                sizes = bucket_sizes(data)
                observer.count(NAME, steps * len(sizes), steps * sum(sizes))
            if model.device_type == "cpu":  # on a GPU reading the timers waits for it: there torch's own rate is kept
                model._set_ddp_runtime_logging_sample_rate(max(1, steps))
        except Exception as error:
            observer.fail(error)


def exposed(times: dict[str, Any]) -> float:
    """Communication after the last gradient was ready, as a share of the backward; times in ns of one step."""
    waited = max(0, times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0))
    whole = waited + times.get("backward_compute_time", 0)
    return waited / whole if whole > 0 else 0.0


def hidden(times: dict[str, Any]) -> float | None:
    """Share of the communication's time in which the backward still computes; None: nothing timed yet."""
    whole = times.get("backward_comm_time", 0)
    return min(1.0, times.get("backward_compute_comm_overlap_time", 0) / whole) if whole > 0 else None


def bucket_sizes(data: dict[str, Any]) -> list[int]:
    """Bytes of each bucket, which are reduced once a backward that synchronises: one a step, it is taken."""
    text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return [int(size) for size in text.split(",") if size.strip()]
