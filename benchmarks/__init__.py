"""Measurements: harnesses, kernels, and the numbers the project stands by."""
