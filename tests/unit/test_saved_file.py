"""A saved session: what is in it, that nothing is told which must not be, and what becomes of a file nobody trusts."""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from workbench_widgets.follower import Follower

import workbench.requests as rq
from tests.unit.saved_files import CODE, LOSSES, ORIGIN, SPEC, START, FakeAsk, fake, interactive, save_fake
from workbench.errors import SavedFileError, UnknownJobError, UsageError
from workbench.events import CellSent
from workbench.feed import Update
from workbench.saved.page import report
from workbench.saved.session import load_session
from workbench.spec import EntrypointKind, JobSpec
from workbench.state import Checkpoint, JobPhase
from workbench.store.saved import archive
from workbench.store.saved.document import DOCUMENT, SEAL, Telemetry
from workbench.store.saved.seal import key_path
from workbench.telemetry import CellFinished, OutputWritten
from workbench.views.job import ViewBuilder

replace = msgspec.structs.replace


@pytest.fixture
def saved(dtrain_home: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.dtrain"
    save_fake(path)
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def rewrite(path: Path, change: dict[str, bytes | None]) -> Path:
    """The same zip with some files changed, added or (None) left out."""
    files: dict[str, bytes | None] = {**members(path), **change}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            if data is not None:
                file.writestr(name, data)
    return path


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_a_loaded_job_tells_what_the_live_one_told(saved: Path) -> None:
    asked = fake(origin=ORIGIN)
    live = asked._follow(None)
    builder = ViewBuilder()
    builder.add(live)
    with load_session(saved) as session:
        job = session.attach("trial")
        assert job.job_id == "trial-1" and job.phase is JobPhase.SUCCEEDED
        assert job.state == asked.state
        assert job.events() == asked.events
        assert msgspec.msgpack.encode(job.follow()) == msgspec.msgpack.encode(live)
        assert msgspec.json.encode(job.view()) == msgspec.json.encode(
            msgspec.structs.replace(builder.view(), is_saved=True)
        )
        assert job.timeline == builder.view().timeline
        assert repr(job.history()) == repr(asked.buckets())
        assert {b.rank for b in job.history(width=10.0, ranks=[1])} == {1}
        assert job.logs(rank=1) == "rank 1: accuracy 97.5%\n"
        assert [line.job_id for line in session.jobs()] == ["trial-1"]
        assert session.jobs()[0].step == len(LOSSES)
        assert [record.loss for record in session.record("trial-1").steps(0)] == LOSSES
        assert job.wait() is JobPhase.SUCCEEDED and job.exception() is None and job.result() is None
        assert "SUCCEEDED" in job._repr_mimebundle_()["text/plain"]


def test_all_that_a_follower_is_told_is_kept() -> None:
    """A field that is added to `Update` has to be added there, or said to come from the record."""
    assert {*Telemetry.__struct_fields__, "state", "events"} - {"frames"} == set(Update.__struct_fields__)


def test_a_saved_session_answers_what_a_pool_is_asked_about_jobs(saved: Path) -> None:
    with load_session(saved) as session:
        assert session.ask("job_counts", rq.CountJobs(search="TRI"), dict[str, int]) == {"SUCCEEDED": 1}
        assert session.ask("jobs", rq.ListJobs(search="x"), list) == [] and session.job_ids("tri") == ["trial-1"]
        assert session.pool_status().slots == 4


def test_panels_draw_a_saved_job(saved: Path) -> None:
    """The live page's own follower, over a file."""
    with load_session(saved) as session:
        follower = Follower("trial-1", session.attach, lost=lambda job: None)
        deadline = time.monotonic() + 10
        while follower.picture.view is None and time.monotonic() < deadline:
            time.sleep(0.01)
        follower.stop()
        assert follower.picture.view is not None and follower.picture.view.phase is JobPhase.SUCCEEDED


def test_code_is_kept_once_by_its_digest_and_put_back(saved: Path) -> None:
    files = members(saved)
    texts = {data.decode() for name, data in files.items() if name.startswith("code/")}
    assert texts == {CODE, "import torch\n"}
    assert CODE.encode() not in files["jobs/trial-1/events.jsonl"]
    with load_session(saved) as session:
        assert session.attach("trial-1").code == {"trial": CODE, "digits.py": "import torch\n"}
        assert session.attach("trial-1").spec == SPEC


def test_a_page_about_it_is_in_the_file(saved: Path, tmp_path: Path) -> None:
    """For whoever has the file and not this program: the same page as `report` makes, but for its heading."""
    page = members(saved)["report.html"].decode()
    with load_session(saved) as session:
        made = report([session.attach("trial-1")], "trial-1").decode()
    assert page == made and "lr = 0.05" in page and "accuracy" not in page
    spec = replace(SPEC, source="print('/root/x', 'hf_abcdefghijklmnopqrst')\n", args=("--api-key", "abcdefgh1"))
    save_fake(tmp_path / "secret.dtrain", asked=fake(spec))
    page = members(tmp_path / "secret.dtrain")["report.html"].decode()
    assert "[removed]" in page and not re.search("hf_|abcdefgh1|~{home}~", page)


def test_a_moment_before_the_end(saved: Path) -> None:
    with load_session(saved) as session:
        job = session.attach("trial-1")
        early = job.view(at=START)
        assert not early.phase.is_terminal and early.step == 0
        middle = job.view(at=START + 2.5)
        assert 0 < middle.step < len(LOSSES)


def test_cells_of_an_interactive_job_are_kept(dtrain_home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.dtrain"
    save_fake(path, asked=interactive())
    with load_session(path) as session:
        (sent,) = [event for event in session.attach("trial-1").events() if isinstance(event, CellSent)]
        assert sent.source == "x = 1\n" and sent.ranks == (0, 1)


def test_what_would_change_something_is_refused(saved: Path) -> None:
    with load_session(saved) as session:
        job = session.attach("trial-1")
        for act in (job.cancel, job.resume, lambda: job.resize(3), lambda: job.execute("1"), job.stacks, job.panel):
            with pytest.raises(UsageError, match="rerun"):
                act()
        with pytest.raises(UsageError):
            session.launch(source="1")
        with pytest.raises(UnknownJobError, match="trial-1"):
            session.attach("other")


def test_a_running_job_is_saved_as_it_stands(dtrain_home: Path, tmp_path: Path) -> None:
    def running(asked: FakeAsk) -> None:
        asked.events = asked.events[: [type(e).__name__ for e in asked.events].index("RankExited")]

    path = tmp_path / "run.dtrain"
    document = save_fake(path, running)
    assert document.jobs[0].is_running
    with load_session(path) as session, pytest.raises(UsageError, match="was still HEALTHY"):
        session.attach("trial-1").wait()


def test_the_seal_tells_ones_own_from_anothers(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with load_session(saved) as session:
        assert session.is_ours
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "other"))
    with load_session(saved) as session:
        assert not session.is_ours
        session.save(tmp_path / "copy.dtrain")  # saving it again does not make it one's own
    with load_session(tmp_path / "copy.dtrain") as session:
        assert not session.is_ours
    assert (tmp_path / "copy.dtrain").read_bytes() == saved.read_bytes()


def test_a_save_that_fails_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.os, "fsync", full)
    with pytest.raises(SavedFileError, match="No space left"):
        save_fake(saved)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == ["run.dtrain"]


def test_a_folder_that_is_not_there(dtrain_home: Path, tmp_path: Path) -> None:
    with pytest.raises(SavedFileError, match="no directory"):
        save_fake(tmp_path / "nothing" / "run.dtrain")


def test_a_checkpoint_goes_along_when_asked(dtrain_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000020"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"x" * 100)
    (folder / "__0_0.distcp").write_bytes(os.urandom(10_000))
    path = tmp_path / "run.dtrain"

    def with_one(asked: FakeAsk) -> None:
        asked.checkpoints = [
            Checkpoint(step=30, path=str(folder), world_size=2, saved_at=START, problem="torn"),
            Checkpoint(step=20, path=str(folder), world_size=2, saved_at=START),
        ]

    assert save_fake(path, with_one).jobs[0].included == ()
    document = save_fake(path, with_one, with_checkpoints=True)
    assert document.jobs[0].included == (20,)
    with load_session(path) as session:
        assert [one.step for one in session.attach("trial-1").checkpoints] == [30, 20]
        target = tmp_path / "out"
        session.archive.copy("checkpoints/trial-1/20/__0_0.distcp", target)
        assert target.read_bytes() == (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").unlink()
    (folder / ".metadata").unlink()
    assert "cannot be read" in " ".join(save_fake(path, with_one, with_checkpoints=True).left_out)


# --- what must not be in it -------------------------------------------------------------------------------------------

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_no_secret_and_no_home_path_gets_out(
    dtrain_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "ana"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CLUSTER_TOKEN", "swordfish-4711")
    spec = replace(
        SPEC,
        source=f"path = '{home}/data'\ntoken = '{TOKEN}'\n",
        args=("--api-key", "abcdef", "--data", f"{home}/data", "--url=https://ana:pw@host/x"),
        env={"OMP_NUM_THREADS": "2", "HF_TOKEN": TOKEN, "MODEL": "small-1234"},
        cwd=f"{home}/work",
    )
    asked = fake(spec, kills=True)
    asked.logs = {0: f"using {TOKEN}\nswordfish-4711\nread {home}/data\n"}
    half = len(TOKEN) // 2
    asked.output = tuple(
        OutputWritten(job_id="trial-1", rank=0, stream="stdout", text=part, time=START)
        for part in (f"with {TOKEN[:half]}", f"{TOKEN[half:]}\n", f"{home}/x\n")
    )
    asked.cells = (
        CellFinished(
            job_id="trial-1", cell_id="c", rank=0, ok=True, data={"text/plain": TOKEN}, payload=b"pickle-0815"
        ),
    )
    path = tmp_path / "run.dtrain"
    document = save_fake(path, asked=asked)
    everything = b"\n".join(members(path).values())
    for secret in (TOKEN, TOKEN[:half], "abcdef", "pw@", "swordfish-4711", "small-1234", str(home), "pickle-0815"):
        assert secret.encode() not in everything, secret
    told = "\n".join(document.left_out)
    for word in ("HF_TOKEN", "MODEL", "home directory", "token's form", "addresses", "pickles"):
        assert word in told, word
    assert document.jobs[0].env_left_out == ("HF_TOKEN", "MODEL")
    with load_session(path) as session:
        job = session.attach("trial-1")
        assert job.spec.env == {"OMP_NUM_THREADS": "2"} and job.spec.cwd == "~/work"
        assert job.spec.args[:4] == ("--api-key", "[removed]", "--data", "~/data")
        assert job.spec.source == f"path = '{home}/data'\ntoken = '[removed]'\n"  # this home, put back
        assert [entry.is_cut for entry in document.code.values()] == [True]
    kept = save_fake(path, asked=asked, env=["MODEL", "HF_TOKEN"])
    assert kept.jobs[0].env_left_out == ("HF_TOKEN",)  # a name that says so is never told


def test_a_function_is_left_out_and_said(dtrain_home: Path, tmp_path: Path) -> None:
    spec = JobSpec(kind=EntrypointKind.FUNCTION, entrypoint="train", payload=b"\x80pickle", nproc_per_node=2)
    document = save_fake(tmp_path / "run.dtrain", asked=fake(spec))
    assert "pickle" in document.left_out[0]
    with load_session(tmp_path / "run.dtrain") as session:
        assert session.attach("trial-1").spec.payload == b""
        with pytest.raises(UsageError, match="returned"):
            session.attach("trial-1").result()


def test_logs_that_cannot_be_had_are_said(dtrain_home: Path, tmp_path: Path) -> None:
    document = save_fake(tmp_path / "run.dtrain", lambda asked: setattr(asked, "logs", None))
    assert any("no worker is there" in line for line in document.left_out)


# --- files that are none ----------------------------------------------------------------------------------------------


def refused(path: Path, match: str) -> None:
    """With a clear error, and with nothing written beside the file."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(SavedFileError, match=match):
        session = load_session(path)
        for entry in session.document.jobs:
            job = session.attach(entry.job_id)
            _ = job.view(), job.logs(), job.code, job.history(width=1.0), session.record(entry.job_id).step_blocks
        session.archive.verify()
    assert sorted(path.parent.rglob("*")) == before


def test_what_is_no_session(dtrain_home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.dtrain"
    with pytest.raises(SavedFileError, match="No such file"):
        load_session(path)
    with pytest.raises(SavedFileError, match="cannot open"):
        load_session(tmp_path)
    for data, match in ((b"", "no saved session"), (b"hello" * 1000, "no saved session"), (b"PK\x03\x04xx", "torn")):
        path.write_bytes(data)
        refused(path, match)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "x")
    refused(path, "no session has")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("code/" + "0" * 64 + ".py", "x")
    refused(path, "no session.json")


def test_a_gigabyte_of_anything_is_refused_at_once(dtrain_home: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.dtrain"
    with path.open("wb") as file:
        file.truncate(2**30)  # sparse
    refused(path, "no saved session")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_torn_file(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    refused(saved, "torn")


def test_any_flipped_byte_is_noticed_or_harmless(saved: Path) -> None:
    """Nothing but a clear error comes of it, or the very same content."""
    data = saved.read_bytes()
    good = members(saved)
    for at in range(0, len(data), max(1, len(data) // 150)):
        saved.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            with load_session(saved) as session:
                found = {name: session.archive.read(name) for name in session.document.files}
        except SavedFileError:
            continue
        assert found == {name: good[name] for name in session.document.files}


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/passwd", "code/../../x.py", "jobs/../x/events.jsonl", "jobs/a/logs/../rank0.log", "x/",
             "checkpoints/a/1/..", "code\\..\\x.py"]
)  # fmt: skip
def test_names_that_lead_elsewhere(saved: Path, name: str) -> None:
    refused(rewrite(saved, {name: b"x"}), "no session has")


def test_edited_code_is_noticed(saved: Path) -> None:
    name = next(name for name in members(saved) if name.startswith("code/"))
    refused(rewrite(saved, {name: b"import os  # evil"}), "edited or damaged")


def test_edited_code_of_the_same_length_is_noticed(saved: Path) -> None:
    name, data = next((name, data) for name, data in members(saved).items() if name.startswith("code/"))
    refused(rewrite(saved, {name: b"#" * len(data)}), "edited or damaged")


def test_a_document_that_was_edited_is_nobodys(saved: Path) -> None:
    document = json.loads(members(saved)[DOCUMENT])
    document["dtrain"] = "9.9"
    rewrite(saved, {DOCUMENT: json.dumps(document).encode()})
    with load_session(saved) as session:
        assert not session.is_ours
    rewrite(saved, {SEAL: b"nonsense"})
    with load_session(saved) as session:
        assert not session.is_ours


@pytest.mark.parametrize(("version", "match"), [(3, "version 3; this dtrain workbench reads 1, 2"), (0, "version 0")])
def test_other_versions(saved: Path, version: int, match: str) -> None:
    document = json.loads(members(saved)[DOCUMENT])
    refused(rewrite(saved, {DOCUMENT: json.dumps({**document, "version": version}).encode()}), match)


@pytest.mark.parametrize(
    ("data", "match"),
    [(b"", "no saved session"), (b"[]", "no saved session"), (b'{"format": "x", "version": 1}', "but 'x'"),
     (b'{"format": "dtrain session", "version": 1}', "cannot be read")],
)  # fmt: skip
def test_documents_that_are_none(saved: Path, data: bytes, match: str) -> None:
    refused(rewrite(saved, {DOCUMENT: data}), match)


def test_what_is_missing_or_too_much(saved: Path) -> None:
    before = saved.read_bytes()
    refused(rewrite(saved, {"jobs/trial-1/telemetry.msgpack": None}), "is missing")
    saved.write_bytes(before)
    refused(rewrite(saved, {"jobs/other/events.jsonl": b""}), "not saved with it")


def test_a_zip_bomb_is_not_unpacked(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FILE", 2**20)
    refused(rewrite(saved, {"jobs/trial-1/steps.msgpack": bytes(2**21)}), "would unpack to more")


def test_a_zip_that_lies_about_its_sizes(saved: Path) -> None:
    """The size in its directory says little, what unpacks is large."""
    name = b"jobs/trial-1/telemetry.msgpack"
    rewrite(saved, {name.decode(): bytes(2**22)})
    data = bytearray(saved.read_bytes())
    at = data.rindex(name) - 46  # its entry in the directory at the end
    data[at + 24 : at + 28] = (100).to_bytes(4, "little")
    saved.write_bytes(bytes(data))
    refused(saved, "damaged|edited|larger")


def test_records_that_are_none(saved: Path) -> None:
    """With digests that fit: whoever makes a file by hand."""
    with load_session(saved) as session:
        document, good = session.document, {name: session.archive.read(name) for name in session.document.files}
    for name, data, match in (
        ("events.jsonl", b'{"event":"Nonsense","time":1}\n', "its record cannot be read"),
        ("events.jsonl", b"", "its record is empty"),
        ("events.jsonl", b'{"event":"Ticked","time":1}\n', "its record cannot be"),
        ("telemetry.msgpack", b"\xc1", "cannot be read"),
        ("steps.msgpack", msgspec.msgpack.encode([(0, b"odd")]), "its steps cannot be read"),
    ):
        archive.write(saved, document, {**good, f"jobs/trial-1/{name}": data})
        refused(saved, match)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "", "a b", "x" * 200])
def test_a_job_has_a_jobs_name(saved: Path, name: str) -> None:
    """Files are called after it, where nobody says another name."""
    document = json.loads(members(saved)[DOCUMENT])
    document["jobs"][0]["job_id"] = name
    refused(rewrite(saved, {DOCUMENT: json.dumps(document).encode()}), "a name that no job has")


# --- older files ------------------------------------------------------------------------------------------------------

VERSIONS = sorted((Path(__file__).parents[1] / "data").glob("saved_session_v*/run.dtrain"))


@pytest.mark.parametrize("path", VERSIONS, ids=lambda path: path.parent.name)
def test_files_of_older_versions_load(path: Path, dtrain_home: Path) -> None:
    with load_session(path) as session:
        assert f"_v{session.document.version}" in path.parent.name and not session.is_ours
        session.archive.verify()
        job = session.attach("trial-1")
        assert job.phase is JobPhase.SUCCEEDED and job.view().step == len(LOSSES)
        assert job.code["trial"] == CODE and job.logs(rank=0) == "rank 0: accuracy 97.5%\n"
        assert [record.loss for record in session.record("trial-1").steps(0)] == LOSSES


def test_a_function_of_version_2_is_there(dtrain_home: Path) -> None:
    with load_session(VERSIONS[1]) as session:
        job = session.attach("hello-1")
        assert job.code["hello"].startswith("def hello(name)") and job.spec.payload.startswith(b"\x80\x04")


def test_there_is_a_file_of_every_version() -> None:
    from workbench.store.saved.archive import READERS

    assert [path.parent.name for path in VERSIONS] == [f"saved_session_v{number}" for number in sorted(READERS)]
