"""What a rerun would do: which code, what is missing, what is not as it was; and nothing is started or written."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.unit.fake_session import FakeSession, context_of
from tests.unit.saved_files import CODE, SPEC, FakeAsk, fake, interactive, save_fake
from tests.unit.test_training_catalogue import save as save_checkpoint
from workbench.agent.checkpoints import to_value
from workbench.capture import capture
from workbench.entrypoint import check_here
from workbench.errors import CheckpointCorruptError, CheckpointNotFoundError, SavedFileError, StoreError, UsageError
from workbench.events import CellSent, OriginRecorded
from workbench.feed import PoolStatus, WorkerStatus
from workbench.origin import Origin, Source
from workbench.saved.beginning import KEPT, NEWEST, PREFIX, problem_of, sweep
from workbench.saved.plan import Changes, Plan, is_inside
from workbench.saved.rerun import demand, other_hardware, placed, prepare, rerun
from workbench.saved.session import load_session
from workbench.spec import EntrypointKind, JobSpec
from workbench.store.saved import archive
from workbench.training import catalogue
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


def test_with_other_parameters_all_else_runs_as_it_lies_here(script: Path) -> None:
    """Also what was taken out of the saved text: it would be another program without saying so."""
    (script / "train.py").write_text(
        "# dtrain: parameters\nlr = 0.1\n\ntoken = 'hf_abcdefghijklmnopqrst'\nimport helper\n"
    )
    spec = JobSpec(entrypoint=str(script / "train.py"), cwd=str(script), nproc_per_node=2)
    save_fake(script / "run.dtrain", asked=fake(spec, origin=capture(spec)))
    changes = Changes((("lr", ("0.2",)),))
    (attempt,) = planned(script / "run.dtrain", changes).attempts
    text = (script / "train.py").read_text()
    assert attempt.files == {"train.py": text.replace("0.1", "0.2"), "helper.py": "x = 1\n"}
    (script / "helper.py").write_text("x = 2\n")
    assert "a secret was taken out of train.py" in planned(script / "run.dtrain", changes).problems[0]


def test_parameters_of_cells_of_an_interactive_job(dtrain_home: Path, tmp_path: Path) -> None:
    asked = interactive()
    (at,) = [k for k, event in enumerate(asked.events) if isinstance(event, CellSent)]
    asked.events[at] = replace(asked.events[at], source="# dtrain: parameters\nlr = 0.1\n")
    save_fake(tmp_path / "run.dtrain", asked=asked)
    first, second = planned(tmp_path / "run.dtrain", Changes((("lr", ("0.2", "3")),))).attempts
    assert [cell.source for cell in first.cells] == ["# dtrain: parameters\nlr = 0.2\n"]
    assert [cell.source for cell in second.cells] == ["# dtrain: parameters\nlr = 3.0\n"]
    with pytest.raises(UsageError, match="no parameter 'x'"):
        planned(tmp_path / "run.dtrain", Changes((("x", ("1",)),)))


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


def test_an_empty_file_and_a_secret_in_what_runs_in_place_are_no_matter(dtrain_home: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "keys.py").write_text("token = 'hf_abcdefghijklmnopqrst'\n")
    (package / "other.py").write_text("x = 1\n")
    spec = replace(SPEC, source="import package.keys, package.other\n", cwd=str(tmp_path))
    save_fake(tmp_path / "run.dtrain", asked=fake(spec, origin=capture(spec)))
    assert planned(tmp_path / "run.dtrain").problems == ()
    (package / "other.py").write_text("x = 2\n")
    (problem,) = planned(tmp_path / "run.dtrain").problems
    assert problem.startswith("a secret was taken out of package/keys.py")


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


def test_where_what_is_run_is_saved_is_looked_at_first(script: Path) -> None:
    context = context_of(FakeSession(), shell=True)
    with pytest.raises(SavedFileError, match="there is no directory /nowhere"):
        run(context, ["rerun", str(script / "run.dtrain"), "--out", "/nowhere/x.dtrain"])
    with pytest.raises(SavedFileError, match="there is no directory /nowhere"):
        rerun(script / "run.dtrain", out="/nowhere/x.dtrain")
    with pytest.raises(StoreError, match="there is no directory /nowhere"):
        run(context, ["export", str(script / "run.dtrain"), "--format", "csv", "-o", "/nowhere/x.csv"])
    with pytest.raises(UsageError, match="is a file"):
        run(context, ["export", str(script / "run.dtrain"), "--format", "tensorboard", "-o", str(script / "train.py")])
    assert context.opened == []


def test_other_hardware_is_said(script: Path) -> None:
    with load_session(script / "run.dtrain") as session:
        for kind, said in ("GPU", "it ran on CPUs, and the pool has GPUs: nothing will be the same bits"), ("CPU", ""):
            worker = WorkerStatus(address="tls://w", host="h", pid=1, slots=4, free=2, accelerator=kind)
            status = PoolStatus(name="x", version="0", address="", slots=4, free=4, workers=(worker,))
            pool: Any = SimpleNamespace(pool_status=lambda status=status: status)
            assert other_hardware(session, pool) == said


# --- from a checkpoint ------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(dtrain_home: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 20 and 40; `run.dtrain` names them, `with.dtrain` holds the newest."""
    folder = tmp_path / "checkpoints"
    for step in (20, 40):
        save_checkpoint(folder, step)

    def known(asked: FakeAsk) -> None:
        asked.checkpoints = [to_value(found) for found in catalogue.scan(folder)]

    save_fake(tmp_path / "run.dtrain", known)
    save_fake(tmp_path / "with.dtrain", known, with_checkpoints=True)
    return folder


def beginning(path: Path, step: int) -> str:
    """Where a rerun begins, in the words of the plan, or why it cannot."""
    plan = planned(path, Changes(checkpoint=step))
    assert (plan.beginning is None) == bool(plan.problems)
    return plan.problems[0] if plan.problems else plan.notes[0]


def test_a_rerun_begins_from_a_checkpoint_where_it_lies(checkpoints: Path) -> None:
    path = checkpoints.parent / "run.dtrain"
    assert beginning(path, 20) == "begins from the checkpoint of step 20"
    assert beginning(path, NEWEST) == "begins from the checkpoint of step 40"
    assert beginning(path, 30) == "it has no checkpoint of step 30: there are 20, 40"
    assert planned(path).beginning is None
    with load_session(path) as session:
        (plan,) = prepare(session, None, Changes(checkpoint=20))
        assert plan.beginning is not None
        assert plan.beginning.place(session.archive) == str(checkpoints / "step-00000020")


def test_a_checkpoint_that_is_not_what_was_saved_is_refused(checkpoints: Path) -> None:
    path, data = checkpoints.parent / "run.dtrain", checkpoints / "step-00000040" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    assert "__0_0.distcp is damaged: its checksum is" in beginning(path, 40)
    assert beginning(path, NEWEST) == "begins from the checkpoint of step 20"
    shutil.rmtree(checkpoints / "step-00000040")
    assert re.fullmatch(r"the checkpoint of step 40 is not in run.dtrain, and no longer at .*: save with "
                        "--with-checkpoints, or put it back", beginning(path, 40))  # fmt: skip
    save_checkpoint(checkpoints, 40, {"other": b"x"})
    assert beginning(path, 40).endswith("it is another one than when the session was saved")
    shutil.rmtree(checkpoints)
    assert beginning(path, NEWEST).endswith("; nor any of the 1 before it")
    with load_session(path) as session, pytest.raises(UsageError, match="and no longer at"):
        demand(session, prepare(session, None, Changes(checkpoint=40)), yes=True)


def test_an_included_checkpoint_is_put_into_the_home(checkpoints: Path, dtrain_home: Path) -> None:
    shutil.rmtree(checkpoints)
    with load_session(checkpoints.parent / "with.dtrain") as session:
        (plan,) = prepare(session, None, Changes(checkpoint=NEWEST))
        assert plan.problems == () and plan.beginning is not None and not (dtrain_home / "reruns").exists()
        where = Path(plan.beginning.place(session.archive))
        assert where.is_relative_to(dtrain_home / "reruns") and problem_of(where) == ""
        (where / ".metadata").write_bytes(b"edited")
        assert plan.beginning.place(session.archive) == str(where) and problem_of(where) == "", "put there anew"
        assert not list(where.glob(".*.*")), "no temporary file is left"
        for folder in (old := dtrain_home / "reruns" / f"{PREFIX}0123", code := dtrain_home / "reruns" / "4567"):
            folder.mkdir()
            (folder / "file").touch()
            os.utime(folder, (0, time.time() - KEPT - 60))
        os.utime(where.parent, (0, time.time() - KEPT - 60))
        assert plan.beginning.place(session.archive) == str(where) and problem_of(where) == "", (
            "it goes, and comes again"
        )
        assert not old.exists() and code.exists()
        os.utime(where.parent, (0, time.time() - KEPT + 60))
        sweep(dtrain_home / "reruns", time.time() - KEPT)
        assert problem_of(where) == ""


def test_an_included_checkpoint_stays_in_the_home_whatever_the_file_calls_it(
    checkpoints: Path, dtrain_home: Path, tmp_path: Path
) -> None:
    """A file made by hand: digests are texts."""
    with load_session(tmp_path / "with.dtrain") as session:
        files = {name: session.archive.read(name) for name in session.document.files}
        (entry,) = session.document.jobs
        evil = tuple(replace(one, digest="x/../../../evil") for one in entry.checkpoints)
        document = replace(session.document, jobs=(replace(entry, checkpoints=evil),))
    archive.write(tmp_path / "evil.dtrain", document, dict(files))
    with load_session(tmp_path / "evil.dtrain") as session:
        (plan,) = prepare(session, None, Changes(checkpoint=NEWEST))
        assert plan.beginning is not None and plan.beginning.path.parents[1] == dtrain_home / "reruns"
        with pytest.raises(SavedFileError, match="another one than when"):
            plan.beginning.place(session.archive)
    assert not list(tmp_path.rglob("*evil/*"))


def test_a_job_that_saved_nothing_cannot_begin_from_a_checkpoint(script: Path) -> None:
    assert "launch with --checkpoint-every N" in beginning(script / "run.dtrain", NEWEST)


def test_a_job_that_began_from_a_checkpoint_does_so_again(checkpoints: Path, tmp_path: Path) -> None:
    asked = fake(replace(SPEC, resume_from=str(checkpoints / "step-00000020")))
    save_fake(tmp_path / "again.dtrain", asked=asked)
    assert planned(tmp_path / "again.dtrain").notes[0] == "begins from the checkpoint of step 20"
    shutil.rmtree(checkpoints)
    (problem,) = planned(tmp_path / "again.dtrain").problems
    assert "it began from the checkpoint" in problem and problem.endswith("give --from-checkpoint STEP")


def test_a_launch_from_what_is_no_checkpoint_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, resume_from="checkpoints/step-00000040", cwd=str(tmp_path))
    assert check_here(spec).resume_from == str(checkpoints / "step-00000040")
    (checkpoints / "step-00000040" / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match="metadata is empty"):
        check_here(spec)
    with pytest.raises(CheckpointNotFoundError, match="it is not there"):
        check_here(replace(spec, resume_from="checkpoints/step-00000041"))


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
    outcome = run(context, ["rerun", str(script / "run.dtrain"), "--from-checkpoint", "newest", "--dry-run"])
    assert outcome.code == 1 and "it has saved no checkpoint" in outcome.document[0]["problems"][0]
    with pytest.raises(UsageError, match="--from-checkpoint wants a step, or newest"):
        run(context, ["rerun", "x", "--from-checkpoint", "-1"])
