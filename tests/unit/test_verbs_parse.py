"""The rule of whose words are whose, values, and what is said about wrong ones."""

from __future__ import annotations

import shlex

import pytest

from workbench.errors import UsageError
from workbench.state import JobPhase
from workbench.verbs import read
from workbench.verbs.declare import Arguments
from workbench.verbs.parse import parse
from workbench.verbs.table import VERBS, find_verb


def parsed(line: str, *, is_cell: bool = False) -> Arguments:
    verb, rest = find_verb(shlex.split(line))
    return parse(verb, rest, is_cell=is_cell)


@pytest.mark.parametrize(
    ("line", "script", "ranks", "args"),
    [
        ("launch train.py --nproc-per-node 4 -- --lr 0.1", "train.py", 4, ("--lr", "0.1")),
        ("launch train.py --lr 0.1", "train.py", None, ("--lr", "0.1")),
        ("launch --nproc_per_node=4 train.py --lr 0.1 --seed 3", "train.py", 4, ("--lr", "0.1", "--seed", "3")),
        ("launch -n4 train.py --help", "train.py", 4, ("--help",)),
        ("launch train.py -n 2 --lr 0.1", "train.py", 2, ("--lr", "0.1")),
        ("launch train.py -n 2", "train.py", 2, ()),
        ("launch train.py a b", "train.py", None, ("a", "b")),
        ("launch train.py -1", "train.py", None, ("-1",)),
        ("launch train.py -- -n 7 -- x", "train.py", None, ("-n", "7", "--", "x")),
        ("launch -n 2 train.py -- --wait", "train.py", 2, ("--wait",)),
        ("launch --standalone --nproc-per-node=auto train.py x", "train.py", 0, ("x",)),
        ("launch train.py '#1' 'a b'", "train.py", None, ("#1", "a b")),
    ],
)
def test_whose_words(line: str, script: str, ranks: int | None, args: tuple[str, ...]) -> None:
    found = parsed(line)
    assert (found.script, found.nproc_per_node, found.args) == (script, ranks, args)


@pytest.mark.parametrize(
    ("line", "ranks", "args"),
    [
        ("launch -m pkg.train --lr 0.1", None, ("--lr", "0.1")),
        ("launch -m pkg.train -n 2", 2, ()),
        ("launch -n 2 -m pkg.train -n 3", 2, ("-n", "3")),
        ("launch --module=pkg.train x", None, ("x",)),
    ],
)
def test_a_module_is_the_program(line: str, ranks: int | None, args: tuple[str, ...]) -> None:
    found = parsed(line)
    assert (found.module, found.script, found.nproc_per_node, found.args) == ("pkg.train", None, ranks, args)


def test_a_cell_is_the_program() -> None:
    found = parsed("launch -n 2 --name x -- --lr 0.1", is_cell=True)
    assert (found.script, found.name, found.args) == (None, "x", ("--lr", "0.1"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("launch train.py --lr 0.1 -n 2", r"is -n for dtrain or for the program\?.*after --"),
        ("launch train.py --nproc-per-nod 4", r"no option --nproc-per-nod .*did you mean --nproc-per-node"),
        ("launch train.py --nproc-per-nod 4 -- x", r"no option --nproc-per-nod .*did you mean --nproc-per-node"),
        ("launch --nprocs 4 train.py", r"no option --nprocs .*arguments of the program itself go after --"),
        ("launch --rdzv-backend=c10d train.py", "--rdzv-backend is torchrun's, and the pool does what it is for"),
        ("launch train.py -n x", "-n wants a whole number from 1, or auto .* not 'x'"),
        ("launch train.py -n 0", "-n wants a whole number from 1"),
        ("launch train.py -n -1", "-n wants a whole number from 1"),
        ("launch train.py -n", "-n wants a value: N"),
        ("launch train.py --name --wait", "--name wants a value: NAME"),
        ("launch train.py --env A", "--env wants KEY=VALUE, not 'A'"),
        ("launch train.py --cold=1", "--cold takes no value"),
        ("launch a.py --wait -- x b.py -n", "^$"),
        ("status a b", r"status does not know what to do with 'b' \(it takes JOB\)"),
        ("status --jsn", r"status has no option --jsn \(did you mean --json\?"),
        ("inject kill", "inject wants --rank RANK"),
        ("inject -r 1", "inject wants FAULT: kill | stop | continue | "),
        ("inject explode -r 1", "FAULT wants one of kill, stop, continue, .* not 'explode'"),
        ("jobs --phase well", "--phase wants a phase: INIT, .* not 'well'"),
        ("logs -r 3-1", "-r wants ranks, such as 1 or 0,2 or 0-3, not '3-1'"),
        ("lanch x", r"no verb 'lanch' \(did you mean launch\? verbs: up down"),
        ("pool lsit", r"no verb 'pool lsit' \(did you mean pool list\?"),
    ],
)
def test_wrong_words_are_told(line: str, words: str) -> None:
    if words == "^$":
        assert parsed(line).args == ("x", "b.py", "-n")
        return
    with pytest.raises(UsageError, match=words):
        parsed(line)


def test_every_spelling_of_the_options() -> None:
    found = parsed(
        "launch t.py --max_restarts=2 --env A=1 --env B=x=y --preload a,b --startup-timeout 2m --log-limit 2G --seed -5"
    )
    assert (found.max_restarts, found.env, found.preload) == (2, [("A", "1"), ("B", "x=y")], ("a", "b"))
    assert (found.startup_timeout, found.log_limit, found.seed) == (120.0, 2 * 2**30, -5)
    kept = parsed("launch t.py --checkpoint-keep 2 --checkpoint-keep-every 500 --progress-timeout 1m")
    assert (kept.checkpoint_keep, kept.checkpoint_keep_every, kept.progress_timeout) == (2, 500, 60.0)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("pool start", "up"),
        ("pool stop", "down"),
        ("pool", "pool"),
        ("pool status", "pool"),
        ("pool list", "pool list"),
    ],
)
def test_pool_verbs_are_up_and_down(line: str, name: str) -> None:
    assert find_verb(line.split())[0].name == name


def test_up_names_its_pool() -> None:
    assert parsed("up -n 3 --name big").pool == parsed("pool start --pool big").pool == "big"


def test_values() -> None:
    assert read.ranks("0-2,5") == (0, 1, 2, 5)
    assert read.ranks("2,0,2") == (0, 2)
    assert read.phase("failed") is JobPhase.FAILED
    assert [read.seconds(text) for text in ("90", "1.5s", "2h", ".5")] == [90.0, 1.5, 7200.0, 0.5]
    assert [read.size(text) for text in ("10", "1K", "1.5M", "2GiB")] == [10, 1024, 1_572_864, 2**31]
    assert [read.pace(text) for text in ("auto", "off", "20")] == [0, -1, 20]
    for reader, text in [
        (read.pace, "0"),
        (read.pace, "-1"),
        (read.ranks, ""),
        (read.ranks, "1-"),
        (read.ranks, "99999999"),
        (read.seconds, "soon"),
    ]:
        with pytest.raises(ValueError, match=" "):
            reader(text)


def test_every_option_is_told_about_and_every_key_is_one() -> None:
    for verb in VERBS:
        flags = [flag for option in verb.options for flag in option.flags]
        assert len(flags) == len(set(flags)), verb.name
        keys = [option.key for option in verb.options] + [operand.key for operand in verb.operands]
        assert len(keys) == len(set(keys)), verb.name
        assert all(option.help and option.help[-1] != "." for option in verb.options)
        assert verb.summary
        assert verb.examples, verb.name


def test_examples_can_be_parsed() -> None:
    for verb in VERBS:
        for example in verb.examples:
            found, rest = find_verb(shlex.split(example.partition(" > ")[0]))
            parse(found, rest)
