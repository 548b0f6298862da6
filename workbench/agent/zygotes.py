"""The zygotes of this host: one an interpreter, set of preloaded modules and PYTHONHASHSEED, and a bare one for cold
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workbench.agent.environment import zygote_environ
from workbench.agent.keeper import Keeper, Recipe
from workbench.agent.loop import Loop

MOST: Final = 4  # warm zygotes kept, the default one included; each holds some 150 MB


class Zygotes:
    """All in the loop's thread."""

    def __init__(self, loop: Loop, environ: Mapping[str, str], python: str, preload: tuple[str, ...]) -> None:
        self._loop, self._environ, self._python, self._preload = loop, environ, python, preload
        self._keepers: dict[Recipe, Keeper] = {}

    @property
    def default(self) -> Recipe:
        return Recipe(self._python, self._preload)

    def recipe(self, python: str, preload: tuple[str, ...], environ: Mapping[str, str]) -> Recipe:
        """Which zygote a job with these wishes needs, whose ranks have that environment."""
        seed = environ.get("PYTHONHASHSEED", "")
        own = "" if seed == self._environ.get("PYTHONHASHSEED", "") else seed
        return Recipe(python or self._python, tuple(dict.fromkeys((*self._preload, *preload))), hash_seed=own)

    def warm_up(self) -> None:
        self.get(self.default)

    @property
    def is_warm(self) -> bool:
        """Whether the default one can fork at once. From any thread."""
        keeper = self._keepers.get(self.default)
        return keeper is not None and keeper.is_ready and not keeper.is_over

    def get(self, recipe: Recipe) -> Keeper:
        """The zygote of this kind; one that has died, or was never there, is started. Raises `OSError`."""
        keeper = self._keepers.get(recipe)
        if keeper is None or keeper.is_over:
            self._make_room()
            environ = dict(self._environ) if recipe.is_bare else zygote_environ(self._environ, recipe.hash_seed)
            keeper = self._keepers[recipe] = Keeper(recipe, environ, self._loop)
        return keeper

    def _make_room(self) -> None:
        """End the zygote that has been idle for longest, when there are many."""
        self._keepers = {recipe: keeper for recipe, keeper in self._keepers.items() if not keeper.is_over}
        idle = [k for r, k in self._keepers.items() if r != self.default and not r.is_bare and not any(k.children)]
        if len(self._keepers) >= MOST and idle:
            min(idle, key=lambda keeper: keeper.used).end()

    def pids(self) -> tuple[int, ...]:
        living = {recipe: keeper for recipe, keeper in self._keepers.items() if not keeper.is_over}
        return tuple(living[recipe].pid for recipe in sorted(living, key=lambda recipe: recipe != self.default))

    def end_all(self) -> None:
        for keeper in self._keepers.values():
            keeper.end()
