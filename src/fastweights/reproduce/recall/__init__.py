"""Recall and state tracking: every recurrent layer of the library in one frame."""
