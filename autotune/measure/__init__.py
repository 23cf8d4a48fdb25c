"""Measuring: a worker process that owns the TPU, its device time, and the check before it."""
