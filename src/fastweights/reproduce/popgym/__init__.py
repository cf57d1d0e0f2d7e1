"""Morad et al. 2023, "POPGym: benchmarking partially observable reinforcement learning"."""
