"""Launched functions in a saved session: kept as pickles that are never loaded to be looked at, with their text."""

from __future__ import annotations

import collections
import functools
import os
import pickle
import platform
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import pytest

from tests.unit.fake_session import FakeSession, context_of
from tests.unit.saved_files import fake, save_fake
from workbench.capture import capture
from workbench.entrypoint import spec_of
from workbench.errors import UsageError
from workbench.origin import Origin
from workbench.saved.plan import Changes, Plan
from workbench.saved.rerun import demand, placed, prepare
from workbench.saved.session import SavedSession, load_session
from workbench.spec import EntrypointKind, JobSpec
from workbench.store.saved import pickles
from workbench.store.saved.scrub import HOME_IN_CODE, Scrubber
from workbench.verbs.table import run

replace = msgspec.structs.replace
HOME = str(Path.home())


def train(factor: float, *, path: str = "") -> tuple[float, str]:
    import csv

    return factor * len(csv.QUOTE_ALL.__doc__ or ""), path


def by_value(function: Any) -> Any:
    """As one of a notebook."""
    function.__module__ = "__main__"
    return function


def spec_for(function: Any, *args: Any, **kwargs: Any) -> JobSpec:
    return spec_of(function, args, kwargs, None, None, False, {"nproc_per_node": 2})


def saved(path: Path, spec: JobSpec, origin: Origin | None = None) -> tuple[str, ...]:
    return save_fake(path, asked=fake(spec, origin=origin or capture(spec))).left_out


def planned(session: SavedSession, changes: Changes | None = None) -> Plan:
    (plan,) = prepare(session, None, changes or Changes())
    return plan


@pytest.fixture
def path(dtrain_home: Path, tmp_path: Path) -> Path:
    return tmp_path / "run.dtrain"


class Loaded(Exception):
    """A pickle was."""


class Trap:
    """Tells when it is loaded."""

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> None:
    raise Loaded


def test_a_function_is_kept_with_its_text_and_never_loaded_to_be_shown(path: Path) -> None:
    spec = spec_for(train, 2.0, path=Trap())
    saved(path, spec)
    with pytest.raises(Loaded):
        pickle.loads(spec.payload)
    context = context_of(FakeSession(), shell=True)
    with load_session(path) as session:
        job = session.attach("trial-1")
        assert job.spec == spec and job.spec.source.startswith("def train(factor: float")
        assert session.code("trial-1")["train"] == job.spec.source
        plan = planned(session)
        assert plan.problems == () and plan.notes == ()
        assert placed(plan.attempts[0]).payload == spec.payload
        assert {Path(name).suffix for name in session.document.files if name.startswith("code/")} == {".py", ".pickle"}
    assert "def train(factor: float" in run(context, ["show", str(path), "--code"]).text
    run(context, ["show", str(path), "trial", "--timeline"])
    run(context, ["report", str(path), "-o", str(path.with_suffix(".html"))])
    run(context, ["notebook", str(path)])
    run(context, ["rerun", str(path), "--dry-run"])


def test_code_of_others_runs_only_with_consent(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved(path, spec_for(train, 2.0))
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "other"))
    with load_session(path) as session:
        plan = planned(session)
        assert "what runs is a pickle" in plan.notes[-1]
        with pytest.raises(UsageError, match="--yes"):
            demand(session, [plan], yes=False)
        demand(session, [plan], yes=True)


def test_a_pickle_of_another_python_is_refused(path: Path) -> None:
    spec = spec_for(train, 2.0)
    saved(path, spec, replace(capture(spec), python="3.9.1"))
    with load_session(path) as session:
        (problem,) = planned(session).problems
        now = ".".join(platform.python_version_tuple()[:2])
        assert f"is a pickle of Python 3.9, which {now} cannot read: rerun it with Python 3.9" in problem
    micro = f"{now}.99"
    saved(path, spec, replace(capture(spec), python=micro))
    with load_session(path) as session:
        assert planned(session).problems == () and f"python {micro} →" in planned(session).notes[0]


def test_a_function_without_a_text_says_so(path: Path) -> None:
    made = eval("lambda: 1")
    spec = spec_for(by_value(made))
    assert spec.source == ""
    assert saved(path, spec) == ("trial-1: the text of the function lambda: it cannot be found",)
    with load_session(path) as session:
        assert "could not be had" in session.code("trial-1")["lambda"]
        assert planned(session).problems == () and "what runs is in a pickle only" in planned(session).notes[0]


def test_the_text_of_what_can_be_called() -> None:
    assert spec_for(functools.partial(train, 1.0)).source.startswith("def train")
    assert spec_for(Trap).source.startswith("class Trap")
    assert spec_for(len, []).source == ""


@pytest.mark.parametrize(
    ("function", "kwargs", "why"),
    [
        (train, {"path": "hf_abcdefghijklmnopqrst"}, "looks like a secret"),
        (train, {"api_key": "abc123def456ghi7"}, "looks like a secret"),
        (train, {"path": "swordfish-4711"}, "looks like a secret"),
        (train, {"path": b"\x00hf_abcdefghijklmnopqrst\x00"}, "secret, or the path of the home, in its data"),
        (train, {"path": f"{HOME}/data".encode()}, "secret, or the path of the home, in its data"),
        (train, {"path": os.urandom(pickles.MOST)}, "larger than 16 MiB"),
    ],
)
def test_a_function_with_a_secret_is_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, kwargs: dict[str, Any], why: str
) -> None:
    monkeypatch.setenv("MY_TOKEN", "swordfish-4711")
    (left_out,) = saved(path, spec_for(function, 1.0, **kwargs))
    assert left_out.startswith("trial-1: the launched function train, which cannot be run again: ") and why in left_out
    with load_session(path) as session:
        assert "is not in the file: launch it from its own program" in planned(session).problems[0]


def test_the_home_is_the_readers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(path, spec_for(by_value(lambda where=f"{HOME}/data": where)))
    data = path.read_bytes()
    monkeypatch.setenv("HOME", "/home/somebody")
    with load_session(path) as session:
        (kept,) = [session.archive.read(name) for name in session.document.files if name.endswith(".pickle")]
        assert HOME.encode() not in kept and HOME_IN_CODE.encode() in kept
        function, _, _ = pickle.loads(session.attach("trial-1").spec.payload)
        assert function() == "/home/somebody/data"
        session.save(path)
    assert path.read_bytes() == data


def test_a_module_that_a_function_needs_is_named_and_kept(path: Path, tmp_path: Path) -> None:
    (tmp_path / "own_helper.py").write_text("x = 1\n")
    ops = b"\x8c\x0bown_helper2\x8c\x01x\x93"  # STACK_GLOBAL
    payload = b"\x80\x05" + ops.replace(b"\x0bown_helper2", b"\x0aown_helper") + b"0" + ops + b"."
    spec = JobSpec(kind=EntrypointKind.FUNCTION, entrypoint="f", payload=payload, nproc_per_node=2, cwd=str(tmp_path))
    assert pickles.modules(payload) == {"own_helper", "own_helper2"}
    assert [source.path for source in capture(spec).sources] == ["own_helper.py"]
    saved(path, spec)
    with load_session(path) as session:
        assert planned(session).problems == ("own_helper2 is not installed",)
        (tmp_path / "own_helper.py").write_text("x = 2\n")
        (attempt,) = planned(session).attempts
        assert (
            dict(attempt.files) == {"own_helper.py": "x = 1\n"}
            and (Path(placed(attempt).cwd) / "own_helper.py").is_file()
        )


def test_arguments_of_a_function_cannot_be_set(path: Path) -> None:
    saved(path, replace(spec_for(by_value(lambda: 1)), cwd="/"))
    with load_session(path) as session, pytest.raises(UsageError, match="whose arguments are in its pickle"):
        planned(session, Changes((("x", ("1",)),)))


# --- pickles ----------------------------------------------------------------------------------------------------------


def test_modules_are_told_without_loading() -> None:
    def uses() -> Any:
        return os.path, msgspec.json

    data = cloudpickle.dumps((by_value(uses), (Trap(), collections.OrderedDict(), functools.partial(len)), {}))
    assert {"os", "msgspec", "collections", "functools", __name__} <= pickles.modules(data)
    assert "workbench" not in pickles.modules(data)


def test_texts_are_rewritten_and_all_else_stays() -> None:
    value = {"a": ["old", "x" * 70_000, 1.5, b"old"], "é": ("old", {"old"}), "n": 2**70}
    for protocol in (3, 4, 5):
        data = pickle.dumps(value, protocol)
        assert pickles.rewrite(data, str) is data
        new = pickle.loads(pickles.rewrite(data, lambda text: text.replace("old", "much newer")))
        assert new == {"a": ["much newer", "x" * 70_000, 1.5, b"old"], "é": ("much newer", {"much newer"}), "n": 2**70}


def test_what_is_no_pickle_is_left_out() -> None:
    for data in (b"", b"x", b"\x80\x05", b"\x80\x05\x8c\xff."):
        with pytest.raises(ValueError, match="no pickle"):
            list(pickles.texts(data))
        assert pickles.clean(data, Scrubber())[0] == b""
