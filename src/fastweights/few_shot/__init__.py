"""Few-shot classifiers to use: trained once, then described with a few examples of each class, as often as wanted."""

from fastweights.few_shot.classifier import FewShotClassifier, Predictions

__all__ = ["FewShotClassifier", "Predictions"]
