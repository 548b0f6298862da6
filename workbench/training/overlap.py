"""How long DDP's backward waits for its buckets: from DDP's own timers, of one step now and then."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from workbench.training.observe import Observer

EVERY: Final = 0.3  # s between two looks; a look costs some 20 µs


class Overlap:
    """Keeps `observer.exposed`, the share of the backward in which nothing is computed any more."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._next = 0.0
        self._steps = 0  # when it looked last

    def look(self, model: Any) -> None:
        """At the start of a forward of this DDP model, which has finished timing some earlier step."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        try:
            self._observer.exposed = exposed(model._get_ddp_logging_data())
            if model.device_type == "cpu":  # on a GPU reading the timers waits for it: there torch's own rate is kept
                steps, self._steps = self._observer.step - self._steps, self._observer.step
                model._set_ddp_runtime_logging_sample_rate(max(1, steps))
        except Exception as error:
            self._observer.fail(error)


def exposed(times: dict[str, Any]) -> float:
    """Communication after the last gradient was ready, as a share of the backward; times in ns of one step."""
    waited = max(0, times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0))
    whole = waited + times.get("backward_compute_time", 0)
    return waited / whole if whole > 0 else 0.0
