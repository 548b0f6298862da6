"""What ranks did and used lies in the job's record: after the runner has gone, bounded, its extremes kept."""

from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from workbench.feed import BeatFrame, Cursor, Update
from workbench.runner.live import LiveJob
from workbench.store.beats import EVERY, BeatStore, packed, unpacked
from workbench.store.jobfile import JobFile
from workbench.telemetry import RankBeat
from workbench.views.panels import PanelBuilder

MIB = 2**20


def beat(rank: int, time: float, *, rss: int = 100 * MIB, cpu: float = 50.0, step: int = 0) -> RankBeat:
    return RankBeat(
        job_id="a-1", restart_count=0, rank=rank, time=time, step=step, activity="COLLECTIVE", since=0.5,
        collective="all_reduce[20 float32]", collective_seq=step, rss=rss, cpu=cpu,
    )  # fmt: skip


def told_by(job_path: Path) -> Update:
    """What a client gets from a runner that has only the record."""
    again = LiveJob("a-1", JobFile.open(job_path, read_only=True))
    again.restore()
    update = again.update(Cursor(), 100.0)
    assert again.update(update.cursor, 100.0).usage == (), "nothing twice"
    again.close()
    return update


def test_another_runner_tells_what_ranks_used(live_job: LiveJob, job_path: Path) -> None:
    for second in range(20):
        for rank in range(2):
            live_job.report(beat(rank, 10.0 + second, rss=(100 + second) * MIB, cpu=10.0 * rank + second))
        live_job.flush(10.0 + second)
    panels = PanelBuilder()
    panels.add(told_by(job_path))
    moments = panels.view().resources
    assert [moment.start for moment in moments] == [10.0 + 2 * k for k in range(10)]
    first, last = moments[0].spreads, moments[-1].spreads
    assert (first["cpu"].least, first["cpu"].mean, first["cpu"].most) == (0.0, 5.0, 10.0)
    assert (last["rss"].least, last["rss"].most) == (118 * MIB, 118 * MIB) and "gpu" not in last


def test_a_client_that_was_there_and_one_that_comes_later_see_the_same(live_job: LiveJob) -> None:
    early, cursor = PanelBuilder(), Cursor()
    for second in range(30):
        live_job.report(beat(0, 10.0 + second, cpu=float(second)))
        live_job.flush(10.0 + second)
        update = live_job.update(cursor, 10.0 + second)
        early.add(update)
        cursor = update.cursor
    late = PanelBuilder()
    late.add(live_job.update(Cursor(), 40.0))
    seen, told = early.view().resources, late.view().resources
    assert [one.start for one in seen] == [one.start for one in told]
    assert max(one.spreads["cpu"].most for one in told) == max(one.spreads["cpu"].most for one in seen) == 29.0


def test_at_a_time_there_is_the_last_look_before_it(live_job: LiveJob, job_path: Path) -> None:
    for second in range(20):
        live_job.report(beat(0, 10.0 + second, step=second))
        live_job.report(beat(1, 10.25 + second, step=second))
        live_job.flush(10.0 + second)
    (frame,) = live_job.file.frames(until=19.9)
    assert frame.time <= 19.9 and [one.step for one in unpacked(frame)] == [8, 8]
    assert live_job.file.frames(until=9.0) == [] and len(live_job.file.frames()) == 10
    live_job.flush(30.0)
    assert unpacked(live_job.file.frames()[-1])[0].collective == "all_reduce[20 float32]"


def test_the_last_words_are_kept_at_the_end(live_job: LiveJob, job_path: Path) -> None:
    live_job.report(beat(0, 10.0, step=1))
    live_job.flush(10.0)
    live_job.report(beat(0, 10.5, step=7))
    live_job.flush(10.5)
    assert [unpacked(one)[0].step for one in live_job.file.frames()] == [1]
    live_job.close()
    with JobFile.open(job_path, read_only=True) as file:
        assert [unpacked(one)[0].step for one in file.frames()] == [1, 7]


@pytest.mark.parametrize(("ranks", "limits"), [(2, {"frames": 64}), (64, {"most": 40_000})])
def test_it_is_bounded_and_the_older_is_further_apart(tmp_path: Path, ranks: int, limits: dict[str, int]) -> None:
    connection = sqlite3.connect(tmp_path / "beats.sqlite", isolation_level=None)
    store = BeatStore(connection, **limits)
    store.resume()
    for frame in range(400):
        for rank in range(ranks):
            peak = 900.0 if (frame, rank) == (13, 1) else 50.0
            store.add(beat(rank, 10.0 + EVERY * frame, cpu=peak, step=frame * 1009 % 5003))
        store.flush()
    assert not store.problem
    (count, size) = connection.execute("SELECT count(*), sum(length(data) + length(used)) FROM beats").fetchone()
    assert count <= limits.get("frames", 400) and size <= limits.get("most", 10**9)
    times = [frame.time for frame in store.frames()]
    apart = [b - a for a, b in pairwise(times)]
    assert apart[-1] == EVERY and max(apart) > 4 * EVERY and apart[0] > apart[-1] and times[-1] == 808.0
    usage = store.usage()
    assert max(moment.spreads["cpu"].most for moment in usage) == 900.0, "the peak was long ago"
    assert sum(moment.spreads["cpu"].number for moment in usage) == 400 * ranks
    connection.close()


def test_a_damaged_frame_is_none() -> None:
    data = packed([beat(0, 1.0)])
    assert unpacked(BeatFrame(time=1.0, data=data[:-4])) in ([], [beat(0, 1.0)])
    assert unpacked(BeatFrame(time=1.0, data=b"no zlib")) == []
    assert unpacked(BeatFrame(time=1.0, data=packed([]) + b"rest")) == []


def test_a_record_of_before_has_none(job_path: Path) -> None:
    JobFile.create(job_path, "a-1").close()
    connection = sqlite3.connect(job_path)
    connection.execute("DROP TABLE beats")
    connection.commit()
    connection.close()
    with JobFile.open(job_path, read_only=True) as file:
        assert file.frames() == [] == file.frames(until=9.0) and file.usage() == ()
    with JobFile.open(job_path) as file:
        file.add_beat(replace(beat(0, 1.0), step=3))
        file.flush(2.0, final=True)
        assert [unpacked(one)[0].step for one in file.frames()] == [3]


def test_a_disk_that_is_full_is_told(live_job: LiveJob) -> None:
    live_job.file._connection.execute("PRAGMA max_page_count=1")
    for second in range(400):
        for rank in range(50):
            live_job.report(beat(rank, 10.0 + 2 * second, step=second * 7919 % 10007 + rank))
        live_job.flush(10.0 + 2 * second)
    assert any("use cannot be written" in one for one in live_job.file.problems)
