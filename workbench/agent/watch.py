"""Looks at the ranks' black boxes ten times a second, and tells what is new in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from workbench import blackbox
from workbench.agent.loop import Loop
from workbench.agent.processes import RankProcess
from workbench.agent.usage import Devices, DeviceUsage, Usage, process_state, tree_usage
from workbench.blackbox import Activity, Snapshot
from workbench.telemetry import RankBeat

LOOK_EVERY: Final = 0.1
BEAT_EVERY: Final = 0.5
USAGE_EVERY: Final = 1.0
TICK: Final = 0.3  # s that a look adds at most to a rank's age: a machine that was suspended has not hung
NOTICED: Final = 0.25  # s of standing still that are told once they are over
# To begin or to end one of these is told at once; the others come and go many times a second.
LONG: Final = (Activity.STARTING, Activity.CHECKPOINT, Activity.IDLE, Activity.CELL, Activity.EXITING)
PHASES: Final = (Activity.FORWARD, Activity.BACKWARD, Activity.COLLECTIVE, Activity.OPTIMIZER)

NOTHING: Final = Usage(0, 0.0)


@dataclass
class Pulse:
    """What was last told of one rank, and what its processes used then."""

    beat_at: float = float("-inf")
    usage_at: float = float("-inf")
    activity: Activity = Activity.STARTING
    usage: Usage = NOTHING
    cpu: float = 0.0
    disk: tuple[float, float] | None = None  # bytes/s read and written
    device: DeviceUsage | None = None
    seen: bytes = b""  # the box's fingerprint
    looked_at: float | None = None
    age: float = 0.0
    standing: str = ""  # what it was doing when it was last looked at
    gap: float = 0.0
    gap_in: str = ""

    def look(self, seen: bytes, snapshot: Snapshot, now: float) -> None:
        """Note whether the rank has got on."""
        if self.looked_at is not None:
            self.age += min(now - self.looked_at, TICK)
        self.looked_at = now
        if seen != self.seen:
            if self.age > max(self.gap, NOTICED):
                self.gap, self.gap_in = self.age, self.standing
            self.seen, self.age = seen, 0.0
        self.standing = _standing(snapshot)


def _standing(snapshot: Snapshot) -> str:
    """What a pause that begins now is to be called: before the first step compilers and peers take their time."""
    if snapshot.is_evaluating:
        return "EVALUATION"
    is_first = not snapshot.head and snapshot.activity in (Activity.RUNNING, *PHASES)
    return Activity.STARTING.name if is_first else snapshot.activity.name


class Watch:
    """All in the loop's thread. `gpus` names the device of each slot."""

    def __init__(
        self, loop: Loop, ranks: Mapping[tuple[str, int], RankProcess], gpus: tuple[str, ...], devices: Devices
    ) -> None:
        self._loop, self._ranks, self._gpus, self._devices = loop, ranks, gpus, devices
        self._pulses: dict[RankProcess, Pulse] = {}
        self._is_ticking = False

    def begin(self) -> None:
        """There are ranks to look at; ends of itself when there are none."""
        if not self._is_ticking:
            self._is_ticking = True
            self._loop.call_at(self._loop.now() + LOOK_EVERY, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        living = [process for process in self._ranks.values() if process.pid]
        self._pulses = {process: self._pulses.get(process) or Pulse() for process in living}
        self.look(living, self._loop.now())
        if self._ranks:
            self.begin()

    def look(self, living: Iterable[RankProcess], now: float) -> None:
        for process in living:
            assert process.box is not None
            process.report_steps()
            pulse, snapshot = self._pulses[process], blackbox.read_header(process.box)
            pulse.look(blackbox.fingerprint(process.box), snapshot, now)
            has_turned = snapshot.activity is not pulse.activity and {snapshot.activity, pulse.activity} & set(LONG)
            if has_turned or now - pulse.beat_at >= BEAT_EVERY:
                self._beat(process, pulse, snapshot, now)

    def _beat(self, process: RankProcess, pulse: Pulse, snapshot: Snapshot, now: float) -> None:
        pulse.beat_at, pulse.activity = now, snapshot.activity
        if now - pulse.usage_at >= USAGE_EVERY:
            self._measure(process, pulse, now)
        process.emit(
            RankBeat(
                job_id=process.plan.command.job_id,
                restart_count=process.plan.command.restart_count,
                rank=process.rank,
                time=self._loop.wall(),
                step=snapshot.step,
                activity=snapshot.activity.name,
                since=max(0.0, process.offset + now - snapshot.since) if snapshot.since else 0.0,
                collective=snapshot.collective,
                collective_seq=snapshot.collective_seq,
                rss=pulse.usage.rss,
                cpu=pulse.cpu,
                disk_read=pulse.disk[0] if pulse.disk else None,
                disk_write=pulse.disk[1] if pulse.disk else None,
                gpu=pulse.device.busy if pulse.device else None,
                gpu_memory=pulse.device.memory if pulse.device else None,
                progress=snapshot.progress,
                age=pulse.age,
                gap=pulse.gap,
                gap_in=pulse.gap_in,
                is_evaluating=snapshot.is_evaluating,
                expected=snapshot.expected,
                counted=snapshot.head,
                hidden=snapshot.hidden,
                traffic=snapshot.traffic,
                state=process_state(process.pid) if pulse.age > NOTICED else "",
            )
        )
        pulse.gap, pulse.gap_in = 0.0, ""

    def pulse(self, process: RankProcess) -> Pulse:
        """What is known of this rank now."""
        return self._pulses.get(process) or Pulse()

    def _measure(self, process: RankProcess, pulse: Pulse, now: float) -> None:
        usage = tree_usage(process.pid)
        if pulse.usage.rss:
            # A worker process that has ended takes its CPU time with it.
            took = now - pulse.usage_at
            pulse.cpu = 100.0 * max(0.0, usage.cpu - pulse.usage.cpu) / took
            pulse.disk = (
                max(0, usage.read - pulse.usage.read) / took,
                max(0, usage.written - pulse.usage.written) / took,
            )
        pulse.usage, pulse.usage_at = usage, now
        if self._gpus:
            pulse.device = self._devices.usage(self._gpus[process.plan.placement.slot % len(self._gpus)])
