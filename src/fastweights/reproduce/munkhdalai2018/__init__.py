"""Munkhdalai & Trischler 2018, "Metalearning with Hebbian fast weights"."""
