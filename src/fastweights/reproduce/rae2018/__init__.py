"""Rae et al. 2018, "Fast parametric learning with activation memorization"."""
