"""How Jupyter reaches the live pages: jupyter-server-proxy's named server `dtrain`, behind Jupyter's own login.

`BASE/dtrain/…` goes to the socket of this user's home. Nothing is started here: the pages belong to the pool. What
protects them: the socket is the user's alone, and a browser reaches it only through Jupyter, which asks for its login
and refuses a websocket of another origin (`JupyterHandler.check_origin`) before it passes anything on.
"""

from __future__ import annotations

from typing import Any

from workbench_widgets.address import home_dir, socket_path


def setup() -> dict[str, Any]:
    """The entry point `jupyter_serverproxy_servers`; when it raises, jupyter-server-proxy says why in its log."""
    return {
        "command": [],  # it runs already, or the page says how to start it
        "unix_socket": str(socket_path(home_dir())),
        "launcher_entry": {"enabled": False, "title": "dtrain"},
    }
