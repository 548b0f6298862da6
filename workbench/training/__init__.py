"""Inside the rank. `Run` is what a training script imports; importing it loads no torch."""

from workbench.training.run import Run

__all__ = ["Run"]
