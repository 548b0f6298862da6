"""Inside the rank: what a training script may say (`Run`), and what is seen of it without its help.

Standard library and torch only; importing this package does not import torch.
"""

from workbench.training.run import Run

__all__ = ["Run"]
