"""Going back to a checkpoint: chosen by rank 0, checked by all, and only then read into the program's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.training import catalogue, files, manifest, states
from workbench.training.catalogue import Found
from workbench.training.manifest import Manifest
from workbench.training.saving import ROOT, Where
from workbench.training.states import UnfitError
from workbench.training.team import Team


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """`extras`: what each rank of the run that saved had given beside its state, in the order of its ranks."""

    step: int
    path: str
    extras: list[Any]


class Choice:
    """Checkpoints that may be gone back to, the best first. All ranks iterate at once, rank 0 leads.

    `resume`: a path; that one comes first then, and no newer one. `refuse` is called, in rank 0, for each that is not
    what was saved.
    """

    def __init__(self, where: Where, team: Team, refuse: Callable[[Found], None], resume: str = "") -> None:
        self._where, self._team, self._refuse, self._resume = where, team, refuse, resume

    def __iter__(self) -> Iterator[tuple[Path, Manifest]]:
        """Whole ones only: every byte of them has been read."""
        offers = iter(self._listed() if self._team.leads else ())
        while (offer := self._team.tell(self._next(offers))) is not None:
            path, made = offer
            problem = self._check(path, made)
            if not problem:
                yield path, made
            elif self._team.leads:
                self._refuse(Found(path=path, step=made.step, manifest=made, problem=problem))

    def _listed(self) -> list[Found]:
        folder = self._where.folder
        if not self._resume:
            return catalogue.candidates(folder)
        chosen = catalogue.look(Path(self._resume))
        older = (found for found in catalogue.scan(folder) if found.step < chosen.step)
        return [chosen, *sorted(older, key=lambda found: found.is_doubtful)]

    def _next(self, offers: Iterator[Found]) -> tuple[Path, Manifest] | None:
        for found in offers:
            if found.manifest is not None and not found.problem:
                return found.path, found.manifest
            self._refuse(found)
        return None

    def _check(self, path: Path, made: Manifest) -> str:
        """Each rank reads a part of the files."""
        names = sorted(made.files, key=lambda name: -made.files[name].size)
        mine = names[self._team.rank :: self._team.world_size]
        return next(filter(None, self._team.gather(manifest.find_problem(path, made, mine))), "")


def read_into(path: Path, state: Mapping[str, Any], team: Team) -> list[Any]:
    """Give the program's objects what a checked checkpoint holds, and return the ranks' extras.

    Raises `UnfitError` when it is of another program.
    """
    reader = files.Reader(path)
    of_rank = _objects_of(reader, team)
    tree = reader.read(targets(reader, state, of_rank))
    rest = tree.pop(ROOT)
    objects = files.unpack(rest["objects"][of_rank])
    if missing := [key for key in state if key not in tree and key not in objects]:
        raise UnfitError(f"the checkpoint {path} has no {missing[0]!r}, which the state names")
    states.put_back(state, tree, objects)
    return [files.unpack(rest["extras"][name]) for name in sorted(rest["extras"], key=int)]


def _objects_of(reader: files.Reader, team: Team) -> str:
    """Whose objects' states this rank is to take: its own where there were as many ranks, and they differed."""
    places = {place for place, _, _ in reader.tensors()}
    was_alike = len([place for place in places if place[:2] == (ROOT, "extras")]) == team.world_size
    own = str(team.rank)
    return own if was_alike and (ROOT, "objects", own) in places else "0"


def targets(reader: files.Reader, state: Mapping[str, Any], of_rank: str) -> dict[states.Path, Any]:
    """Tensors on the CPU to read into, laid out as the program's; raises `UnfitError` for one of another shape."""
    live, parameters = states.layouts(state), states.parameter_of(state)
    found: dict[states.Path, Any] = {path: None for path in reader.values() if path[0] in state}
    for path, size, dtype in reader.tensors():
        if path[0] == ROOT:
            if path[1] == "extras" or path[2] == of_rank:
                found[path] = torch.empty(size, dtype=dtype)
        elif path[0] in state:
            found[path] = _target(path, size, dtype, live.get(path), parameters.get(path[:3]))
    return found


def _target(
    path: states.Path, size: torch.Size, dtype: torch.dtype, live: torch.Tensor | None, parameter: torch.Tensor | None
) -> torch.Tensor:
    """An optimizer's tensor that is as large as its parameter is laid out as that is."""
    if live is not None and live.shape != size:
        raise UnfitError(
            f"the checkpoint does not fit: {states.name_of(path)} is {tuple(size)} in it, {tuple(live.shape)} here"
        )
    like = live if live is not None else parameter
    if like is None or like.shape != size:
        return torch.empty(size, dtype=dtype)
    return torch.empty_like(like, dtype=dtype, device="cpu")
