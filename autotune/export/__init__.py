"""Best configs in the forms of other projects: JAX, MaxText, Tokamax; and plain JSON."""

from autotune.export.entry import Entry, Export, entries
from autotune.export.targets import KERNELS, TARGETS, export

__all__ = ["KERNELS", "TARGETS", "Entry", "Export", "entries", "export"]
