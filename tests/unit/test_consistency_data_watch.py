"""Looking at what a rank reads never disturbs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

from workbench.training.consistency.data import DataWatch, Pass
from workbench.training.patching import Patches


@pytest.fixture
def watch() -> Iterator[DataWatch]:
    made, patches = DataWatch(), Patches()
    made.install(patches)
    yield made
    patches.undo()


def test_a_sampler_that_is_a_list_is_read_as_ever(watch: DataWatch) -> None:
    """As the rest of a pass is after a resume on another number of ranks; a list has no weak references."""
    loader = DataLoader(list(range(4)), sampler=[3, 1], batch_size=None)  # type: ignore[arg-type]
    assert [int(item) for item in loader] == [3, 1]
    assert watch.current is not None and watch.current.sampler() is None


def test_a_look_that_fails_is_the_last_one(
    watch: DataWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(Pass, "drew", fail)
    assert [batch.tolist() for batch in DataLoader(list(range(4)), batch_size=2)] == [[0, 1], [2, 3]]
    assert capsys.readouterr().err.count("no longer compared: RuntimeError: of ours") == 1
