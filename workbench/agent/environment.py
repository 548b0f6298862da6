"""Which environment variables a forked rank can still take on, and which make its start cold. Pure; a table.

A zygote has loaded the interpreter, torch and its libraries under its own environment. A variable that such a thing
read when it was loaded either can be told again by a call (`fresh.py` does that) or needs a fresh interpreter.
Everything that is not in the table is read when it is used (CUDA_*, NCCL_*, GLOO_*, TORCH_NCCL_*, …) and just works.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final


class Start(enum.Enum):
    """How a rank starts."""

    WARM = "warm"  # forked from the zygote
    COLD = "cold"  # a fresh interpreter


BY_CALL: Final = frozenset(
    {
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "GOTO_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "PYTHONIOENCODING",
        "PYTHONWARNINGS",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "PYTHONFAULTHANDLER",  # always on in a rank
        "PYTHONBREAKPOINT",  # these are read when they are used
        "PYTHONASYNCIODEBUG",
        "PYTHONSTARTUP",
        "PYTHONINSPECT",
        "PYTHONCASEOK",
        "TORCH_LOGS",
        "TORCH_LOGS_OUT",
        "TORCH_DISTRIBUTED_DEBUG",
    }
)

# pattern → what must not yet have happened when the variable is set
COLD: Final = {
    "LD_*": "the interpreter starts",
    "MALLOC_*": "the interpreter starts",
    "GLIBC_TUNABLES": "the interpreter starts",
    "PYTHON*": "the interpreter starts",
    "OMP_*": "torch is loaded",
    "GOMP_*": "torch is loaded",
    "KMP_*": "torch is loaded",
    "MKL_*": "torch is loaded",
    "OPENBLAS_*": "numpy is loaded",
    "NPY_*": "numpy is loaded",
    "VECLIB_*": "numpy is loaded",
    "DNNL_*": "torch is loaded",
    "ONEDNN_*": "torch is loaded",
    "ATEN_*": "torch is loaded",
    "PYTORCH_*": "torch is loaded",
    "TORCH_ALLOW_*": "torch is loaded",
    "TORCH_BLAS_*": "torch is loaded",
    "TORCH_CPP_LOG_LEVEL": "torch is loaded",
    "TORCH_LINALG_*": "torch is loaded",
    "TORCH_COMPILE*": "torch._dynamo is imported",
    "TORCHDYNAMO_*": "torch._dynamo is imported",
    "TORCHINDUCTOR_*": "torch._dynamo is imported",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "torch is imported",
}

# What a module read when it was imported, where a zygote has preloaded any.
COLD_PRELOADED: Final = (
    "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "DATASETS_*", "ACCELERATE_*", "DIFFUSERS_*", "USE_*",
    "PL_*", "LIGHTNING_*", "WANDB_*", "MPL*", "TQDM_*", "TF_*", "XLA_*", "JAX_*", "NUMBA_*", "TRITON_*",
)  # fmt: skip


def decide_start(
    environ: Mapping[str, str], zygote: Mapping[str, str], *, cold: bool, preloads: bool = False
) -> tuple[Start, str]:
    """How a rank with this environment can start beside a zygote started with that one; the reason for a cold start."""
    if cold:
        return Start.COLD, "asked for with --cold"
    for name in sorted(environ.keys() | zygote.keys()):
        if environ.get(name) != zygote.get(name) and (before := needed_before(name, preloads=preloads)):
            return (
                Start.COLD,
                f"{name} {'must be set' if name in environ else 'is unset, which must be'} before {before}",
            )
    return Start.WARM, ""


def needed_before(name: str, *, preloads: bool = False) -> str:
    """What must not have happened before the variable is set; empty: nothing that matters to a fork."""
    if name in BY_CALL:
        return ""
    for pattern, event in COLD.items():
        if fnmatchcase(name, pattern):
            return event
    if preloads and any(fnmatchcase(name, pattern) for pattern in COLD_PRELOADED):
        return "the preloaded modules are imported"
    return ""


def zygote_environ(environ: Mapping[str, str], hash_seed: str = "") -> dict[str, str]:
    """What a zygote is started with: one thread for every library that would start its own when loaded.

    `hash_seed`: a PYTHONHASHSEED other than the environment's, which all that it forks share.
    """
    return {**environ, "OPENBLAS_NUM_THREADS": "1", **({"PYTHONHASHSEED": hash_seed} if hash_seed else {})}
