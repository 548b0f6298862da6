"""Checkpoint folders: published whole or not there, refused in words when they are not what was saved, pruned."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from workbench.agent.checkpoints import Checkpoints, checkpoint_dir
from workbench.spec import JobSpec
from workbench.training import catalogue, manifest
from workbench.training.manifest import FileRecord, Manifest, ManifestError

FILES = {"__0_0.distcp": b"weights" * 100, "__1_0.distcp": b"more" * 33, ".metadata": b"where"}


def save(folder: Path, step: int, files: dict[str, bytes] = FILES, agreed: bool | None = None) -> Path:
    partial = catalogue.partial_path(folder, step, "job-0")
    catalogue.begin(partial)
    for name, data in files.items():
        (partial / name).write_bytes(data)
    records = {name: manifest.checksum(partial / name) for name in files}
    made = Manifest(step=step, world_size=2, saved_at=1000.0 + step, files=records, agreed=agreed)
    return catalogue.publish(partial, made)


def steps(folder: Path) -> list[int]:
    return [found.step for found in catalogue.scan(folder)]


def test_a_manifest_comes_back() -> None:
    saved = Manifest(step=3, world_size=2, saved_at=1.5, files={"a": FileRecord(1, 2)}, job_id="é", torch="2.13")
    assert manifest.decode(manifest.encode(saved)) == saved
    assert len(saved.digest) == 32 and saved.size == 1


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ""])
def test_a_manifest_cannot_name_a_file_elsewhere(name: str) -> None:
    data = manifest.encode(Manifest(step=1, world_size=1, saved_at=0.0, files={name: FileRecord(1, 2)}))
    with pytest.raises(ManifestError, match="cannot be read"):
        manifest.decode(data)


def test_a_newer_format_is_named() -> None:
    data = manifest.encode(Manifest(step=1, world_size=1, saved_at=0.0, files={}, format=2))
    with pytest.raises(ManifestError, match="of format 2"):
        manifest.decode(data)


def test_every_flipped_bit_of_a_manifest_is_seen() -> None:
    data = manifest.encode(Manifest(step=410, world_size=2, saved_at=1.25, files={"a": FileRecord(10, 77)}))
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(ManifestError):
            manifest.decode(bytes(flipped))


def test_newest_first_and_nothing_where_there_is_no_folder(tmp_path: Path) -> None:
    assert catalogue.scan(tmp_path / "no") == [] and catalogue.newest(tmp_path / "no") is None
    for step in (20, 10, 100_000_000):
        save(tmp_path, step)
    assert steps(tmp_path) == [100_000_000, 20, 10]
    newest = catalogue.newest(tmp_path)
    assert newest is not None and (newest.step, newest.problem) == (100_000_000, "")
    assert newest.manifest is not None and newest.manifest.size == sum(map(len, FILES.values()))


def test_what_is_no_checkpoint_is_not_listed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    catalogue.begin(catalogue.partial_path(tmp_path, 20, "job-1"))
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").touch()
    assert steps(tmp_path) == [10]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (truncate, "is truncated|is damaged"),
        (flip, "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), "bytes; it had|is damaged"),
    ],
)
@pytest.mark.parametrize("name", [*FILES, manifest.NAME])
def test_harm_is_named_and_the_one_before_taken(tmp_path: Path, harm, words: str, name: str) -> None:  # type: ignore[no-untyped-def]
    save(tmp_path, 10)
    harm(save(tmp_path, 20) / name)
    newest, before = Checkpoints().listing(tmp_path, thorough=True)
    assert newest.problem.startswith(name)
    assert re.search(words, newest.problem)
    assert before.problem == ""
    assert Checkpoints().newest(tmp_path) == before.path  # also who has not looked himself


def test_a_thorough_result_is_kept_until_the_files_change(tmp_path: Path) -> None:
    path, known = save(tmp_path, 10), Checkpoints()
    flip(path / ".metadata")
    assert known.listing(tmp_path)[0].problem == ""
    assert known.listing(tmp_path, thorough=True)[0].problem
    assert known.listing(tmp_path)[0].problem and known.newest(tmp_path) == ""
    flip(path / ".metadata")
    assert known.listing(tmp_path, thorough=True)[0].problem == ""
    assert known.newest(tmp_path) == str(path) == Checkpoints().newest(tmp_path)


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / "step-00000020")
    assert "is that of step 10" in catalogue.scan(tmp_path)[0].problem


def test_an_unreadable_value_is_listed_with_its_problem(tmp_path: Path) -> None:
    (save(tmp_path, 10) / manifest.NAME).unlink()
    (value,) = Checkpoints().listing(tmp_path)
    assert (value.step, value.world_size, value.problem) == (10, 0, "manifest.json is missing")


def test_the_same_step_saved_again_stands_beside_the_first(tmp_path: Path) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 10, {"a": b"new"})
    assert first.name != second.name
    newest = catalogue.newest(tmp_path)
    assert newest is not None and newest.path == second and steps(tmp_path) == [10, 10]


def test_an_older_choice_leaves_the_newer_ones_behind(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, step) for step in (10, 20, 30)}
    catalogue.abandon(tmp_path, paths[20].name)
    assert [found.is_abandoned for found in catalogue.scan(tmp_path)] == [True, False, False]
    assert catalogue.newest(tmp_path) == catalogue.look(paths[20])
    again = save(tmp_path, 30)
    assert catalogue.newest(tmp_path) == catalogue.look(again)
    catalogue.abandon(tmp_path, paths[30].name)  # it can still be chosen
    assert [found.step for found in catalogue.candidates(tmp_path)] == [30, 20, 10]


@pytest.mark.parametrize(
    ("keep", "every", "left"), [(2, 0, [60, 50]), (1, 20, [60, 40, 20]), (9, 0, [60, 50, 40, 30, 20, 10])]
)
def test_prune_keeps_the_newest_and_each_mth(tmp_path: Path, keep: int, every: int, left: list[int]) -> None:
    for step in range(10, 70, 10):
        save(tmp_path, step)
    catalogue.prune(tmp_path, keep, every)
    assert steps(tmp_path) == left
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_its_ranks_did_not_agree_on_comes_last_and_does_not_cost_what_they_did(tmp_path: Path) -> None:
    for step, agreed in ((10, True), (20, True), (30, False), (40, False), (50, False)):
        save(tmp_path, step, agreed=agreed)
    assert [found.step for found in catalogue.candidates(tmp_path)] == [20, 10, 50, 40, 30]
    newest = catalogue.newest(tmp_path)
    assert newest is not None and newest.step == 20
    catalogue.prune(tmp_path, 2)
    assert steps(tmp_path) == [50, 40, 20]
    save(tmp_path, 60, agreed=True)
    catalogue.prune(tmp_path, 2)
    assert steps(tmp_path) == [60, 50]


def test_prune_never_costs_the_newest_whole_one(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    for step in (30, 40):
        truncate(tmp_path / f"step-000000{step}" / ".metadata")
    assert catalogue.prune(tmp_path, 1) == ["step-00000010"]
    assert steps(tmp_path) == [40, 30, 20]
    truncate(tmp_path / "step-00000020" / ".metadata")
    assert catalogue.prune(tmp_path, 1) == []


def test_prune_forgets_what_was_left_behind_once_it_is_overtaken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    catalogue.abandon(tmp_path, "step-00000010")
    save(tmp_path, 25)
    catalogue.prune(tmp_path, 3)
    assert steps(tmp_path) == [30, 25, 10]


def test_leftovers_of_this_job_go_and_others_stay(tmp_path: Path) -> None:
    mine, other = (catalogue.partial_path(tmp_path, 5, tag) for tag in ("job-0", "job-b-0"))
    for path in (mine, other, tmp_path / ".deleted-step-00000001"):
        catalogue.begin(path)
    catalogue.remove_leftovers(tmp_path, "job")
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_listing_survives_what_vanishes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    gone = tmp_path / "step-00000020"
    monkeypatch.setattr(catalogue, "_named", lambda _: iter([((20, 0), gone), ((10, 0), tmp_path / "step-00000010")]))
    assert steps(tmp_path) == [10]


def test_random_harm_is_always_refused(tmp_path: Path) -> None:
    chance, path = random.Random(7), save(tmp_path, 10)
    for number in range(200):
        target = path / chance.choice([*FILES, manifest.NAME])
        whole = target.read_bytes()
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        target.write_bytes(data if number % 2 else whole[: chance.randrange(len(whole))])
        found = catalogue.look(path)
        problem = manifest.find_problem(path, found.manifest) if found.manifest else found.problem
        assert problem.startswith(target.name), (number, problem)
        target.write_bytes(whole)
    assert catalogue.look(path).problem == ""


def test_where_checkpoints_lie() -> None:
    job = Path("/jobs/j")
    assert checkpoint_dir(JobSpec(), job) == job / "checkpoints"
    assert checkpoint_dir(JobSpec(cwd="/home/ana", checkpoint_dir="out"), job) == Path("/home/ana/out")
    assert checkpoint_dir(JobSpec(cwd="/home/ana", checkpoint_dir="/data"), job) == Path("/data")
