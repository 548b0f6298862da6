"""What usually lies behind a failure, and what to do about it: a table of what failures say.

The first rule whose pattern is found in the failure's reason speaks. A rule is a guess from words, and says so: the
failure itself, its rank and its step are facts and stand before it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from workbench.findings import Finding, Severity
from workbench.state import Failure
from workbench.views.job import JobView


class Rule(NamedTuple):
    """`cause`: what it mostly comes of, perhaps with the pattern's groups: `{0}`. `advice`: the next thing to do.

    `is_for_ended`: all that it does is to get the job going again.
    """

    pattern: str
    cause: str
    advice: str
    is_for_ended: bool = False


def advise(failure: Failure, *, has_ended: bool = True) -> Finding | None:
    """None where nothing better is known than what the failure says itself.

    `has_ended`: the job did, of this failure; to one that goes on nothing is advised that it does by itself.
    """
    for rule in RULES:
        if found := re.search(rule.pattern, failure.reason, re.DOTALL):
            cause = rule.cause.format(*found.groups())
            advice = rule.advice if has_ended or not rule.is_for_ended else ""
            return Finding(
                symptom=failure.reason, cause=cause, advice=advice, severity=Severity.ERROR, rank=failure.rank
            )
    return None


def advise_on(view: JobView) -> Finding | None:
    """What is advised as the job stands with its failure now."""
    if view.failure is None:
        return None
    return advise(view.failure, has_ended=view.phase.is_terminal and not view.has_recovered)


LESS_MEMORY: Final = "take smaller batches, accumulate gradients, recompute activations, or shard the model (FSDP)"
RULES: Final = (
    # --- memory ---
    Rule(
        r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) "
        r"of which ([\d.]+ \w+) is free",
        "the memory of GPU {1} ran out: {0} wanted, {3} of {2} free",
        LESS_MEMORY,
    ),
    Rule(
        r"CUDA out of memory(?:\. Tried to allocate ([\d.]+ \w+))?", "the memory of the rank's GPU ran out", LESS_MEMORY
    ),
    Rule(
        r"out of memory \(the kernel ended (?:it|the worker)",
        "the host, or the memory cgroup of the pool, had no memory left and the kernel chose this process",
        "take smaller batches or fewer DataLoader workers, keep less in every rank, or raise the limit",
    ),
    Rule(
        r"MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc",
        "the rank asked for more memory than its limits allow (ulimit -v, or the system's overcommit limit)",
        "take smaller batches, keep less in every rank, or raise the limit",
    ),
    Rule(
        r"Bus error|SIGBUS|(?:shared memory|/dev/shm|torch_shm|shm_open).*(?:No space left|\(28\))|"
        r"(?:No space left|\(28\)).*(?:shared memory|/dev/shm)",
        "/dev/shm is full: DataLoader workers need more shared memory",
        "give it more (docker run --shm-size=8g), use fewer workers, or "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    # --- data ---
    Rule(
        r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\).* is killed by signal: Killed",
        "DataLoader worker {0} was killed by SIGKILL, mostly by the kernel for want of memory: each worker has its own "
        "copy of what the dataset keeps as Python objects",
        "use fewer workers or less prefetching, or keep the data in tensors or files",
    ),
    Rule(
        r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\).* is killed by signal: ([\w ]+)",
        "DataLoader worker {0} crashed ({1}) in native code that the dataset calls",
        "run once with num_workers=0: the stack then is the rank's own",
    ),
    Rule(
        r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) exited unexpectedly",
        "DataLoader worker {0} ended without an exception: killed from outside, mostly for want of memory, or by an "
        "exit that the dataset's code calls",
        "look for kills in the kernel's log, and run once with num_workers=0",
    ),
    # --- ranks against each other ---
    Rule(
        r"ranks disagree on collective|rank \d+ (?:entered|skipped)|EnforceNotMet.*preamble|Received data size doesn't",
        "ranks met in collectives of different sizes or kinds; the one that gloo ended need not be the one at fault",
        "compare the ranks' shapes and steps: a last batch that is shorter (drop_last=True), a rank that skipped a "
        "step, parameters that differ",
    ),
    Rule(
        r"while the others go on",
        "it had fewer batches than the others, or left its loop early",
        "give all ranks as many steps: DistributedSampler, drop_last=True, or torch.distributed.algorithms.Join",
    ),
    Rule(
        r"Expected to have finished reduction in the prior iteration",
        "parameters got no gradient in a step, so DDP waits for them",
        "use every parameter in every step, or DistributedDataParallel(find_unused_parameters=True)",
    ),
    Rule(
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms",
        "another rank never entered this collective, or is much slower",
        "look at the stacks of the rank that is not in it (%dtrain stacks), or raise init_process_group's timeout",
    ),
    Rule(
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process listens on the rendezvous port",
        "leave --master-port out: the pool then takes a free one",
    ),
    Rule(
        r"Connection closed by peer|Connection reset by peer|remote process exited",
        "another rank went away and left no word of its own",
        "look at the ends of the other ranks' logs",
    ),
    # --- devices ---
    Rule(
        r"device-side assert",
        "an index is out of range in a GPU kernel, mostly a label or a token outside the model's range",
        "run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see which line it is",
    ),
    Rule(
        r"invalid device ordinal",
        "the rank asks for a GPU that it was not given",
        "use torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and as many ranks as there are GPUs",
    ),
    Rule(
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
        "NCCL could not talk to a device or a network interface",
        "run once with --env NCCL_DEBUG=WARN and read the ranks' logs",
    ),
    # --- numbers ---
    Rule(
        r"is not finite",
        "the learning rate is too high, half precision overflowed, or a batch holds such values",
        "clip gradients or lower the learning rate, check that batch, or go back with --on-nan rollback",
    ),
    # --- disk and files ---
    Rule(
        r"No space left on device|ENOSPC",
        "the disk is full",
        "free space, write elsewhere, or keep fewer checkpoints (checkpoint_keep)",
    ),
    Rule(
        r"Too many open files",
        "the rank's limit of open files is reached, mostly by tensors that DataLoader workers share",
        "raise ulimit -n before the pool starts, or torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    Rule(
        r"No module named '([\w.]+)'",
        "{0} is not installed for the ranks' interpreter, or does not lie in their working directory",
        "install it there, or say --python or --cwd",
    ),
    # --- ends that say little ---
    Rule(r"on purpose", "somebody injected this fault", "resume the job", is_for_ended=True),
    Rule(
        r"killed by SIG(?:SEGV|ILL|FPE|ABRT)",
        "native code crashed, in an extension or in torch itself",
        "see which call the stack names; run once without that extension, or with torch's CPU build",
    ),
    Rule(
        r"killed by SIG(?:KILL|TERM|HUP|INT)",
        "somebody outside ended it: an operator, a batch system at its limit, or a container at its memory limit",
        "see who sends signals there; more memory, if that is the limit",
    ),
    Rule(
        r"exited with code",
        "the program called sys.exit or os._exit itself",
        "its log says why, if anything does",
    ),
    Rule(
        r"lost with its zygote",
        "the process that ranks are forked from was killed, mostly for want of memory",
        "start the job again: there is a new one",
        is_for_ended=True,
    ),
    Rule(
        r"scheduler went away",
        "the pool's scheduler was killed, or the machine went down",
        "start the pool again (dtrain up), then resume the job (dtrain resume)",
        is_for_ended=True,
    ),
    Rule(
        r"scheduler died.*is not started again",
        "something kills the pool's scheduler again and again, or it crashes",
        "see scheduler.log in the pool's folder; start the pool again (dtrain up), then resume the job (dtrain resume)",
        is_for_ended=True,
    ),
    Rule(
        r"scheduler died",
        "the pool's scheduler was killed, or crashed; there is another one",
        "resume the job (dtrain resume); with --max-restarts it goes on by itself",
        is_for_ended=True,
    ),
    Rule(
        r"lost with its worker",
        "the worker's process or its host went away",
        "see the host, and worker.log in the pool's folder",
    ),
)
