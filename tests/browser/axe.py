"""What axe-core finds wrong with a page for those who see, hear or type otherwise; through open shadow roots."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

UNFOLD = """
() => { const walk = root => { for (const e of root.querySelectorAll('*')) {
  if (e.nodeName === 'DETAILS') e.open = true; if (e.shadowRoot) walk(e.shadowRoot); } }; walk(document); }
"""


def violations(page: Page) -> list[str]:
    """One line a place: rule, element, what is to be mended. Rules of every level, best practices too; all unfolded."""
    page.evaluate(UNFOLD)
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['target']} {' '.join(node['failureSummary'].split())} in {node['html'][:120]}"
        for rule in found
        for node in rule["nodes"]
    ]
