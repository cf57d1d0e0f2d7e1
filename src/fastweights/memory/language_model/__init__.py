"""A trained language model that remembers its text, and the proof that its probabilities are fair."""
