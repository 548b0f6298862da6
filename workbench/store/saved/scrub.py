"""What a saved session must not tell: secrets, and whose machine it was. Pure; text goes in, text comes out.

Three nets: words that have a known token's form; values that stand after a name such as `password`; and values of
environment variables with such a name, wherever they occur. The home directory becomes `~` in what people read, and a
mark in code, so that a rerun can put its own home there. Scrubbing what was scrubbed changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

REMOVED: Final = "[removed]"
HOME_IN_CODE: Final = "~{home}~"  # no path, no name, and not likely to stand in a program
# Variables whose values say how a job was run and nothing of anybody.
ALLOWED: Final = (
    "OMP_*", "MKL_*", "OPENBLAS_*", "KMP_*", "GLOO_*", "NCCL_*", "TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*",
    "PYTORCH_*", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "TOKENIZERS_PARALLELISM",
    "ATEN_*", "DNNL_*", "MALLOC_*",
)  # fmt: skip
_NAMES: Final = r"(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential|auth)"
_ENDS: Final = r"s?(?:[_-]?(?:id|key))?"  # aws_access_key_id, auth_key
_SECRET_NAME: Final = re.compile(_NAMES + _ENDS + r"\Z", re.IGNORECASE)
# None of these looks at a character again and again: a line of output may be megabytes of digits without a space.
_FORMS: Final = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,} | gh[oprsu]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,} | glpat-[A-Za-z0-9_-]{16,}
        | sk-[A-Za-z0-9_-]{16,} | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[A-Za-z0-9_-]{30,} | xox[abeprs]-[A-Za-z0-9-]{10,}
        | ya29\.[A-Za-z0-9_-]{16,} | pypi-[A-Za-z0-9_-]{16,} | npm_[A-Za-z0-9]{20,}
        | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}
      )
    | (?<=key=["'])[A-Za-z0-9]{32,} | (?<=login\(["'])[A-Za-z0-9]{32,}
    """,
    re.VERBOSE | re.DOTALL,
)
_AFTER_NAME: Final = re.compile(
    rf"""
    (?P<name>{_NAMES}{_ENDS}["']?)
    (?P<between>\s*[=:]\s*|\s+(?=[^\s-]))
    (?P<value>"[^"\n]{{4,}}"|'[^'\n]{{4,}}'|[^\s"',;(){{}}\[\]]{{8,}})
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(Bearer|Basic)\s+([A-Za-z0-9._~+/=-]{12,})", re.IGNORECASE)
_IN_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]{0,20}://)[^\s/@:]+:[^\s/@]+@", re.IGNORECASE)
LONGEST_NUMBER: Final = 14  # characters: max_tokens=100000 is no secret
LONGEST_WORD: Final = 20
_SHORTEST: Final = 8  # characters of a value that is looked for everywhere


def is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name))


def is_secret_pair(name: str, value: str) -> bool:
    """Whether the second text is probably the value of what the first one names."""
    return is_secret_name(name) and len(value) >= _SHORTEST and _looks_secret(value, is_quoted=False)


def is_allowed(name: str, more: tuple[str, ...] = ()) -> bool:
    """Whether a variable's value may be told. A name that says `secret` may not, whatever the list says."""
    return not is_secret_name(name) and any(fnmatchcase(name, pattern) for pattern in (*ALLOWED, *more))


class Scrubber:
    """`homes`: paths that become `~`; `environ`: where values of variables with a secret's name are known from.

    `removed` counts, by kind in words, what was taken out.
    """

    def __init__(self, homes: tuple[str, ...] = (), environ: Mapping[str, str] | None = None) -> None:
        self.removed: Counter[str] = Counter()
        paths = sorted((home.rstrip("/") for home in homes), key=len, reverse=True)
        usable = [re.escape(path) for path in paths if path.count("/") >= 2 or path == "/root"]
        self._home = re.compile(rf"(?:{'|'.join(usable)})(?![\w.-])") if usable else None
        values = {value for name, value in (environ or {}).items() if is_secret_name(name) and len(value) >= _SHORTEST}
        self._values = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None

    def text(self, text: str) -> str:
        """What people read."""
        return self._put("~", self._without_secrets(text))

    def code(self, text: str) -> str:
        """What runs: a home path can be put back."""
        return self._put(HOME_IN_CODE, self._without_secrets(text))

    def words(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Arguments: `--token X` is two of them."""
        found: list[str] = []
        for index, word in enumerate(words):
            before = words[index - 1] if index else ""
            if before.startswith("-") and "=" not in before and is_secret_name(before) and not word.startswith("-"):
                self.removed["arguments with a secret's name"] += word != REMOVED
                found.append(REMOVED)
            else:
                found.append(self.text(word))
        return tuple(found)

    def tree(self, value: Any) -> Any:
        """All texts of a document, keys apart."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.tree(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return value

    def _without_secrets(self, text: str) -> str:
        if self._values is not None:
            text = self._drop("values of secret environment variables", self._values, text)
        text = self._drop("words with a token's form", _FORMS, text)
        text = self._drop_values(text)
        text = self._drop("values after a secret's name", _BEARER, text, _keep_scheme)
        return self._drop("passwords in addresses", _IN_ADDRESS, text, lambda match: f"{match[1]}{REMOVED}@")

    def _drop_values(self, text: str) -> str:
        """What stands after a name and is no secret may itself be a name, with a secret after it."""
        parts: list[str] = []
        done = at = 0
        while match := _AFTER_NAME.search(text, at):
            new = _keep_name(match)
            at = match.end("name")
            if new != match[0]:
                self.removed["values after a secret's name"] += 1
                parts += [text[done : match.start()], new]
                done = at = match.end()
        return "".join([*parts, text[done:]])

    def _drop(self, kind: str, pattern: re.Pattern[str], text: str, put: Any = lambda match: REMOVED) -> str:
        def replacement(match: re.Match[str]) -> str:
            new: str = put(match)
            self.removed[kind] += new != match[0]
            return new

        return pattern.sub(replacement, text)

    def _put(self, mark: str, text: str) -> str:
        if self._home is None or "/" not in text:
            return text
        new, count = self._home.subn(lambda _: mark, text)
        self.removed["the path of the home directory"] += count
        return new


def _keep_name(match: re.Match[str]) -> str:
    """Only what looks like a value goes: not a name, a call, a type or another word of a program or of prose."""
    value = match["value"]
    is_quoted = value[0] in "\"'"
    bare = value[1:-1] if is_quoted else value
    is_call = not is_quoted and match.string[match.end() :].startswith("(")
    if is_call or bare == REMOVED or REMOVED in bare or not _looks_secret(bare, is_quoted):
        return match[0]
    return f"{match['name']}{match['between']}{value[0]}{REMOVED}{value[0]}" if is_quoted else (
        f"{match['name']}{match['between']}{REMOVED}"
    )  # fmt: skip


def _keep_scheme(match: re.Match[str]) -> str:
    """`Basic functionality` is prose."""
    value = match[2]
    is_word = len(value) < LONGEST_WORD and value.isalpha() and value[1:].islower()
    return match[0] if is_word else f"{match[1]} {REMOVED}"


def _looks_secret(value: str, is_quoted: bool) -> bool:
    if any(mark in value for mark in ("${", "$(", "os.environ", "getenv", "<", ">")):
        return False
    if is_quoted:
        return not value.isspace() and not re.fullmatch(r"[A-Z][A-Z0-9_]*", value)  # the name of a variable
    if "." in value[:-1] or not any(c.isdigit() for c in value):
        return False
    return len(value) > LONGEST_NUMBER or not re.fullmatch(r"[\d,:e+-]+", value)
