"""A trained classifier that learns new classes by name."""
