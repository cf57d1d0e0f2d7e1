"""The experiments behind the guides of the documentation."""
