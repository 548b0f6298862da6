"""A checkpoint says what was in it, and a load proves that this is what there is now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workbench.training import manifest, states
from workbench.training.checkpoint import Checkpointer
from workbench.training.manifest import Manifest
from workbench.training.proof import difference, is_proof, prove
from workbench.training.saving import Where
from workbench.training.team import Team

Facts = list[tuple[str, dict[str, Any]]]


def program(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def proof_of(state: dict[str, Any]) -> str:
    return prove(states.take(state)).whole


def keeper(folder: Path, facts: Facts) -> Checkpointer:
    team = Team.current()
    assert team is not None
    return Checkpointer(Where(folder=folder), team, lambda event, **fields: facts.append((event, fields)))


def test_any_changed_bit_of_the_state_changes_it() -> None:
    state = program(1)
    before = proof_of(state)
    assert proof_of(state) == before
    for tensor in (state["model"][0].weight, state["model"][1].running_mean):
        tensor.data.view(-1)[1:2].view(torch.int32).bitwise_xor_(1)
        assert proof_of(state) != before
        tensor.data.view(-1)[1:2].view(torch.int32).bitwise_xor_(1)
    held = state["optimizer"].state[state["model"][0].weight]["exp_avg_sq"]
    held.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 31)
    assert difference(before, proof_of(state)).startswith("what was loaded is not what was saved")


def test_another_layout_cannot_be_compared() -> None:
    one, other = proof_of(program(1)), proof_of({"model": nn.Linear(3, 3)})
    assert difference(one, other) == ""
    assert not is_proof(one, other)
    assert not is_proof("", "")


def test_a_load_proves_what_it_loaded(tmp_path: Path) -> None:
    facts: Facts = []
    saved = program(1)
    first = keeper(tmp_path, facts)
    assert first.save(saved, 2)
    assert first.finish(20)
    state = program(2)
    assert keeper(tmp_path, facts).load(state) is not None
    assert facts[-1][0] == "RunResumed"
    assert facts[-1][1]["is_proved"]
    assert proof_of(state) == proof_of(saved)


def test_a_load_that_went_wrong_is_refused_and_the_one_before_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk gave back was whole: its own checksums say nothing of what happens after."""
    facts: Facts = []
    first, state = keeper(tmp_path, facts), program(1)
    for step in (2, 3):
        assert first.save(state, step, wait=True)
        assert first.finish(20)
    put_back, calls = states.put_back, []

    def spoil(live: dict[str, Any], *args: Any) -> None:
        put_back(live, *args)
        calls.append(live)
        if len(calls) == 1:
            live["model"][0].weight.data[0, 0] += 1

    monkeypatch.setattr(states, "put_back", spoil)
    loaded = keeper(tmp_path, facts).load(program(2))
    assert loaded is not None
    assert loaded.step == 2
    ((_, refused),) = [fact for fact in facts if fact[0] == "CheckpointRefused"]
    assert "what was loaded is not what was saved" in refused["checkpoint"]["problem"]


def test_a_manifest_without_a_proof_is_read_as_before() -> None:
    old = Manifest(step=3, world_size=1, saved_at=1.0, files={})
    data = manifest.encode(old)
    assert b"proof" not in data
    assert b"agreed" not in data
    assert manifest.decode(data) == old
    new = Manifest(step=3, world_size=2, saved_at=1.0, files={}, proof="1-2", agreed=False)
    assert manifest.decode(manifest.encode(new)) == new
