"""What may be asked for, in which words it is refused, and how a job is called."""

from __future__ import annotations

import msgspec
import pytest

from workbench.errors import SpecError
from workbench.spec import MAX_RANKS, NAME_PATTERN, EntrypointKind, JobSpec, check_spec, default_name

TRAIN = JobSpec(entrypoint="train.py", nproc_per_node=2)


TEXT = "a path, an argument or an environment variable has a NUL byte or is not UTF-8"


def spec(**options: object) -> JobSpec:
    return msgspec.structs.replace(TRAIN, **options)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"entrypoint": ""}, "there is nothing to launch", "give a script, -m MODULE, a cell or --interactive"),
        ({"entrypoint": "", "kind": EntrypointKind.MODULE}, "there is nothing to launch", "-m MODULE"),
        ({"kind": EntrypointKind.SOURCE}, "the cell is empty", "put the program in the cell"),
        ({"kind": EntrypointKind.SOURCE, "source": " \n\t"}, "the cell is empty", "put the program"),
        ({"kind": EntrypointKind.SOURCE, "source": "x = 1\n" * 350_000}, "the cell is 2.0 MiB", "at most 1 MiB"),
        ({"name": "a/b"}, "'a/b' cannot be a job name", "up to 64 letters, digits"),
        ({"name": "../x"}, "'../x' cannot be a job name", "beginning with a letter or digit"),
        ({"name": ".hidden"}, "'.hidden' cannot be a job name", "beginning with a letter or digit"),
        ({"name": "x" * 65}, f"'{'x' * 65}' cannot be a job name", "up to 64"),
        ({"name": "x\n"}, "'x\\n' cannot be a job name", "up to 64"),
        ({"name": "naïve"}, "'naïve' cannot be a job name", "letters"),
        ({"nproc_per_node": -1}, "nproc_per_node is -1", "a job has at least 1 rank"),
        ({"nnodes": 0}, "nnodes is 0", "a job runs on at least 1 node"),
        ({"nnodes": -2}, "nnodes is -2", "at least 1 node"),
        ({"nproc_per_node": MAX_RANKS + 1}, "65537 ranks asked for", "at most 65536"),
        ({"nproc_per_node": 256, "nnodes": 257}, "65792 ranks asked for", "at most 65536"),
        ({"max_restarts": -1}, "max_restarts is -1", "give 0 or more"),
        ({"master_port": -1}, "master_port is -1", "1 to 65535"),
        ({"master_port": 65536}, "master_port is 65536", "1 to 65535"),
        ({"startup_timeout": 0.0}, "startup_timeout is 0.0", "above 0"),
        ({"startup_timeout": float("nan")}, "startup_timeout is nan", "above 0"),
        ({"startup_timeout": float("inf")}, "startup_timeout is inf", "above 0"),
        ({"progress_timeout": -0.1}, "progress_timeout is -0.1", "0 to learn it"),
        ({"progress_timeout": float("nan")}, "progress_timeout is nan", "0 to learn it"),
        ({"stop_grace": -1.0}, "stop_grace is -1.0", "0 to kill at once"),
        ({"stop_grace": float("nan")}, "stop_grace is nan", "0 to kill at once"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1", "0 for never"),
        ({"snapshot_every": -2}, "snapshot_every is -2", "-1 for never"),
        ({"consistency_budget": 0.0}, "consistency_budget is 0.0", "such as 0.02"),
        ({"consistency_every": -5}, "consistency_every is -5", "-1 for never"),
        ({"log_limit": 65535}, "log_limit is 65535 bytes", "at least 65536"),
        ({"env": {"A=B": "x"}}, "an environment variable has", "use NAME=VALUE"),
        ({"env": {"": "x"}}, "an environment variable has", "use NAME=VALUE"),
        ({"env": {"A": "x\0y"}}, TEXT, "no process"),
        ({"env": {"A\0": "x"}}, TEXT, "no process"),
        ({"args": ("--lr", "0\0")}, TEXT, "no process can be given one"),
        ({"cwd": "/data/\udcff"}, TEXT, "no process can be given one"),
        ({"python": "/bin/py\0"}, TEXT, "no process can be given one"),
        ({"entrypoint": "tr\0ain.py"}, TEXT, "no process can be given one"),
    ],
)
def test_refused(options: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_spec(spec(**options))
    assert str(caught.value).startswith(message)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nproc_per_node": 0},
        {"nproc_per_node": MAX_RANKS},
        {"kind": EntrypointKind.SOURCE, "entrypoint": "", "source": "x"},
        {"kind": EntrypointKind.SOURCE, "source": "x" * 2**20},
        {"kind": EntrypointKind.INTERACTIVE, "entrypoint": ""},
        {"kind": EntrypointKind.FUNCTION, "entrypoint": "train", "payload": b"\x80"},
        {"name": "a"},
        {"name": "0-digits_v1.2"},
        {"name": "x" * 64},
        {"master_port": 65535},
        {"stop_grace": 0.0},
        {"snapshot_every": -1},
        {"env": {"A": "b=c"}},
        {"log_limit": 65536},
    ],
)
def test_accepted(options: dict[str, object]) -> None:
    asked = spec(**options)
    assert check_spec(asked) is asked


@pytest.mark.parametrize(
    ("entrypoint", "kind", "name"),
    [
        ("train.py", EntrypointKind.SCRIPT, "train"),
        ("path/to/my train.py", EntrypointKind.SCRIPT, "my-train"),
        ("C:\\work\\train.py", EntrypointKind.SCRIPT, "train"),
        ("run.sh", EntrypointKind.SCRIPT, "run.sh"),
        ("__main__.py", EntrypointKind.SCRIPT, "main"),
        ("训练.py", EntrypointKind.SCRIPT, "job"),
        ("package.train", EntrypointKind.MODULE, "train"),
        ("train", EntrypointKind.MODULE, "train"),
        ("", EntrypointKind.SOURCE, "cell"),
        ("<cell 3>", EntrypointKind.SOURCE, "cell-3"),
        ("", EntrypointKind.INTERACTIVE, "interactive"),
        ("train.<locals>.step", EntrypointKind.FUNCTION, "train.-locals-.step"),
        ("x" * 100 + ".py", EntrypointKind.SCRIPT, "x" * 40),
        ("x" * 39 + "-y.py", EntrypointKind.SCRIPT, "x" * 39),
    ],
)
def test_default_name(entrypoint: str, kind: EntrypointKind, name: str) -> None:
    assert default_name(JobSpec(entrypoint=entrypoint, kind=kind)) == name
    assert NAME_PATTERN.match(name)


def test_label_is_the_name_when_there_is_one() -> None:
    assert (TRAIN.label, spec(name="digits").label) == ("train", "digits")


def test_world_size() -> None:
    assert (TRAIN.world_size, spec(nnodes=3).world_size, spec(nproc_per_node=0).world_size) == (2, 6, 0)


def test_signature_tells_what_differs_from_the_defaults() -> None:
    assert TRAIN.signature == JobSpec(entrypoint="train.py", nproc_per_node=2, max_restarts=0).signature
    assert spec(env={"A": "1", "B": "2"}).signature == spec(env={"B": "2", "A": "1"}).signature
    others = [TRAIN, spec(args=("--lr", "1")), spec(seed=0), spec(name="x"), spec(env={"A": "1"}), spec(nnodes=2)]
    assert len({asked.signature for asked in others}) == len(others)
    assert len(TRAIN.signature) == 16


def test_a_spec_survives_its_encoding_and_leaves_the_defaults_out() -> None:
    asked = spec(kind=EntrypointKind.FUNCTION, payload=b"\0\xff", args=("a",), env={"A": "1"}, seed=3)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=JobSpec) == asked
    assert msgspec.json.encode(TRAIN) == b'{"entrypoint":"train.py","nproc_per_node":2}'
