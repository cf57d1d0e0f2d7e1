"""Timings side by side in one process; a figure counts only while parity is green."""
