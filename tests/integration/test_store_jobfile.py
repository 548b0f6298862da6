"""Job files on a real disk: durable events, thinned samples, bad files, a full disk."""

from __future__ import annotations

import math
import sqlite3
import stat
import threading
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from workbench.blackbox import STEP
from workbench.errors import JobFileError, StoreError
from workbench.events import CancelRequested, Event, LaunchRequested, RankStarted, Ticked
from workbench.feed import Bucket
from workbench.spec import JobSpec
from workbench.store import samples
from workbench.store.jobfile import JobFile, salvage
from workbench.store.packing import pack_buckets, unpack_buckets
from workbench.telemetry import StepsTaken

LAUNCH = LaunchRequested(time=1.0, job_id="a-1", spec=JobSpec(entrypoint="train.py"))
T0 = 1_790_000_400.0  # a multiple of every tier up to 600 s


def steps(rank: int, first: float, count: int = 1, every: float = 0.1, loss: float = math.nan) -> StepsTaken:
    """`count` steps of one rank, `every` s apart, the first ending at `first`; 8 samples each."""
    records = [(k, first + k * every, every, 0.0, 0.01, 0.02, 0.03, 0.01, 0.0, 8.0, 0.0, loss) for k in range(count)]
    return StepsTaken(job_id="a-1", restart_count=0, rank=rank, block=b"".join(STEP.pack(*r) for r in records))


def fill(file: JobFile, seconds: int, ranks: int = 2, start: float = T0) -> None:
    """Ten steps a second and rank, flushed each second."""
    for second in range(seconds):
        for rank in range(ranks):
            file.add_steps(steps(rank, start + second + 0.05, 10, loss=0.5))
        file.flush(start + second + 1.6)


def samples_in(buckets: list[Bucket]) -> float:
    return sum(bucket.samples for bucket in buckets)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "a-1" / "job.sqlite"


def test_events_come_back_numbered_and_in_order_after_reopening(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        assert file.append(LAUNCH) == 1
        assert file.append_all([Ticked(time=2.0), CancelRequested(time=3.0, by="me")]) == 3
    with JobFile.open(path) as file:
        assert file.job_id == "a-1"
        assert file.append(Ticked(time=4.0)) == 4
        assert file.events(2) == [(3, CancelRequested(time=3.0, by="me")), (4, Ticked(time=4.0))]
        assert file.events()[0] == (1, LAUNCH)


def test_an_event_is_on_disk_when_append_returns(path: Path) -> None:
    """What a second connection sees, without the writer closing or flushing, a crash would leave."""
    with JobFile.create(path, "a-1") as file, JobFile.open(path, read_only=True) as other:
        file.append(LAUNCH)
        assert file._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert other.events() == [(1, LAUNCH)]
        file.add_steps(steps(0, T0, 10))
        file.flush(T0 + 5)
        assert file._connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_files_are_private(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.append(LAUNCH)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
    assert set(modes.values()) == {0o600} and "job.sqlite-wal" in modes


def test_a_reader_does_not_block_the_writer(path: Path) -> None:
    with JobFile.create(path, "a-1") as file, JobFile.open(path, read_only=True) as reader:
        file.append(LAUNCH)
        reader._connection.execute("BEGIN")
        assert len(reader.events()) == 1  # holds its snapshot open
        assert file.append(Ticked(time=2.0)) == 2 and file.problems == ()
        assert len(reader.events()) == 1
        reader._connection.execute("COMMIT")
        assert len(reader.events()) == 2


def test_only_its_own_thread_may_use_it(path: Path) -> None:
    caught: list[BaseException] = []

    def use(file: JobFile) -> None:
        try:
            file.events()
        except BaseException as error:
            caught.append(error)

    with JobFile.create(path, "a-1") as file:
        thread = threading.Thread(target=use, args=(file,))
        thread.start()
        thread.join(10)
    assert "thread" in str(caught[0])


# --- bad files --------------------------------------------------------------------------------------------------------


def test_a_newer_format_is_refused_with_the_fix(path: Path) -> None:
    JobFile.create(path, "a-1").close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(JobFileError, match=r"newer.*format 99.*pip install --upgrade"):
        JobFile.open(path)


@pytest.mark.parametrize("content", [b"", b"not a database at all, not a database" * 99])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.sqlite"
    path.write_bytes(content)
    with pytest.raises(JobFileError, match=r"not the record|damaged"):
        JobFile.open(path, read_only=True)
    assert path.read_bytes() == content


def test_another_databases_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t(x)")
    connection.close()
    with pytest.raises(JobFileError, match="is not the record of a job"):
        JobFile.open(path)


def test_a_missing_record_says_so(path: Path) -> None:
    with pytest.raises(JobFileError, match="is missing"):
        JobFile.open(path)


def test_a_torn_file_says_what_can_be_done_and_gives_up_its_whole_events(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.append(LAUNCH)
        file.append_all([RankStarted(time=2.0, restart_count=0, rank=k, pid=k + 1) for k in range(2000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(JobFileError, match=r"damaged.*logs.*salvage"), JobFile.open(path, read_only=True) as file:
        file.events()
    saved = salvage(path)
    assert saved[0] == LAUNCH and 10 < len(saved) < 2001


def test_a_flipped_bit_in_telemetry_costs_one_row(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        fill(file, 3)
        file._connection.execute("UPDATE buckets SET data = x'0200000011' WHERE start = ? AND width = 1", (T0,))
        assert samples_in(file.buckets()) == 2 * 2 * 80


# --- a disk that is full or cannot be written -------------------------------------------------------------------------


def test_create_where_it_cannot_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file, not a directory")
    with pytest.raises(StoreError, match="cannot make the directory"):
        JobFile.create(tmp_path / "jobs" / "a-1" / "job.sqlite", "a-1")
    assert [p.name for p in tmp_path.iterdir()] == ["jobs"]


def test_create_on_a_full_disk_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.store.database.SPARE", 2**60)
    with pytest.raises(StoreError, match=r"only \d+ kB are free.*free some disk space"):
        JobFile.create(path, "a-1")
    assert not path.parent.exists()


def test_create_does_not_overwrite(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.append(LAUNCH)
    with pytest.raises(JobFileError, match="is there already"):
        JobFile.create(path, "a-1")
    with JobFile.open(path) as file:
        assert len(file.events()) == 1


def test_events_that_a_full_disk_refuses_stay_in_memory_and_are_tried_again(path: Path) -> None:
    big = [RankStarted(time=2.0, restart_count=0, rank=k, pid=1, log_path="x" * 500) for k in range(1000)]
    with JobFile.create(path, "a-1") as file:
        file.append(LAUNCH)
        (pages,) = file._connection.execute("PRAGMA page_count").fetchone()
        file._connection.execute(f"PRAGMA max_page_count={pages + 2}")  # SQLite then says: disk is full
        assert file.append_all(big) == 1001
        file.add_steps(steps(0, T0, 10_000, every=0.0001))
        file.flush(T0 + 5)
        assert "1000 events of this job are in memory only" in file.problems[0] and "full" in file.problems[0]
        assert "telemetry" in file.problems[1] and file.dropped == 10_000
        assert [number for number, _ in file.events(999)] == [1000, 1001]
        file._connection.execute("PRAGMA max_page_count=1000000")
        file.flush(T0 + 6)
        assert not [problem for problem in file.problems if "events" in problem]
    with JobFile.open(path) as file:
        assert [event for _, event in file.events()] == [LAUNCH, *big]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_steps_become_one_bucket_a_rank_and_second(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.add_steps(steps(0, T0 + 0.25, 3, every=0.25, loss=0.5))
        file.flush(T0 + 0.9)
        assert file.buckets() == []  # its second is not over
        file.flush(T0 + 1.6)
        (bucket,) = file.buckets()
    assert (bucket.rank, bucket.start, bucket.width, bucket.steps, bucket.last_step) == (0, T0, 1.0, 3, 2)
    assert (bucket.samples, bucket.loss) == (24.0, 0.5)
    assert bucket.duration == pytest.approx(0.75) and bucket.comm == pytest.approx(0.09)


def test_the_learning_rate_is_kept_and_older_rows_have_none(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.add_steps(replace(steps(0, T0 + 0.05, 10), learning_rate=0.025))
        file.flush(T0 + 1.6)
    with JobFile.open(path) as file:
        (bucket,), (total,) = file.buckets(), file.totals()
    assert bucket.learning_rate == total.learning_rate == 0.025
    old = pack_buckets([bucket])[:4] + zlib.compress(zlib.decompress(pack_buckets([bucket])[4:])[:-8])
    (read,) = unpack_buckets(old, bucket.start, bucket.width)
    assert read.learning_rate is None and replace(read, learning_rate=0.025) == replace(bucket, loss=read.loss)


def test_a_late_step_is_counted_once_and_no_returned_bucket_changes(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        fill(file, 2)
        before = file.buckets()
        cursor = max(bucket.start + bucket.width for bucket in before)
        file.add_steps(steps(1, T0 + 0.5))  # ended two seconds ago
        file.flush(T0 + 4)
        assert file.buckets(until=cursor) == before
        (late,) = file.buckets(since=cursor)
    assert (late.start, late.samples) == (cursor, 8.0)


def test_a_clock_that_is_ahead_does_not_hide_its_steps(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.add_steps(steps(0, T0 + 5000))
        file.flush(T0 + 1.0)
        file.flush(T0 + 3.0)
        assert [bucket.start for bucket in file.buckets()] == [T0 + 1.0]


def test_the_end_writes_the_last_second_too(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        file.add_steps(steps(0, T0 + 0.1, 3))
        file.flush(T0 + 0.5, final=True)
        assert samples_in(file.buckets()) == 24
        file.add_steps(steps(0, T0 + 0.4, 1))
    with JobFile.open(path, read_only=True) as file:
        assert samples_in(file.buckets()) == 32


def test_following_by_cursor_sees_every_sample_once(path: Path) -> None:
    seen, cursor = 0.0, 0.0
    with JobFile.create(path, "a-1") as file:
        for second in range(130):
            file.add_steps(steps(0, T0 + second + 0.05, 10))
            file.flush(T0 + second + 1.2)
            if second % 7 == 0:
                buckets = file.buckets(since=cursor)
                seen += samples_in(buckets)
                cursor = max([cursor, *(b.start + b.width for b in buckets)])
        file.flush(T0 + 200)
        assert seen + samples_in(file.buckets(since=cursor)) == 130 * 80


@pytest.mark.parametrize("width", [None, 1.0, 5.0, 10.0, 60.0, 90.0, 600.0, 1e9])
def test_every_width_tells_the_same_sums(path: Path, width: float | None) -> None:
    with JobFile.create(path, "a-1") as file:
        fill(file, 95)
        for ranks, count in ((None, 2), ([1], 1)):
            found = file.buckets(width=width, ranks=ranks)
            assert samples_in(found) == 95 * 80 * count
            assert sum(bucket.duration for bucket in found) == pytest.approx(95 * count, rel=1e-6)
        assert sum(total.samples for total in file.totals(width=width)) == 95 * 160


def test_reopening_goes_on_where_it_was(path: Path) -> None:
    """Also with buckets of every tier half full, as a killed scheduler leaves them."""
    with JobFile.create(path, "a-1") as file:
        fill(file, 67)
    with JobFile.open(path) as file:
        fill(file, 67, start=T0 + 67)
        file.flush(T0 + 150)
        tens = file._connection.execute("SELECT start FROM buckets WHERE width = 10 ORDER BY start").fetchall()
        assert [start for (start,) in tens] == [T0 + 10 * k for k in range(14)]
        assert samples_in(file.buckets(width=60)) == samples_in(file.buckets(width=1)) == 134 * 160


@pytest.mark.parametrize("most", [1, 40, 300, 5000])
def test_at_most_so_many_buckets_recent_seconds_fine(path: Path, most: int) -> None:
    with JobFile.create(path, "a-1") as file:
        fill(file, 200)
        found = file.buckets(most=most)
        assert len(found) <= max(most, 2)
        assert samples_in(found) == 200 * 160
        assert max(b.start + b.width for b in found) == T0 + 200
        if most == 40:
            assert [b.start for b in found if b.width == 1.0 and b.rank == 0] == [T0 + 190 + k for k in range(10)]
        for rank in (0, 1):
            mine = [b for b in found if b.rank == rank]
            assert all(a.start + a.width <= b.start for a, b in pairwise(mine))


def test_old_seconds_go_and_their_sums_stay(path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        fill(file, 125)
        file.flush(T0 + 3600 + 90)
        widths = file._connection.execute("SELECT width, min(start) FROM buckets GROUP BY width").fetchall()
        assert dict(widths)[1.0] == T0 + 120 and dict(widths)[10.0] == T0
        assert samples_in(file.buckets(width=1)) == samples_in(file.buckets()) == 125 * 160
        assert sum(total.samples for total in file.totals()) == 125 * 160


def test_steps_are_kept_in_a_bounded_ring(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_PRUNE_EVERY", 0.0)
    with JobFile.create(path, "a-1") as file:
        file._samples._raw_bytes = 3000
        fill(file, 90)
        (held,) = file._connection.execute("SELECT sum(size) FROM steps").fetchone()
        assert 0 < held <= 3000
        kept = file.steps(1)
        assert kept[-1].end == pytest.approx(T0 + 89.95) and kept[0].end > T0
        assert [record.end for record in file.steps(1, since=T0 + 89.5)] == pytest.approx(
            [T0 + 89.55 + k / 10 for k in range(5)]
        )
        assert len(file.steps(1, most=3)) == 3


def test_too_much_at_once_is_dropped_and_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "BUFFER_BYTES", 100 * STEP.size)
    with JobFile.create(path, "a-1") as file:
        for rank in range(3):
            file.add_steps(steps(rank, T0, 40, every=0.01))
        file.flush(T0 + 2)
        assert file.dropped == 40 and samples_in(file.buckets()) == 80 * 8


@pytest.mark.parametrize("block", [b"short", STEP.pack(1, math.nan, *[1.0] * 10), STEP.pack(1, math.inf, *[1.0] * 10)])
def test_rubbish_from_a_rank_is_dropped(path: Path, block: bytes) -> None:
    with JobFile.create(path, "a-1") as file:
        file.add_steps(StepsTaken(job_id="a-1", restart_count=0, rank=0, block=block))
        file.add_steps(steps(1, T0))
        file.flush(T0 + 2)
        assert samples_in(file.buckets()) == 8


def test_a_record_is_read_in_a_directory_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    with JobFile.create(path, "a-1") as file:
        event: Event = LAUNCH
        file.append(event)
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with JobFile.open(path, read_only=True) as file:
            assert file.events() == [(1, LAUNCH)]
    finally:
        path.parent.chmod(0o700)
