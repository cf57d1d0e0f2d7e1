"""Data sets and generators, each with its checks."""
