"""What failures say, in their own words, and what is advised: each rule speaks for something, and none for nothing."""

from __future__ import annotations

import pytest

from workbench.state import Failure, FailureKind
from workbench.views.advice import RULES, Rule, advise

CUDA = (
    "rank 3 raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
    "capacity of 79.15 GiB of which 1.03 GiB is free. Process 4242 has 78.11 GiB memory in use. at step 7"
)
PAIR = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer."
SAID = {
    CUDA: ("the memory of GPU 1 ran out: 2.00 GiB wanted, 1.03 GiB of 79.15 GiB free", "smaller batches"),
    "rank 0 raised RuntimeError: CUDA out of memory. Tried to allocate 20 MiB (GPU 0; 8 GiB total)": (
        "the rank's GPU ran out",
        "FSDP",
    ),
    "rank 1 killed by SIGKILL at step 9: out of memory (the kernel ended it; it had used up to 3.1 GiB)": (
        "memory cgroup",
        "fewer DataLoader workers",
    ),
    "rank 1 raised MemoryError at step 9: out of memory": ("ulimit", "limit"),
    "rank 1 raised RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000000 bytes.": ("ulimit", "limit"),
    "rank 2 raised RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory.": ("/dev/shm is full", "--shm-size"),
    "rank 2 killed by SIGBUS at step 3": ("/dev/shm is full", "fewer workers"),
    "rank 2 raised RuntimeError: unable to write to file </torch_12_34>: No space left on device (28) /dev/shm": (
        "/dev/shm is full",
        "fewer workers",
    ),
    "rank 0 raised RuntimeError: DataLoader worker (pid 304) is killed by signal: Killed. at step 102": (
        "worker 304 was killed by SIGKILL, mostly by the kernel for want of memory",
        "fewer workers",
    ),
    "rank 0 raised RuntimeError: DataLoader worker (pid 304) is killed by signal: Segmentation fault. ": (
        "worker 304 crashed (Segmentation fault)",
        "num_workers=0",
    ),
    "rank 0 raised RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly": (
        "worker 7, 8 ended without an exception",
        "num_workers=0",
    ),
    "rank 1 killed by SIGABRT at step 101 while in all_reduce[7 float32]: gloo::EnforceNotMet: op.preamble.length <= "
    "op.nbytes. 20 vs 8. Received data size doesn't match expected size.": ("different sizes", "drop_last"),
    f"rank 1 ended at step 5 while the others go on; rank 0 raised RuntimeError: {PAIR}": ("fewer batches", "Join"),
    "rank 0 raised RuntimeError: Expected to have finished reduction in the prior iteration before starting.": (
        "no gradient",
        "find_unused_parameters",
    ),
    "rank 0 raised RuntimeError: Timed out waiting 1800000ms for recv operation to complete": ("never", "stacks"),
    "rank 0 killed by SIGABRT: c10::DistBackendError: [PG ID 0] Watchdog caught collective operation timeout: Work": (
        "never entered",
        "timeout",
    ),
    "rank 0 did not start: port 29500 is in use: Address already in use": ("rendezvous port", "--master-port"),
    f"rank 0 raised RuntimeError: {PAIR}": ("another rank went away", "logs"),
    "rank 0 raised RuntimeError: CUDA error: device-side assert triggered": ("out of range", "CUDA_LAUNCH_BLOCKING"),
    "rank 5 raised RuntimeError: CUDA error: invalid device ordinal": ("not given", "LOCAL_RANK"),
    "rank 0 raised DistBackendError: NCCL error in: ncclSystemError": ("network interface", "NCCL_DEBUG"),
    "rank 1: loss is not finite at step 12": ("learning rate", "--on-nan rollback"),
    "rank 0 raised OSError: [Errno 28] No space left on device": ("the disk is full", "checkpoint_keep"),
    "rank 0 raised OSError: [Errno 24] Too many open files": ("open files", "ulimit -n"),
    "rank 0 raised ModuleNotFoundError: No module named 'timm.models'": ("timm.models is not installed", "--python"),
    "rank 1 killed by SIGKILL at step 4: on purpose": ("injected", "resume"),
    "rank 1 killed by SIGSEGV at step 4: in train.py:10 in <module>": ("native code", "stack"),
    "rank 1 killed by SIGKILL at step 4": ("somebody outside", "memory"),
    "rank 1 exited with code 1 at step 4": ("sys.exit", "log"),
    "rank 1 ended at step 4: lost with its zygote": ("forked from", "again"),
    "the pool's scheduler went away at step 7; the ranks ended with it": ("killed", "dtrain up"),
    "the pool's scheduler died after step 7; the ranks ended with it": ("another one", "--max-restarts"),
    "the pool's scheduler died, for the 4th time within 5 minutes, and is not started again": ("again", "dtrain up"),
    "rank 1 was lost with its worker tls://10.0.0.1:4": ("host", "worker.log"),
}


def failure(reason: str) -> Failure:
    return Failure(kind=FailureKind.EXCEPTION, rank=1, reason=reason, time=1.0)


@pytest.mark.parametrize("reason", SAID)
def test_what_is_advised(reason: str) -> None:
    advice = advise(failure(reason))
    assert advice is not None
    cause, what = SAID[reason]
    assert cause in advice.cause and what in advice.advice
    assert advice.remedy() == [f"likely cause: {advice.cause}", f"what to do: {advice.advice}"]
    assert advice.lines() == [reason, *advice.remedy()]


def test_every_rule_is_reached() -> None:
    reached = {finding.remedy()[0][:40] for reason in SAID if (finding := advise(failure(reason)))}
    assert len(reached) >= len(RULES) - 1, "two rules of one cause at most"


def test_nothing_is_said_of_a_programs_own_errors() -> None:
    for error in ("ValueError: bad batch", "AssertionError", "KeyError: 'lr'"):
        assert advise(failure(f"rank 2 raised {error} at step 410")) is None


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.is_for_ended], ids=lambda rule: rule.cause[:24])
def test_what_only_gets_a_job_going_again_is_not_advised_to_one_that_goes_on(rule: Rule) -> None:
    (reason,) = (text for text in SAID if (known := advise(failure(text))) and known.advice == rule.advice)
    advice = advise(failure(reason), has_ended=False)
    assert advice is not None and advice.cause and not advice.advice


def test_no_advice_to_start_something_again_is_for_a_job_that_goes_on() -> None:
    again = ("resume the job", "start the job", "start the pool")
    assert [rule.is_for_ended for rule in RULES] == [any(map(rule.advice.count, again)) for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern[:24])
def test_sentences_have_no_full_stop_and_fit_a_screen(rule: Rule) -> None:
    for text in (rule.cause, rule.advice):
        assert text and not text.endswith(".") and len(text) < 200
