"""Schlag & Schmidhuber 2017, "Gated fast weights for associative retrieval"."""
