"""Real jobs saved, looked at, and run again: what comes back is what was, and a rerun's losses are the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import papermill
import pytest

import workbench as wb
from tests.integration.conftest import await_phase
from tests.integration.test_cli_real import dtrain
from tests.unit.test_training_catalogue import save as save_checkpoint
from workbench.errors import UnknownJobError, UsageError
from workbench.events import OriginRecorded
from workbench.feed import BeatFrame
from workbench.requests import ReadFrames
from workbench.saved.rerun import Checking, rerun
from workbench.saved.session import load_session
from workbench.saved.traces import steps_of, trace_of
from workbench.session import Job, Session
from workbench.state import JobPhase
from workbench.store.saved.seal import key_path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
TRAIN = """\
import argparse, helper, torch
from workbench.training import Run

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for step in range(args.steps):
    loss = helper.loss(model, step)
    optimizer.zero_grad()
    loss.backward()
    Run.current().report(loss=loss, samples=8)
    optimizer.step()
print(f"final loss {loss.item():.6f}", flush=True)
"""
HELPER = """\
import torch

def loss(model, step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()
"""
STEPS = """\
import argparse, torch
from workbench.training import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
data = torch.utils.data.TensorDataset(torch.arange(80.0).reshape(20, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
epochs = parser.parse_args().epochs
for step, (x,) in Run.current().steps(loader, {"model": model, "optimizer": optimizer}, epochs=epochs):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    Run.current().report(loss=loss)
    optimizer.step()
"""
CELL = """\
# dtrain: parameters
factor = 2
word = "hello"

import os
print(word, factor * int(os.environ["RANK"]), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


def trained(session: Session, folder: Path, **options: Any) -> Job:
    job = session.launch("train.py", cwd=str(folder), nproc_per_node=2, **options)
    assert job.wait(30) is JobPhase.SUCCEEDED
    return job


def lines_of(result: Any) -> dict[str, str]:
    (done,) = result.done
    return {line.what.partition(",")[0]: line.verdict.value for line in done.lines}


def test_a_loaded_job_is_the_live_one(session: Session, folder: Path) -> None:
    job = trained(session, folder, name="look")
    path = folder / "run.dtrain"
    session.save(path, [job])
    with load_session(path) as saved:
        kept = saved.attach(job.job_id)
        assert kept.state == job.state
        assert kept.spec == job.spec
        assert repr(kept.history()) == repr(job.history())
        assert kept.timeline == job.timeline
        assert kept.logs() == job.logs()
        live, old = (msgspec.to_builtins(one.view()) for one in (job, kept))
        for moving in ("now", "running_for"):
            live.pop(moving), old.pop(moving)
        assert (live.pop("is_saved"), old.pop("is_saved")) == (False, True)
        assert msgspec.json.encode(live) == msgspec.json.encode(old)
        middle = (job.state.submitted_at + (job.state.ended_at or 0.0)) / 2
        then, kept_then = job.view(at=middle), kept.view(at=middle)
        assert not then.phase.is_terminal and msgspec.json.encode(then) == msgspec.json.encode(kept_then)
        frames, kept_frames = (
            one.session.ask("frames", ReadFrames(job_id=job.job_id), list[BeatFrame]) for one in (job, kept)
        )
        assert frames == kept_frames != [] and any(row.rss for row in job.view(at=frames[0].time).rows)
        assert kept.follow(timeout=0.0).usage == job.follow(timeout=0.0).usage != ()
        assert kept.code == {"train.py": TRAIN, "helper.py": HELPER}
        assert trace_of(kept) == msgspec.structs.replace(trace_of(job))


def test_a_rerun_is_the_same_bit_for_bit(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    path, again = folder / "run.dtrain", folder / "again.dtrain"
    session.save(path, [job])
    done = dtrain("rerun", str(path), "--check", "--exact", "--out", str(again))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agrees with" in done.stdout and "bit for bit" in done.stdout and "throughput" in done.stdout
    with load_session(again) as saved:
        (entry,) = saved.document.jobs
        assert entry.job_id != job.job_id and entry.phase == "SUCCEEDED"
    done = dtrain("rerun", str(path), "--check", "--set", "lr=0.3", "--json")
    assert done.returncode == 1
    (told,) = json.loads(done.stdout)
    assert told["is_deviation"] and told["is_well"] and told["settings"] == {"lr": "0.3"}


def test_what_was_launched_is_run_though_the_script_has_changed(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    path = folder / "run.dtrain"
    session.save(path, [job])
    (folder / "helper.py").write_text("raise SystemExit(3)\n")
    done = dtrain("rerun", str(path), "--check", "--exact")
    assert "changed or missing here, so what was saved is run: helper.py" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_steps_and_ranks_may_be_others(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    path = folder / "run.dtrain"
    session.save(path, [job])
    result = rerun(path, steps=10, check=True, session=session)
    assert result.is_well and result.jobs[0].view().step == 10
    assert lines_of(result)["steps"] == "same" and lines_of(result)["loss"] == "same"
    result = rerun(path, nproc_per_node=1, check=True, session=session)
    assert result.is_well and result.jobs[0].state.world_size == 1
    with pytest.raises(UsageError, match="needs 64 slots"):
        rerun(path, nproc_per_node=64, session=session)


def test_a_sweep_of_a_cells_parameters_is_queued(session: Session, tmp_path: Path) -> None:
    job = session.launch(source=CELL, name="cell", nproc_per_node=2)
    job.wait(30)
    path = tmp_path / "cell.dtrain"
    session.save(path, [job])
    result = wb.rerun(path, set={"factor": [3, 5], "word": "bye"}, session=session)
    assert result.is_well
    assert [one.logs(rank=1) for one in result.jobs] == ["bye 3\n", "bye 5\n"]
    assert [one.job_id.rpartition("-")[0] for one in result.jobs] == ["cell-factor3-wordbye", "cell-factor5-wordbye"]
    again = rerun(path, check=Checking(exact=True), session=session)
    assert again.is_well


def test_a_rerun_begins_from_a_saved_checkpoint(session: Session, tmp_path: Path) -> None:
    options = {"checkpoint_every": 8, "max_steps": 12, "seed": 3, "cwd": str(tmp_path)}
    job = session.launch(source=STEPS, name="steps", nproc_per_node=1, **options)
    job.wait(30)
    session.save(tmp_path / "run.dtrain", [job], with_checkpoints=True)
    result = rerun(tmp_path / "run.dtrain", from_checkpoint=8, check=Checking(exact=True), session=session)
    assert result.is_well and set(lines_of(result).values()) <= {"same", ""}, result.done[0]
    assert min(record.step for record in steps_of(result.jobs[0])[0]) == 9
    shutil.rmtree(Path(job.checkpoints[0].path).parent)  # the newest is in the file
    done = dtrain("rerun", str(tmp_path / "run.dtrain"), "--from-checkpoint", "newest", "--steps", "14", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    again = session.attach(json.loads(done.stdout)[0]["job_id"])
    assert [record.step for record in steps_of(again)[0]] == [13, 14]


def test_the_buttons_of_a_saved_job_act_on_the_job_it_is_of(session: Session, tmp_path: Path) -> None:
    program = tmp_path / "steps.py"
    program.write_text(STEPS.replace("    loss = model", "    if step == 12 and not Path('fixed').exists():\n"
                                     "        raise SystemExit(3)\n    loss = model", 1)
                       .replace("import argparse", "from pathlib import Path\nimport argparse"))  # fmt: skip
    job = session.launch(program, checkpoint_every=8, seed=3, cwd=str(tmp_path), max_restarts=0)
    await_phase(job, JobPhase.FAILED)
    session.save(tmp_path / "run.dtrain", [job])
    (tmp_path / "fixed").touch()
    with load_session(tmp_path / "run.dtrain") as saved:
        kept = saved.attach(job.job_id)
        panel = kept.panel()
        panel.buttons["resume"].click()
        assert re.search("Resume( from its newest checkpoint)? was asked for", panel.said.value)
        assert kept.live().wait(30) is JobPhase.SUCCEEDED and kept.phase is JobPhase.FAILED
        with pytest.raises(UsageError, match="only looked at"):
            kept.cancel()
    elsewhere = Path(__file__).parents[1] / "data" / "saved_session_v2" / "run.dtrain"
    with load_session(elsewhere) as saved, pytest.raises(UnknownJobError, match="not in this DTRAIN_HOME"):
        saved.attach("trial-1").resume()


def test_a_program_that_restores_nothing_does_not_begin_from_a_checkpoint(session: Session, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoints", 20)
    options = {"checkpoint_dir": str(tmp_path / "checkpoints"), "nproc_per_node": 1, "name": "blind"}
    job = session.launch(source="print('hello')", **options)
    job.wait(30)
    session.save(tmp_path / "run.dtrain", [job])
    result = rerun(tmp_path / "run.dtrain", from_checkpoint=True, session=session)
    assert not result.is_well and "did not go on from the checkpoint of step 20" in result.done[0].reason


def test_a_function_runs_again_from_its_pickle(session: Session, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of this very program, by value, and one of a module, by reference, whose file has changed since."""
    monkeypatch.syspath_prepend(folder)
    factor = 3

    def scaled(value: int) -> int:
        import os

        print("scaled", factor * value * (1 + int(os.environ["RANK"])), flush=True)
        return factor * value

    scaled.__module__ = "__main__"  # as in a notebook: pickled by value
    (folder / "calls.py").write_text("def double(x):\n    print('twice', 2 * x, flush=True)\n    return 2 * x\n")
    import calls

    jobs = [
        session.launch(scaled, args=[5], nproc_per_node=2, name="scaled"),
        session.launch(calls.double, args=[4], nproc_per_node=1, cwd=str(folder), name="double"),
    ]
    assert [job.result(30) for job in jobs] == [[15, 15], [8]]
    path = folder / "run.dtrain"
    session.save(path, jobs)
    (folder / "calls.py").write_text("raise SystemExit(3)\n")
    with load_session(path) as saved:
        assert "factor * value" in saved.attach("scaled").code["scaled"]
        assert saved.attach("double").code["calls.py"].startswith("def double")
    result = rerun(path, session=session)
    assert result.is_well, [done.reason for done in result.done]
    assert [job.result() for job in result.jobs] == [[15, 15], [8]]
    assert result.jobs[0].logs(rank=1) == "scaled 30\n" and result.jobs[1].logs(rank=0) == "twice 8\n"


def test_cells_of_an_interactive_job_run_again_in_order(session: Session, tmp_path: Path) -> None:
    job = session.launch(interactive=True, nproc_per_node=2, name="cells")
    await_phase(job, JobPhase.HEALTHY)
    job.execute("x = 20").answers_or_raise()
    job.execute("x += 1\nprint('x is', x, flush=True)", ranks=[1]).answers_or_raise()
    path = tmp_path / "cells.dtrain"
    session.save(path, [job])  # while it runs
    job.cancel(force=True)
    result = rerun(path, session=session)
    assert result.is_well, result.done[0].reason
    assert "x is 21" in result.jobs[0].logs(rank=1) and "x is" not in result.jobs[0].logs(rank=0)


def test_a_running_job_is_saved_and_a_failing_rerun_is_told(session: Session, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = (
        f"import pathlib, time\nwhile not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.02)\nraise ValueError(1)"
    )
    job = session.launch(source=source, name="waits", nproc_per_node=1)
    await_phase(job, JobPhase.HEALTHY)
    path = tmp_path / "run.dtrain"
    session.save(path, [job])
    flag.write_text("")
    assert job.exception(30) is not None
    with load_session(path) as saved:
        assert saved.document.jobs[0].is_running and saved.attach("waits").phase is JobPhase.HEALTHY
    done = dtrain("rerun", str(path))
    assert done.returncode == 1
    assert "it was still running when it was saved" in done.stdout and "ValueError: 1" in done.stdout


def test_code_of_others_runs_only_with_consent(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    path = folder / "run.dtrain"
    session.save(path, [job])
    with load_session(path) as saved:
        assert saved.is_ours
    kept = key_path().read_bytes()
    key_path().write_bytes(bytes(32))  # as if it had been saved elsewhere
    try:
        known = session.job_ids()
        with pytest.raises(UsageError, match="--yes"):
            rerun(path, session=session)
        assert session.job_ids() == known
        assert rerun(path, yes=True, session=session).is_well
    finally:
        key_path().write_bytes(kept)


def test_what_is_missing_is_said_before_anything_starts(session: Session, folder: Path) -> None:
    (folder / "helper.py").write_text("try:\n    import no_such_package_x\nexcept ImportError: pass\n" + HELPER)
    job = trained(session, folder)
    path = folder / "run.dtrain"
    session.save(path, [job])
    known = session.job_ids()
    done = dtrain("rerun", str(path), "--check")
    assert done.returncode == 2 and "no_such_package_x is not installed" in done.stderr
    assert session.job_ids() == known


def test_papermill_runs_a_notebook_of_a_session_with_other_parameters(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    session.save(folder / "run.dtrain", [job])
    done = dtrain("notebook", str(folder / "run.dtrain"))
    assert done.returncode == 0, done.stderr
    known = set(session.job_ids())
    settings = {"run_again": True, "settings": {"lr": 0.3}}
    executed = papermill.execute_notebook(
        folder / "run.ipynb", folder / "out.ipynb", settings, cwd=folder, progress_bar=False, kernel_name="python3"
    )
    assert [cell.metadata.tags for cell in executed.cells if "injected-parameters" in cell.metadata.tags]
    printed = "".join(output.get("text", "") for cell in executed.cells for output in cell.get("outputs", ()))
    (new,) = set(session.job_ids()) - known
    assert f"{new} SUCCEEDED" in printed and session.attach(new).spec.args == ("--lr", "0.3")


def test_the_quickstarts_job_is_a_regression_test_of_itself(session: Session, tmp_path: Path) -> None:
    """As in CI: `dtrain rerun quickstart.dtrain --check`."""
    for name in ("digits.py", "digits_reported.py"):
        shutil.copy(NOTEBOOKS / name, tmp_path / name)
    job = session.launch(
        "digits_reported.py", args=["--epochs", "3"], cwd=str(tmp_path), nproc_per_node=2, checkpoint_every=50, seed=0
    )
    job.wait(50)
    path = tmp_path / "quickstart.dtrain"
    session.save(path, [job])
    result = rerun(path, check=Checking(exact=True), session=session)
    told = lines_of(result)
    assert result.is_well, result.done[0].lines
    assert {told[what] for what in ("end", "steps", "loss", "printed accuracy")} == {"same"}
    assert any(what.startswith("state at step") and verdict == "same" for what, verdict in told.items())


def test_every_launch_records_its_origin(session: Session, folder: Path) -> None:
    job = trained(session, folder)
    (event,) = [event for event in job.events() if isinstance(event, OriginRecorded)]
    assert [source.path for source in event.origin.sources] == ["train.py", "helper.py"]
