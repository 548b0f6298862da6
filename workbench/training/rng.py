"""Random states as values that `torch.load(weights_only=True)` takes: tensors, ints, floats, strings.

Python's `random`, numpy's global one where numpy is loaded, torch's on the CPU, and on every CUDA device that this
process sees, once it uses CUDA. Python's and numpy's are both the Mersenne Twister: 624 words and a place in them.
"""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import torch

State: TypeAlias = dict[str, Any]
BYTE: Final = torch.uint8


class Raw(NamedTuple):
    """The host's random states as they are got fastest, to be compared, and pickled from process to process."""

    torch: bytes
    python: Any
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls) -> Raw:
        state, numpy = torch.get_rng_state(), sys.modules.get("numpy")
        if numpy is None:
            return cls(bytes(state.tolist()), random.getstate(), ())
        words = numpy.random.mtrand._rand.get_state()
        return cls(state.numpy().tobytes(), random.getstate(), (words[1].tobytes(), *words[2:]))

    def state(self) -> State:
        """As `host_rng_state` has it."""
        state = {"python": _python_words(self.python), "torch": torch.frombuffer(bytearray(self.torch), dtype=BYTE)}
        if self.numpy:
            words, place, has_gauss, gauss = self.numpy
            state["numpy"] = {"words": _words(array("I", words)), "place": place, "gauss": [has_gauss, float(gauss)]}
        return state


def rng_state() -> State:
    """The state of every global generator of this process, CUDA's included."""
    state = host_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def host_rng_state() -> State:
    """The same without CUDA's: all that the order of data can come from."""
    return Raw.now().state()


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every generator back that `state` tells of; the others are left as they are.

    CUDA devices that this process does not have are passed over. A generator that the process has not used yet gets its
    state all the same: numpy is imported for it where it can be.
    """
    random.setstate(_python_value(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            import numpy

            _set_numpy(numpy.random.mtrand._rand, state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def generator_state(generator: Any) -> State | None:
    """The state of one generator object of torch, Python or numpy; None where this is none that can be kept."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()}
    if type(generator) is random.Random:
        return {"python": _python_state(generator)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        kind = generator.get_state(legacy=False)["bit_generator"]
        return {"numpy": _numpy_state(generator)} if kind == "MT19937" else None
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return {"bits": _plain(generator.bit_generator.state)}
    return None


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Put one such object back. Raises `ValueError` or `TypeError` where it is of another kind than the one saved."""
    if "torch" in state:
        generator.set_state(state["torch"])
    elif "python" in state:
        generator.setstate(_python_value(state["python"]))
    elif "numpy" in state:
        _set_numpy(generator, state["numpy"])
    else:
        generator.bit_generator.state = _numpy_value(state["bits"])


def _python_state(generator: Any) -> State:
    return _python_words(generator.getstate())


def _python_words(value: Any) -> State:
    version, words, gauss = value
    return {"version": version, "words": _words(words), "gauss": gauss}


def _words(words: Iterable[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", words), dtype=torch.int64)


def _python_value(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _numpy_state(generator: Any) -> State:
    _, words, place, has_gauss, gauss = generator.get_state(legacy=True)
    return {
        "words": torch.tensor(words.tolist(), dtype=torch.int64),
        "place": place,
        "gauss": [has_gauss, float(gauss)],
    }


def _set_numpy(generator: Any, state: Mapping[str, Any]) -> None:
    import numpy

    words = numpy.array(state["words"].tolist(), dtype=numpy.uint32)
    generator.set_state(("MT19937", words, state["place"], *state["gauss"]))


def _plain(value: Any) -> Any:
    """numpy's own account of a generator, its arrays as tensors."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if hasattr(value, "dtype"):
        return {"array": value.dtype.name, "words": [int(word) for word in value.reshape(-1)]}
    return value


def _numpy_value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        import numpy

        return numpy.array(value["words"], dtype=value["array"])
    return {key: _numpy_value(part) for key, part in value.items()}
