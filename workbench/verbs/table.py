"""Every verb with its options: the one table that the magic, the command line, the help and completion read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from workbench.errors import UsageError
from workbench.faults import FAULTS
from workbench.verbs import about, checkpoints, dashboard, jobs, launch, output, pools, read, replay, story, watch
from workbench.verbs.context import Context
from workbench.verbs.declare import COMMON, HELP, JOB, JSON, QUIET, WHERE, Arguments, Operand, Option, Outcome, Verb
from workbench.verbs.help import overview, verb_help
from workbench.verbs.keep import SAVED
from workbench.verbs.parse import nearest, parse
from workbench.verbs.shown import Text

_NAMED: Final = (
    Option(("--pool", "--name"), "the pool's name", "NAME", named="pool", offers="pool"),
    Option(("--address",), "a cluster of your own: its scheduler's address, or its scheduler file", "ADDRESS"),
    JSON,
    QUIET,
    HELP,
)
_SLOTS: Final = Option(("-n", "--slots"), "slots; left out: one a GPU, else one a core", "SLOTS", read.count)
_RANKS: Final = Option(
    ("-r", "--rank", "--ranks"), "only these ranks, such as 1 or 0,2 or 0-3", "RANKS", read.ranks, named="rank"
)
_WAIT: Final = Option(("--wait",), "follow the job to its end; Ctrl-C ends the waiting, not the job")


def _fault(text: str) -> str:
    if text not in FAULTS:
        raise ValueError(f"one of {', '.join(FAULTS)}")
    return text


def _shell(text: str) -> str:
    if text not in ("bash", "zsh"):
        raise ValueError("bash or zsh")
    return text


LAUNCH_OPTIONS: Final = (
    Option(("-m", "--module"), "run a module, as python -m does, in place of SCRIPT", "MODULE"),
    Option(("-i", "--interactive"), "ranks that wait for cells, in place of SCRIPT"),
    Option(
        ("-n", "--nproc-per-node"),
        "ranks a node; left out, or auto: one on every slot",
        "N",
        read.nproc,
        named="nproc_per_node",
    ),
    Option(("--nnodes",), "nodes (default 1); MIN:MAX for an elastic job", "N", read.nodes),
    Option(("--min-ranks",), "go on with so many ranks when there are no slots for all", "N", read.count),
    Option(
        ("--max-restarts",),
        "how often a failed job is started again without getting further (default 0)",
        "N",
        read.whole,
    ),
    Option(
        ("--snapshot-every",),
        "steps between two copies of the state in memory, or off (default auto: at most 3 % of the time)",
        "N",
        read.pace,
    ),
    Option(
        ("--on-nan",),
        "when a reported loss is not finite: warn, stop, or rollback to a checkpoint before it (default warn)",
        "WHAT",
        read.nan_policy,
        offers="nan",
    ),
    Option(
        ("--on-mismatch",),
        "when ranks differ: warn, stop, repair from the majority, or rollback to a checkpoint where they agreed",
        "WHAT",
        read.mismatch_policy,
        offers="mismatch",
    ),
    Option(
        ("--consistency-every",),
        "steps between two checks that ranks agree, or off (default auto: as the budget allows)",
        "N",
        read.checks,
    ),
    Option(("--consistency-budget",), "what checks may cost of a step's time (default 2%)", "SHARE", read.share),
    Option(("--check-reduce",), "checksums travel with each all-reduce of DDP, which is done again when it went wrong"),
    Option(("--bitwise",), "the same in a collective of their own: training is the same, bit for bit"),
    Option(("--exact-reduce",), "all-reduce gradients as integers: the same bits for any order of ranks and buckets"),
    Option(("--name",), "what the job's id begins with (default: the program's name)", "NAME"),
    Option(("--env",), "an environment variable of the ranks", "KEY=VALUE", read.setting, repeats=True),
    Option(("--cwd",), "the ranks' working directory (default: this one)", "DIR", offers="dir"),
    Option(("--python",), "another interpreter for the ranks", "PATH", offers="file"),
    Option(("--cold",), "fresh interpreters, in place of forks from the warm zygote"),
    Option(("--preload",), "installed modules that the zygote imports as well", "A,B", read.names),
    Option(("--backend",), "gloo, nccl, … (default: nccl where the ranks have GPUs, else gloo)", "NAME"),
    Option(("--master-port",), "the rendezvous port (default: a free one)", "PORT", read.whole),
    Option(("--max-steps",), "end well after so many optimizer steps", "N", read.count),
    Option(("--seed",), "seed random, numpy and torch of every rank", "N", read.integer),
    Option(
        ("--deterministic",),
        "the same bits each time: deterministic kernels, fixed seeds (0 unless --seed says another), threads, bucket "
        "layout and order of sets; costs what those kernels cost, and a pass over memory that torch.empty gives",
    ),
    Option(("--startup-timeout",), "how long ranks may take to start (default 5m)", "TIME", read.seconds),
    Option(
        ("--progress-timeout",),
        "how long the job may stand still (default: learned from its own steps)",
        "TIME",
        read.seconds,
    ),
    Option(("--stop-grace",), "how long a rank has between SIGTERM and SIGKILL (default 10s)", "TIME", read.seconds),
    Option(
        ("--checkpoint-every",),
        "steps, or a time, between two checkpoints of a script that uses Run.steps",
        "N|TIME",
        read.steps_or_seconds,
    ),
    Option(("--checkpoint-dir",), "where they lie (default: the job's own folder)", "DIR", offers="dir"),
    Option(("--checkpoint-keep",), "how many of the newest are kept (default 3)", "N", read.count),
    Option(("--checkpoint-keep-every",), "and each whose step is a multiple of N (default: none)", "N", read.whole),
    Option(("--log-limit",), "how much of a rank's output is kept (default 512M)", "SIZE", read.size),
    _WAIT,
    *COMMON,
)


def show_help(context: Context, args: Arguments) -> Outcome:
    """Of one verb, or all in a line each."""
    if args.verb_name:
        words = [args.verb_name, *filter(None, [args.second])]
        return Outcome(text=verb_help(find_verb(words)[0], context.prefix))
    return Outcome(text=f"usage: {context.prefix} VERB [options]\n\n{overview(VERBS, context.prefix)}")


VERBS: Final[tuple[Verb, ...]] = (
    Verb(
        "up", "start the pool of this machine, or find it running", pools.start,
        options=(_SLOTS, *_NAMED), examples=("up", "up -n 4", "up --name night -n 2"), aliases=("pool start",),
        notes="The pool's processes outlive the notebook or shell that started them; dtrain down ends them.",
        is_act=True,
    ),
    Verb(
        "down", "stop the pool, with all its jobs", pools.stop,
        options=_NAMED, examples=("down", "down --name night"), aliases=("pool stop",), is_act=True,
    ),
    Verb(
        "pool", "show the pool's workers, slots and jobs; exit code 1 when it does not run", pools.status,
        options=_NAMED, examples=("pool", "pool status --json", "pool start -n 4", "pool stop", "pool list"),
        aliases=("pool status",), notes="pool start is up, pool stop is down.",
    ),
    Verb(
        "pool list", "list this machine's pools", pools.listing,
        options=(JSON, QUIET, HELP), examples=("pool list",),
    ),
    Verb(
        "launch", "start a job: a script, a module, or ranks that wait for cells", launch.launch,
        operands=(Operand("SCRIPT", "the program, as in python SCRIPT", offers="script"),),
        options=LAUNCH_OPTIONS, takes_program=True,
        notes="With DTRAIN_NOTIFY in the environment, a command or an http(s) address, failures, recoveries and ends "
        "are told there as JSON; it is kept in no record, as it may hold a secret.",
        examples=(
            "launch train.py --nproc-per-node 4 -- --lr 0.1",
            "launch -n 4 train.py --lr 0.1",
            "launch -m package.train -n 2 --max-restarts 3 --wait",
            "launch --interactive -n 2",
        ),
    ),
    Verb(
        "jobs", "list jobs, newest first", jobs.listing,
        options=(
            Option(("--phase",), "only jobs in that phase", "PHASE", read.phase, offers="phase"),
            Option(("--limit",), f"at most that many (default {jobs.LIMIT})", "N", read.count),
            Option(("--all",), "all of them"),
            *COMMON,
        ),
        examples=("jobs", "jobs --phase FAILED --limit 5"),
    ),
    Verb(
        "status", "show where a job stands, by rank, the slowest marked", jobs.status,
        operands=(JOB,), options=COMMON, examples=("status", "status train-1f2e --json"),
    ),
    Verb(
        "timeline", "show a job's attempts, failures and recoveries, what every rank did when", story.timeline,
        operands=(JOB,), options=COMMON, examples=("timeline", "timeline train-1f2e --json"),
        notes="goodput: time of steps that count / time since the first step began. ETTR: the same time / all "
        "time since the job was submitted. Steps that a script has back from a checkpoint of its own count as lost.",
    ),
    Verb(
        "attach", "make a job the current one; in a shell show all its output, then what comes", output.attach,
        operands=(JOB,), options=COMMON, examples=("attach train-1f2e",),
    ),
    Verb(
        "wait", "wait for a job's end; interrupting it ends the waiting, never the job", watch.wait,
        operands=(JOB,),
        options=(Option(("--timeout",), "wait at most that long", "TIME", read.seconds), *COMMON),
        examples=("wait", "wait train-1f2e --timeout 5m"),
    ),
    Verb(
        "top", "watch a job until it ends", watch.top,
        operands=(JOB,), options=COMMON, examples=("top",),
    ),
    Verb(
        "dashboard", "open the live pages, of all jobs, one, or a saved session; in a notebook in the cell",
        dashboard.dashboard,
        operands=(
            Operand(
                "JOB|FILE", "a job's id or the beginning of it, a saved session, or FILE:JOB; left out: all jobs",
                named="job", offers="job|session",
            ),
        ),
        options=(
            Option(("--read-only",), "a link whose pages show and never act"),
            Option(("--no-browser",), "only say the link"),
            Option(("--port",), "listen on that port of 127.0.0.1 (default: a free one)", "PORT", read.port),
            *COMMON,
        ),
        notes=(
            "From another machine: ssh -L PORT:127.0.0.1:PORT HOST, then the same link. The pages of a saved session "
            "need no pool, show and never act; in a shell they end with Ctrl-C."
        ),
        examples=("dashboard", "dashboard train-1f2e --read-only --no-browser", "dashboard run.dtrain"),
    ),
    Verb(
        "logs", "show what the ranks printed", output.logs,
        operands=(JOB,),
        options=(
            _RANKS,
            Option(("--tail",), f"the last N lines (default {output.DEFAULT_TAIL})", "N", read.whole),
            Option(("--grep",), "only lines with that text in them", "TEXT"),
            Option(("-f", "--follow"), "go on with what comes"),
            *COMMON,
        ),
        examples=("logs -r 1 --tail 50 --grep loss -f", "logs train-1f2e"),
    ),
    Verb(
        "replay-check", "run a few steps of a program twice, and once with slots swapped: same bits?", replay.check,
        operands=(
            Operand("JOB|SCRIPT", "a job, whose program is run, or a script", named="script", offers="job|script"),
        ),
        options=(
            Option(("--steps",), "optimizer steps of each run (default 5)", "K", read.count),
            *(option for option in LAUNCH_OPTIONS if option.key in (*replay.FIELDS, "module", "nnodes", "env")),
            Option(("--timeout",), "how long each run may take (default 10m)", "TIME", read.seconds),
            *COMMON,
        ),
        takes_program=True,
        examples=("replay-check", "replay-check train.py -n 4 -- --lr 0.1", "replay-check train-1f2e --deterministic"),
        notes="Compares every module's output, losses, gradients and parameters, and names the first that differs, "
        "with its likely cause. Run 2 is in fresh interpreters. With slots swapped each rank keeps its number, data "
        "and seed, and computes where the next one did. Each run is a job of its own that ends after the steps; what "
        "the program itself writes in them, it writes. Exit code 1 when bits differ.",
    ),
    Verb(
        "checkpoints", "list a job's checkpoints, with what is wrong with those that cannot be used",
        checkpoints.listing, operands=(JOB,),
        options=(Option(("--verify",), "read every byte of them first"), *COMMON),
        examples=("checkpoints", "checkpoints train-1f2e --verify --json"),
    ),
    Verb(
        "stacks", "show every rank's Python stack", jobs.stacks,
        operands=(JOB,), options=(_RANKS, *COMMON), examples=("stacks", "stacks -r 1"),
    ),
    Verb(
        "cancel", "end a job: SIGTERM, its grace, SIGKILL", jobs.cancel,
        operands=(JOB,), options=(Option(("--force",), "SIGKILL at once"), *COMMON),
        examples=("cancel", "cancel train-1f2e --force"), is_act=True,
    ),
    Verb(
        "resume", "have an ended job go on from a checkpoint; does nothing while it runs", jobs.resume,
        operands=(JOB,),
        options=(
            Option(("--step",), "from the one of that step; 0: the start (default: the newest)", "N", read.whole),
            Option(("-n", "--ranks"), "on that many ranks (default: as before)", "N", read.count),
            *COMMON,
        ),
        examples=("resume", "resume train-1f2e --step 400", "resume -n 4"), is_act=True,
    ),
    Verb(
        "resize", "have a running job go on with another number of ranks, from a checkpoint", jobs.resize,
        operands=(Operand("RANKS", "how many ranks from now on", required=True, read=read.count, named="ranks"), JOB),
        options=COMMON, examples=("resize 4", "resize 2 train-1f2e"), is_act=True,
    ),
    Verb(
        "interrupt", "KeyboardInterrupt in the cell that an interactive job runs; its ranks live on", jobs.interrupt,
        operands=(JOB,), options=(_RANKS, *COMMON), examples=("interrupt", "interrupt -r 1"), is_act=True,
    ),
    Verb(
        "inject", "do a fault to a rank, on purpose", jobs.inject,
        operands=(Operand("FAULT", " | ".join(FAULTS), required=True, read=_fault, offers="fault"), JOB),
        options=(
            Option(("-r", "--rank"), "the rank", "RANK", read.rank, required=True),
            *COMMON,
        ),
        listed=tuple((name, f"{fault.help} ({fault.place.value})") for name, fault in FAULTS.items()),
        notes="Only what has happened is a fault: until then, and where it goes on, inject continue ends it.",
        examples=("inject kill --rank 1", "inject stop train-1f2e -r 0"), is_act=True,
    ),
    Verb(
        "push", "bind a variable in the ranks of an interactive job", jobs.push,
        operands=(
            Operand("NAME", "a variable here, or NAME=LITERAL", required=True, named="value", offers="name"), JOB,
        ),
        options=(_RANKS, *COMMON), examples=("push batch", "push lr=0.1 -r 0,2"), is_act=True,
    ),
    Verb(
        "pull", "fetch an expression's value from the ranks, by rank; a plain name is bound here", jobs.pull,
        operands=(Operand("EXPRESSION", "a variable or expression in the ranks", required=True), JOB),
        options=(_RANKS, *COMMON), examples=("pull loss -r 1", "pull 'model.weight.norm()'"),
    ),
    *SAVED,
    Verb("version", "show versions", about.version, options=(JSON, HELP), examples=("version",)),
    Verb(
        "help", "show this, or all about one verb", show_help,
        operands=(
            Operand("VERB", "a verb", named="verb_name", offers="verb"),
            Operand("WORD", "its second word", named="second"),
        ),
        options=(HELP,), examples=("help launch", "help pool list"),
    ),
)  # fmt: skip

COMPLETION: Final = Verb(
    "completion", "print a completion script for your shell", about.completion,
    operands=(Operand("SHELL", "bash or zsh", required=True, read=_shell, offers="shell"),), options=(HELP,),
    examples=("completion bash > ~/.local/share/bash-completion/completions/dtrain",),
)  # fmt: skip

CELL: Final = Verb(
    "%dtrain", "run the cell on the ranks of the current interactive job", lambda context, args: Outcome(),
    options=(
        _RANKS,
        Option(("--job",), "another interactive job", "JOB", offers="job"),
        *WHERE,
        Option(("-q", "--quiet"), "do not show the last expression's value"),
        HELP,
    ),
)  # fmt: skip


def verb_names(verbs: Sequence[Verb] = VERBS) -> list[str]:
    """Names and aliases."""
    return [name for verb in verbs for name in (verb.name, *verb.aliases)]


def find_verb(words: Sequence[str], verbs: Sequence[Verb] = VERBS) -> tuple[Verb, list[str]]:
    """The verb that the words begin with, and the words after it; two words count before one."""
    for length in (2, 1):
        name = " ".join(words[:length])
        found = next((verb for verb in verbs if name in (verb.name, *verb.aliases)), None)
        if found is not None and len(words) >= length:
            rest = list(words[length:])
            if length == 1 and rest and not rest[0].startswith("-") and _seconds(name, verbs):
                break  # `pool lsit`
            return found, rest
    name = words[0]
    if (seconds := _seconds(name, verbs)) and len(words) > 1:
        near = nearest(words[1], seconds)
        meant = f"did you mean {name} {near}? " if near else ""
        raise UsageError(f"there is no verb '{name} {words[1]}'", hint=f"{meant}{name} {' | '.join(seconds)}")
    names = [known for known in verb_names(verbs) if " " not in known]
    near = nearest(name, names)
    meant = f"did you mean {near}? " if near else ""
    raise UsageError(f"there is no verb {name!r}", hint=f"{meant}verbs: {' '.join(names)}")


def _seconds(name: str, verbs: Sequence[Verb]) -> list[str]:
    """What may follow the first word of a verb of two words."""
    return [known.split()[1] for known in verb_names(verbs) if known.startswith(f"{name} ")]


def run(context: Context, words: Sequence[str], verbs: Sequence[Verb] = VERBS, *, is_quiet: bool = False) -> Outcome:
    """Do what the words say; `is_quiet` is --quiet said in another way."""
    verb, rest = find_verb(words, verbs)
    args = parse(verb, rest)
    args.verb = verb.name
    args.quiet = is_quiet or getattr(args, "quiet", False)
    if args.help:
        return Outcome(text=verb_help(verb, context.prefix))
    outcome = verb.run(context, args)
    if args.quiet and verb.is_act:
        return replace(outcome, text="", value=None if isinstance(outcome.value, Text) else outcome.value)
    return outcome
