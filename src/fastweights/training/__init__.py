"""Training loops that resume exactly where they were killed, and the folders they write."""

from fastweights.training.progress import Progress, shown
from fastweights.training.run_folder import RunFolder, environment
from fastweights.training.supervised import Schedule, epoch_order, evaluate, train

__all__ = ["Progress", "RunFolder", "Schedule", "environment", "epoch_order", "evaluate", "shown", "train"]
