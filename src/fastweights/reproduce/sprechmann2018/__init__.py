"""Sprechmann et al. 2018, "Memory-based parameter adaptation"."""
