"""What a rank is doing and how its steps spend their time, seen without a change to its program.

The rules of counting:

- **Step**: one `step()` of the clock, which is the first optimizer that stepped. So a GAN's second optimizer, or one
  optimizer a parameter, does not count twice. Another takes over when the clock is gone, or when it has stepped twice
  since the clock last did. A step that GradScaler skips never calls the optimizer and is no step. Steps inside compiled
  code are counted when the next probe is reached.
- **Samples**: first dimension of the first tensor of each batch that a DataLoader gave and that a `backward` followed
  before that loader was asked for the next; they add up until the step (gradient accumulation). So batches of an
  evaluation, or drawn with gradients off, count nothing. Loaders read side by side add up.
- **Phases** are times of this process (a GPU's work overlaps them), each without what lies inside it: data = waiting in
  a DataLoader; forward = DDP's `forward`, else from the batch (or the last backward or step) to the backward;
  backward = the autograd engine; comm = calls of torch.distributed and `Work.wait`, and what DDP's backward waits for
  its buckets (from its own timers, looked at a few times a second, as a share of the backward); optimizer = `step()`;
  checkpoint = `torch.save`. What is left of a step is "other".
- **Detail**: while steps are shorter than `SHORT`, watching every part of each would cost more than 1 % of it. Then one
  step of `EACH` is watched whole; in the others steps, samples, data wait and calls of torch.distributed are still
  exact, and the rest is divided into forward, backward and optimizer as in the last whole one; the box does not name
  these. Of them those are **plain** in which nothing happens but one loader's batches, backwards and the clock's step.
- **Collectives** are numbered over the default group only; point-to-point calls and those of subgroups have a name but
  no number (0), since ranks differ in them.
- **Evaluation** is from the outermost `Module.eval()` to `train()` or the next step: only patience depends on it.
- One thread is watched: the one that installed, until another one takes a step of the clock, or of any optimizer while
  the clock is silent.

Watching never stops training: a probe that fails switches all of them off and says so once.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar, Final, TypeAlias

from workbench.blackbox import NO_LOSS, Activity, Writer
from workbench.training.batches import BatchSizes, usual
from workbench.training.patching import Patches

DATA, FORWARD, BACKWARD = int(Activity.DATA), int(Activity.FORWARD), int(Activity.BACKWARD)
COMM, OPTIMIZER, CHECKPOINT = int(Activity.COLLECTIVE), int(Activity.OPTIMIZER), int(Activity.CHECKPOINT)
NO_TIME: Final = [0.0] * 8  # by activity up to CHECKPOINT; from DATA on the order of a `StepRecord`
NOTHING_SAID: Final[frozenset[str]] = frozenset()
SHORT: Final = 0.003  # s
EACH: Final = 256  # of short steps one in so many is watched whole
NOBODY: Final = -1  # a thread that does not exist: every probe passes by
SILENCE: Final = 5.0  # s without a step after which another thread's optimizer moves the watch there

Frame: TypeAlias = tuple[int, int, float, float]  # activity, the one before, start, sum of all phases at the start


def nothing() -> None: ...  # as a weak reference to what is gone


class Observer:
    """Sums of the step that is being taken, and what the rank is doing.

    The probes of what each step has (`probes`) work on the fields directly. By then all of this is out of the caches:
    a call of anything that torch does not use itself costs 0.3 to 2 µs, a field or a sum next to nothing.
    """

    # Side by side in memory, what each step needs first: in a dict of so many every field would be two lines of cache.
    __slots__ = (  # noqa: RUF023
        "stepped", "is_plain", "is_trained", "iterator", "usual", "drawn", "activity", "waited", "last_said",
        "owner_id", "row", "step", "ahead", "until", "began", "samples", "batch",
        "is_whole", "is_stepping", "is_nested", "thread", "pending", "owner", "optimizer_frame", "spent", "sum",
        "shares", "base", "offset", "box", "clock", "gap", "gap_sum", "after_data", "sizes", "exposed",
        "collectives", "collective", "_counters", "patches", "others", "_paused", "said", "said_at", "is_unusual",
        "_evaluating", "_expected", "__weakref__",
    )  # fmt: skip
    current: ClassVar[Observer | None] = None  # of this process, while installed

    def __init__(self, box: Writer, offset: float, clock: Callable[[], float] = monotonic) -> None:
        self.box, self.offset, self.clock = box, offset, clock
        box.offset(offset)
        self.thread = threading.get_ident()
        # Set by compiled code, which can store an attribute but not call a probe. None: nothing seen yet.
        self.stepped: bool | None = None
        self.step = 0
        self.base = self.activity = int(Activity.RUNNING)
        self.is_whole = True  # this step is watched in all its parts
        self.is_plain = False  # it is not, and nothing has happened in it that few steps have
        self.began = 0.0  # the start of the step that is being taken
        self.spent = NO_TIME.copy()
        self.waited = 0.0  # in loaders, in a step that is not watched whole; not in `spent`
        self.sum = 0.0  # of all phases that have ended, ever
        self.gap = math.inf  # where forward begins when no DDP says so; inf: a DDP has said so
        self.gap_sum = 0.0
        self.after_data = FORWARD  # what the rank does then; not known where DDP says so
        self.optimizer_frame: Frame | None = None
        self.is_stepping = False  # an optimizer has begun its step()
        self.is_nested = False  # one has been seen that begins and ends within another's
        self.iterator = 0  # of a loader: id of the one that gave the last batch, 0 once it has ended
        self.drawn = 0  # samples of its batch, if not trained on yet
        self.usual, self.batch = 0, 0  # so many batches to come are of this size for sure
        self.pending: dict[int, int] = {}  # the same of other iterators, by id
        self.is_trained = False  # a backward has followed them
        self.samples = 0.0
        self.row = self.until = self.ahead = 0  # where brief records go, up to where, and a step minus its `head`
        self.last_said: Set[str] | None = None  # fields reported of the newest record; None once the next step began
        self.owner: Callable[[], object] = nothing  # the clock, weakly
        self.owner_id = 0  # which costs 2 µs less to ask for
        self.said_at = -EACH  # the step of the last report
        self.sizes = BatchSizes()
        self.exposed = 0.0  # share of the backward in which DDP waits for its buckets
        self.collectives = 0
        self.collective = ""  # the last one called
        self._counters: dict[str, Callable[[int, int], None]] = {}
        self.patches = Patches()
        # Forward, backward, waiting in it, optimizer of the last step watched whole, in what data and comm leave.
        self.shares = (0.0, 0.0, 0.0, 0.0)
        self.others: dict[int, int] = {}  # steps of other optimizers since the clock's last, by id
        self._paused = 0.0
        self.said: dict[str, float] = {}  # reported for the step being taken
        self.is_unusual = False  # the step being taken may take longer than others, and the box says why
        self._evaluating, self._expected = 0, 0.0

    # --- phases: `enter` gives what `leave` wants back ---

    def enter(self, activity: int) -> Frame | None:
        try:
            now = self.clock()
            if self.stepped is not False:
                self.attend(now)
            frame = (activity, self.activity, now, self.sum)
            self.activity = activity
            self.is_plain = False
            self.box.now(self.step, activity, now + self.offset)
            return frame
        except Exception as error:
            self.fail(error)
            return None

    def leave(self, frame: Frame | None) -> None:
        if frame is None:
            return
        try:
            now = self.clock()
            activity, self.activity, start, before = frame
            own = now - start - (self.sum - before)
            self.sum += own
            self.spent[activity] += own
            self.box.now(self.step, self.activity, now + self.offset)
        except Exception as error:
            self.fail(error)

    def begin_forward(self) -> Frame | None:
        """Of a DDP model: from now on it says where forward begins."""
        self.last_said = None
        self.gap = math.inf
        self.after_data = self.base
        return self.enter(FORWARD)

    def count(self, name: str, calls: int, size: int) -> None:
        """Add to what was communicated by calls of this name; `size` in bytes."""
        try:
            counter = self._counters.get(name)
            if counter is None:
                counter = self._counters[name] = self.box.counter(name)
            counter(calls, size)
        except Exception as error:
            self.fail(error)

    def begin_collective(self, name: str, numbered: bool) -> Frame | None:
        try:
            self.collectives += numbered
            self.collective = name
            self.box.collective(self.collectives if numbered else 0, name)
        except Exception as error:
            self.fail(error)
        return self.enter(COMM)

    def attend(self, now: float) -> None:
        """What is rare at the start of a phase: the first one of all, a step that compiled code took."""
        if not self.began:
            self.began = now
        if self.stepped is True:
            self.finish(now)
        self.stepped = False

    def attend_late(self) -> None:
        """At the end of a cell or of all, where no phase will start."""
        if self.thread != NOBODY and self.stepped is True:
            self.attend(self.clock())

    # --- steps ---

    def takes_over(self, optimizer: object) -> bool:
        if self.owner() is not None:
            self.is_plain = False
            count = self.others[id(optimizer)] = self.others.get(id(optimizer), 0) + 1
            if count < 2:
                return False
        self.owner, self.owner_id = weakref.ref(optimizer), id(optimizer)
        return True

    def draw(self, iterator: object, count: int) -> None:
        """A batch of `count` samples was given."""
        key = id(iterator)
        if key != self.iterator:
            if self.drawn:
                self.pending[self.iterator] = self.drawn
                self.is_plain = False
            self.pending.pop(key, None)
            self.iterator = key
        self.drawn = self.batch = count
        self.usual = usual(iterator, count)

    def learn(self) -> None:
        """The batches so far count: a backward has followed them."""
        self.is_trained = False
        self.samples += self.drawn
        self.drawn = 0
        while self.pending:
            self.samples += self.pending.popitem()[1]

    def finish(self, now: float) -> None:
        """Record the step that ends now. The clock's hook does it by itself where the step is plain."""
        if self.is_trained:
            self.learn()
        self.others.clear()
        if self.is_unusual:
            self.allow(evaluating=0, expected=0.0)
        step = self.step = self.step + 1
        samples, tokens, loss = self.samples, 0.0, NO_LOSS
        self.last_said = NOTHING_SAID
        if self.said:
            said, self.said = self.said, {}
            samples, tokens, loss = said.get("samples", samples), said.get("tokens", tokens), said.get("loss", loss)
            self.last_said = said.keys()
        duration = now - self.began if self.began else 0.0
        self.spent[DATA] += self.waited
        _, _, data, forward, backward, comm, optimizer, checkpoint = self.spent
        left = duration - data - comm - checkpoint
        if self.is_whole:
            waited = backward * self.exposed
            backward -= waited
            comm += waited
            if left > 0.0:
                self.shares = forward / left, backward / left, waited / left, optimizer / left
            self._look_at_rate()
        elif left > 0.0:
            forward, backward, waited, optimizer = (share * left for share in self.shares)
            comm += waited
        self.is_whole = duration > SHORT or not step % EACH
        self.box.record(
            step, now + self.offset, duration, data, forward, backward, comm, optimizer, checkpoint,
            samples, tokens, loss, self.base,
        )  # fmt: skip
        self.is_plain = not self.is_whole and not self.is_nested and step - self.said_at > EACH
        if self.is_plain:
            head, self.row, self.until = self.box.brief_slots(EACH)
            self.ahead = step - head
        self.spent = NO_TIME.copy()
        self.samples = self.waited = 0.0
        self.began = self.gap = now
        self.gap_sum = self.sum
        self.activity = self.base

    def _look_at_rate(self) -> None:
        """Of steps watched whole only. A tensor on a device is left alone: to read it would wait for the device."""
        groups = getattr(self.owner(), "param_groups", None)
        rate: Any = groups[0].get("lr") if groups else None
        if rate is not None and getattr(rate, "is_cpu", True):
            self.box.learning_rate(float(rate))

    def go_on_from(self, step: int) -> None:
        """So many steps are behind the state that the program has been given back."""
        self.attend_late()
        self.step, self.is_plain = step, False
        self.box.now(step, self.activity, self.clock() + self.offset)

    @property
    def is_between_backward_and_step(self) -> bool:
        """Whether gradients have been made that an optimizer is still to take."""
        self.attend_late()
        return self.thread != NOBODY and self.samples > 0.0 and self.owner() is not None

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """What is done meanwhile counts as a checkpoint's time."""
        frame = self.enter(CHECKPOINT) if self.thread == threading.get_ident() else None
        try:
            yield
        finally:
            self.leave(frame)

    # --- what the program says of itself ---

    def report(self, field: str, value: float) -> None:
        """`samples`, `tokens` or `loss` of the step just finished, if it has none yet and nothing of the next has
        begun; else of the step being taken, where samples and tokens of several reports add up.
        """
        self.said_at = self.step
        if self.last_said is not None and field not in self.last_said:
            self.last_said = {*self.last_said, field}
            self.box.amend(field, value)
            return
        self.is_plain = False
        self.said[field] = value if field == "loss" else self.said.get(field, 0.0) + value

    def allow(self, *, evaluating: int | None = None, expected: float | None = None) -> None:
        """Say, until the next step ends, that the model is evaluated, or how many seconds that step may take."""
        self._evaluating = self._evaluating if evaluating is None else evaluating
        self._expected = self._expected if expected is None else expected
        self.is_unusual = bool(self._evaluating or self._expected)
        self.is_plain = False
        self.box.patience(self._evaluating, self._expected)

    # --- the main loop of an interactive rank ---

    def rest(self, activity: Activity) -> None:
        """Between phases the rank is in `activity` from now on. A pause is not part of a step."""
        now = self.clock()
        self.attend_late()
        if activity is Activity.IDLE:
            self._paused = now
        elif self.began and self.base == Activity.IDLE:
            self.began += now - self._paused
            self.gap += now - self._paused
        self.base = self.activity = int(activity)
        # A new cell's optimizer is the clock at once.
        self.owner, self.owner_id, self.optimizer_frame, self.is_plain = nothing, 0, None, False
        self.box.now(self.step, self.base, now + self.offset)

    # --- on and off ---

    def follow(self, optimizer: object) -> bool:
        """Whether to watch from now on this other thread, in which `optimizer` steps."""
        is_clock = self.owner() is optimizer
        if self.thread == NOBODY or (not is_clock and self.began and self.clock() - self.began < SILENCE):
            return False
        self.thread = threading.get_ident()
        return True

    def fail(self, error: Exception) -> None:
        """A probe has failed: no more of them."""
        if self.thread != NOBODY:
            self.pass_by()
            sys.stderr.write(f"dtrain: this rank is no longer watched: {type(error).__name__}: {error}\n")

    def pass_by(self) -> None:
        """From now on see nothing."""
        self.thread, self.owner, self.owner_id, self.is_plain = NOBODY, nothing, 0, False

    def uninstall(self) -> None:
        """Take every probe off."""
        self.attend_late()
        self.pass_by()
        self.patches.undo()
        atexit.unregister(self._exiting)
        if Observer.current is self:
            Observer.current = None

    def _exiting(self) -> None:
        if self.thread != NOBODY:
            self.attend_late()
            self.box.now(self.step, int(Activity.EXITING), self.clock() + self.offset)


def install(box: Writer, *, offset: float) -> Observer:
    """Watch this process from now on; `offset` is seconds since the epoch minus CLOCK_MONOTONIC.

    To be called before the program is. A second call gives the observer that is there. Without torch nothing is seen.
    """
    if Observer.current is not None:
        return Observer.current
    observer = Observer(box, offset)
    Observer.current = observer
    observer.rest(Activity.RUNNING)
    atexit.register(observer._exiting)
    _pass_by_in_children(observer)
    try:
        from workbench.training import probes

        probes.install(observer)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            observer.fail(error)
    except Exception as error:
        observer.fail(error)
    return observer


def _pass_by_in_children(observer: Observer) -> None:
    """A forked child, such as a DataLoader's worker, shares the box but is not the rank."""
    known = weakref.ref(observer)

    def pass_by() -> None:
        if (shared := known()) is not None:
            shared.pass_by()

    os.register_at_fork(after_in_child=pass_by)
