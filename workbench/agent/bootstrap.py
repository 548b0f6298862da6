"""Executed by path, under any interpreter: the first frame of zygotes and of ranks.

    bootstrap.py zygote FD MODULE…            import torch and the modules, then fork ranks when told to
    bootstrap.py keeper FD                    import nothing, then start fresh interpreters when told to
    bootstrap.py rank LAUNCH BOX CONTROL      be a rank in a fresh interpreter

`main` returns, in a child, what the child is to do, and that is then done from here: so a rank's program ends as any
other's, through the interpreter's own finalisation.
"""

# Nothing is imported here that a rank need not have.
# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import abspath, dirname, join


def load_package() -> None:
    """Make `workbench` importable, this very copy, without putting its folder on the user's `sys.path`."""
    folder = dirname(dirname(abspath(__file__)))
    spec = spec_from_file_location("workbench", join(folder, "__init__.py"), submodule_search_locations=[folder])
    assert spec is not None and spec.loader is not None
    package = sys.modules["workbench"] = module_from_spec(spec)
    spec.loader.exec_module(package)


def adopt_main() -> None:
    """Keep this module alive under another name: `__main__` is to be the user's."""
    module = sys.modules["__main__"]
    module.__name__ = "workbench.agent.bootstrap"
    sys.modules[module.__name__] = module


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    load_package()
    adopt_main()
    from workbench.agent.tasks import main

    main(sys.argv[1:])()
