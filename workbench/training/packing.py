"""A state (nested containers of tensors and plain values) in a slot's memory: the tensors' bytes, and a text.

The text is a pickle in which each tensor is a `Place`. Pickled rather than JSON: it keeps integer keys, tuples, exact
floats, numpy's arrays and a library's own classes, in C, each step. It is read only from memory that this job's own
ranks have written, and that no other user's process can have. Needs torch.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from workbench.training import slot

Meshes: TypeAlias = Mapping[Any, Any]  # `mesh_key` of a device mesh: the mesh
Away: TypeAlias = Mapping[int, torch.Tensor]
TENSOR: Final = "torch.distributed.tensor"  # where DTensor is; not loaded here, which takes a while
PLAIN: Final = (torch.Tensor, torch.nn.Parameter)  # other subclasses hold what their bytes do not say


class Place(NamedTuple):
    """Where a tensor's bytes are, counted from the start of the slot."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    size: int


class Packed(NamedTuple):
    """A state taken apart. `tensors` are those of the program, `places` where each is to go; `end` of the last."""

    text: bytes
    tensors: list[torch.Tensor]
    places: list[Place]
    end: int
    meshes: dict[Any, Any]


def take_apart(value: Any, away: Mapping[int, int] | None = None) -> Packed:
    """Raises what pickling does of a value that cannot be pickled.

    `away`: by `id`, the numbers of tensors that another rank copies.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, away or {})
    pickler.dump(value)
    pickler.clear_memo()  # it holds the program's tensors
    return Packed(stream.getvalue(), pickler.tensors, pickler.places, pickler.end, pickler.meshes)


def put_together(text: bytes | memoryview, memory: torch.Tensor, meshes: Meshes, away: Away | None = None) -> Any:
    """The state again; its tensors are views of `memory`, the slot as bytes.

    A tensor that was distributed becomes one on the same mesh of `meshes`; without it a `LookupError` says so, as of
    one that is not in `away`, where the others' are by number. `away` None: those are None.
    """
    return _Unpickler(io.BytesIO(text), memory, meshes, away).load()


def view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory[place.at : place.at + place.size].view(place.dtype).view(place.shape)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers with each tensor changed; for states as `put_together` makes them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        copy = value.copy()  # keeps its class
        copy.update({key: map_tensors(item, change) for key, item in value.items()})
        return copy
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def mesh_key(mesh: Any) -> Any:
    """What tells a device mesh from another, in every process and generation."""
    return (mesh.device_type, tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names)


def find_meshes(value: Any) -> dict[Any, Any]:
    """The device meshes that a state's tensors are on."""
    return take_apart(value).meshes


def place_tensor(*place: Any) -> torch.Tensor:
    """In a text, stands for a view of the slot that the text is in: `_Unpickler` has its own."""
    raise pickle.UnpicklingError("the text of a slot is read by put_together")


def place_away(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """In a text, stands for a tensor that another rank has copied."""
    raise pickle.UnpicklingError("the text of a slot is read by put_together")


def place_shards(local: torch.Tensor, key: Any, placements: Any, shape: Any, stride: Any) -> Any:
    """In a text, stands for a distributed tensor."""
    raise pickle.UnpicklingError("the text of a slot is read by put_together")


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, away: Mapping[int, int]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._away = away
        self.tensors: list[torch.Tensor] = []
        self.places: list[Place] = []
        self.meshes: dict[Any, Any] = {}
        self.end = slot.SIZE

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN and (number := self._away.get(id(value))) is not None:
            return place_away, (number, value.dtype, tuple(value.shape))
        if kind in PLAIN and value.layout is torch.strided and not (value.is_quantized or value.is_meta):
            return place_tensor, self._place(value.detach())
        if TENSOR in sys.modules and kind is sys.modules[TENSOR].DTensor:
            mesh, spec = value.device_mesh, value._spec
            key = mesh_key(mesh)
            self.meshes[key] = mesh
            return place_shards, (value.to_local().detach(), key, spec.placements, value.shape, value.stride())
        return NotImplemented

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        place = (tensor.dtype, tuple(tensor.shape), slot.align(self.end), tensor.nbytes)
        self.tensors.append(tensor)
        self.places.append(Place._make(place))
        self.end = place[2] + place[3]
        return place  # as a plain tuple: it is pickled in C


class _Unpickler(pickle.Unpickler):
    """Its functions are no methods of its own: it would be in a cycle, and the slot's memory be held by it."""

    def __init__(self, stream: io.BytesIO, memory: torch.Tensor, meshes: Meshes, away: Away | None) -> None:
        super().__init__(stream)
        self._functions = {
            "place_tensor": functools.partial(_view, memory),
            "place_shards": functools.partial(_distribute, meshes),
            "place_away": functools.partial(_fetch, away),
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._functions:
            return self._functions[name]
        return super().find_class(module, name)


def _view(memory: torch.Tensor, *place: Any) -> torch.Tensor:
    return view(memory, Place._make(place))


def _fetch(away: Away | None, number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    if away is None:
        return None
    found = away.get(number)
    if found is None or (found.dtype, tuple(found.shape)) != (dtype, shape):
        raise LookupError(f"the ranks' parts do not fit together: tensor {number} is not what the first rank has seen")
    return found


def _distribute(meshes: Meshes, local: torch.Tensor, key: Any, placements: Any, shape: Any, stride: Any) -> Any:
    if key not in meshes:
        raise LookupError(f"no tensor of the program is on the device mesh {key}")
    distributed = sys.modules[TENSOR].DTensor
    return distributed.from_local(local, meshes[key], placements, run_check=False, shape=shape, stride=stride)
