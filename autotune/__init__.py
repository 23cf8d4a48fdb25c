"""Finds the best block sizes of Pallas TPU kernels, mostly without a TPU."""

__version__ = "0.1.0"
