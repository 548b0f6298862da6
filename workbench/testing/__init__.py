"""Fakes for tests, ours and users': a simulated pool that needs no process and no waiting."""

from workbench.testing.agent import FakeAgent, FakeRank
from workbench.testing.pool import FakePool

__all__ = ["FakeAgent", "FakePool", "FakeRank"]
