"""What predicts from a store: caches, local adaptation, and mixtures of them with a model."""
