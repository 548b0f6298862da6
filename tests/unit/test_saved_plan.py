"""What a rerun would do: which code, what is missing, what is not as it was; and nothing is started or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.fake_session import FakeSession, context_of
from tests.unit.saved_files import CODE, SPEC, FakeAsk, fake, interactive, save_fake
from workbench.capture import capture
from workbench.errors import UsageError
from workbench.events import OriginRecorded
from workbench.origin import Origin, Source
from workbench.saved.plan import Changes, Plan, is_inside
from workbench.saved.rerun import demand, placed, prepare
from workbench.saved.session import load_session
from workbench.spec import EntrypointKind, JobSpec
from workbench.verbs.table import run

replace = msgspec.structs.replace


def planned(path: Path, changes: Changes | None = None) -> Plan:
    """The plan of the file's one job. The file may be closed: plans hold what they need."""
    with load_session(path) as session:
        (plan,) = prepare(session, None, changes or Changes())
    return plan


@pytest.fixture
def script(dtrain_home: Path, tmp_path: Path) -> Path:
    """A folder with a script whose run was saved there."""
    (tmp_path / "train.py").write_text('import helper\nparser.add_argument("--lr")\n')
    (tmp_path / "helper.py").write_text("x = 1\n")
    spec = JobSpec(entrypoint=str(tmp_path / "train.py"), cwd=str(tmp_path), nproc_per_node=2)
    save_fake(tmp_path / "run.dtrain", asked=fake(spec, origin=capture(spec)))
    return tmp_path


def test_what_lies_there_unchanged_is_run_in_place(script: Path) -> None:
    plan = planned(script / "run.dtrain")
    assert plan.problems == () and plan.notes == ()
    (attempt,) = plan.attempts
    assert attempt.files == {} and attempt.spec.entrypoint == str(script / "train.py")
    assert placed(attempt) == attempt.spec and not (script / "reruns").exists()


def test_what_has_changed_is_run_as_it_was(script: Path, dtrain_home: Path) -> None:
    (script / "helper.py").write_text("x = 2\n")
    plan = planned(script / "run.dtrain")
    assert plan.problems == () and plan.notes == ("changed or missing here, so what was saved is run: helper.py",)
    spec = placed(plan.attempts[0])
    where = Path(spec.entrypoint).parent
    assert where.parent == dtrain_home / "reruns" and spec.cwd == str(script)
    assert (where / "helper.py").read_text() == "x = 1\n" and (where / "train.py").is_file()


def test_changes_go_into_the_spec(script: Path) -> None:
    changes = Changes((("lr", ("0.1", "0.2")),), nproc_per_node=4, steps=9, env={"A": "1"})
    plan = planned(script / "run.dtrain", changes)
    first, second = (attempt.spec for attempt in plan.attempts)
    assert (first.args, second.args) == (("--lr", "0.1"), ("--lr", "0.2"))
    assert (
        first.name == "train-lr0.1" and first.nproc_per_node == 4 and first.max_steps == 9 and first.env == {"A": "1"}
    )
    with pytest.raises(UsageError, match="no parameter 'lrr'"):
        planned(script / "run.dtrain", Changes((("lrr", ("1",)),)))


def test_a_cells_parameters_go_into_its_text(dtrain_home: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, source=f"# dtrain: parameters\n{CODE}")
    save_fake(tmp_path / "run.dtrain", asked=fake(spec))
    (attempt,) = planned(tmp_path / "run.dtrain", Changes((("lr", ("1",)),))).attempts
    assert attempt.spec.source == "# dtrain: parameters\nlr = 1.0\nprint(lr)\n"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (JobSpec(kind=EntrypointKind.FUNCTION, entrypoint="train", payload=b"x", nproc_per_node=2), "pickle"),
        (replace(SPEC, source="token = 'hf_abcdefghijklmnopqrst'\n"), "a secret was taken out of trial"),
        (replace(SPEC, args=("--api-key", "abcdefgh")), "a secret was taken out of its arguments"),
        (replace(SPEC, source="import no_such_package_x\n"), "no_such_package_x is not installed"),
        (JobSpec(entrypoint="train.py", nproc_per_node=2), "its code was not saved with it"),
    ],
)
def test_what_keeps_a_job_from_running_again(dtrain_home: Path, tmp_path: Path, spec: JobSpec, problem: str) -> None:
    save_fake(tmp_path / "run.dtrain", asked=fake(spec))
    plan = planned(tmp_path / "run.dtrain")
    assert any(problem in told for told in plan.problems), plan.problems
    with load_session(tmp_path / "run.dtrain") as session, pytest.raises(UsageError, match="trial-1"):
        demand(session, [plan], yes=True)


def test_what_is_not_as_it_was_is_said(dtrain_home: Path, tmp_path: Path) -> None:
    origin = Origin(root=str(tmp_path), packages={"torch": "1.0"}, python="3.1", platform="Plan9-vax", cores=999)
    spec = replace(SPEC, env={"MODEL": "x"}, cwd="/nowhere/at/all", checkpoint_dir="/nowhere/ck")
    save_fake(tmp_path / "run.dtrain", asked=fake(spec, origin=origin))
    plan = planned(tmp_path / "run.dtrain")
    told = "\n".join(plan.notes)
    for word in (
        "torch 1.0 →",
        "python 3.1 →",
        "Plan9-vax →",
        "999 cores →",
        "MODEL",
        "/nowhere/at/all is not here",
        "own folder",
    ):
        assert word in told, word
    assert plan.problems == () and plan.attempts[0].spec.checkpoint_dir == ""


@pytest.mark.parametrize("path", ["../evil.py", "/etc/x.py", "a/../../x.py", "", "a\\..\\x.py"])
def test_code_never_leaves_its_folder(dtrain_home: Path, tmp_path: Path, path: str) -> None:
    """A file made by hand may name any path for its code."""
    assert not is_inside(path)
    origin = Origin(root=str(tmp_path), sources=(Source(path=path, digest="0" * 64, text="print()\n"),))
    spec = JobSpec(entrypoint=str(tmp_path / "x.py"), cwd=str(tmp_path), nproc_per_node=2)
    save_fake(tmp_path / "run.dtrain", asked=fake(spec, origin=origin))
    plan = planned(tmp_path / "run.dtrain")
    assert any("is no path for code" in told for told in plan.problems)
    with pytest.raises(UsageError, match="no path for code"):
        placed(plan.attempts[0])
    assert not (tmp_path.parent / "evil.py").exists()


def test_cells_of_an_interactive_job_are_in_its_plan(dtrain_home: Path, tmp_path: Path) -> None:
    save_fake(tmp_path / "run.dtrain", asked=interactive())
    (attempt,) = planned(tmp_path / "run.dtrain").attempts
    assert [cell.source for cell in attempt.cells] == ["x = 1\n"]


# --- verbs ------------------------------------------------------------------------------------------------------------


class SavingSession(FakeSession):
    """A pool whose jobs are saved by name only."""

    touched: dict[str, None]

    def __init__(self, *job_ids: str, **kw: Any) -> None:
        super().__init__(*job_ids, **kw)
        self.touched, self.saved = {}, []

    def save(self, path: str, jobs: list[str], **options: Any) -> tuple[str, ...]:
        self.saved.append((path, jobs, options))
        Path(path).write_bytes(b"x" * 2000)
        return ("a token (1 times)",)


def test_which_jobs_are_saved(tmp_path: Path) -> None:
    session, target = SavingSession("a-1", "b-1"), str(tmp_path / "run.dtrain")
    context = context_of(session, shell=True)
    outcome = run(context, ["save", target, "b", "a", "--env", "MODEL", "--with-checkpoints"])
    assert session.saved[-1] == (target, ["b-1", "a-1"], {"env": ["MODEL"], "with_checkpoints": True})
    assert outcome.text == f"{target}: 2 jobs, 2 kB\n  left out: a token (1 times)"
    run(context, ["save", target])
    assert session.saved[-1][1] == ["a-1"]  # the one that ran last
    run(context, ["save", target, "--all"])
    assert session.saved[-1][1] == ["a-1", "b-1"]
    session.touched = {"b-1": None}
    run(context_of(session), ["save", target])
    assert session.saved[-1][1] == ["b-1"]  # what this notebook has launched
    with pytest.raises(UsageError, match="--all"):
        run(context, ["save", target, "a", "--all"])
    with pytest.raises(UsageError, match="save wants FILE"):
        run(context, ["save"])


def test_show_tells_what_is_in_a_file(dtrain_home: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "run.dtrain")
    save_fake(Path(path), kw_env)
    context = context_of(FakeSession(), shell=True)
    outcome = run(context, ["show", path])
    for word in ("saved here", "trial-1", "SUCCEEDED", "a pool of 4 CPU slots", "left out:", "MODEL"):
        assert word in outcome.text, word
    assert outcome.document["jobs"][0]["job_id"] == "trial-1" and "files" not in outcome.document
    assert "lr = 0.05" in run(context, ["show", path, "--code"]).text
    assert "accuracy 97.5%" in run(context, ["show", path, "trial", "--logs"]).text
    assert "timeline of trial-1" in run(context, ["show", path, "trial", "--timeline"]).text
    assert "SUCCEEDED" in run(context, ["show", path, "trial"]).text
    assert "SUCCEEDED" not in run(context, ["show", path, "trial", "--at", "2s"]).text
    assert context.opened == []  # no pool


def kw_env(asked: FakeAsk) -> None:
    first: Any = asked.events[0]
    asked.events[0] = replace(first, spec=replace(first.spec, env={"MODEL": "small"}))
    assert any(isinstance(event, OriginRecorded) for event in asked.events)


def test_a_dry_run_says_all_and_starts_nothing(script: Path) -> None:
    context = context_of(FakeSession(), shell=True)
    outcome = run(context, ["rerun", str(script / "run.dtrain"), "--set", "lr=1,2", "--dry-run"])
    told = context.screen.text("out")
    assert "train.py --lr 1 on 2 ranks, 2 times" in told and "set lr=2" in told
    assert outcome.code == 0 and len(outcome.document[0]["specs"]) == 2 and context.opened == []
