"""The `autotune` command: one module a command, each parsing, calling, printing."""

from __future__ import annotations

from autotune.cli import best, calibrate, explain, export, gate, listing, report, sweep
from autotune.cli.app import app

__all__ = [
    "app",
    "best",
    "calibrate",
    "explain",
    "export",
    "gate",
    "listing",
    "main",
    "report",
    "sweep",
]


def main() -> None:
    """Entry point of the `autotune` command."""
    app()
