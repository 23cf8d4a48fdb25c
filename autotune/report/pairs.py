"""Backward passes as a whole: the dq and dkv leaderboards of one problem, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.leaderboard import Board
from autotune.report.units import milliseconds
from autotune.row import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardPair:
    """The best dq and the best dkv of one problem on one device, of one kind of evidence."""

    dq: Row
    dkv: Row

    @property
    def title(self) -> str:
        name = shared(self.dq.problem_name or "", self.dkv.problem_name or "")
        return f"{name + ': ' if name else ''}dq + dkv on {self.dq.device}"

    @property
    def latency_ms(self) -> float:
        """The two run one after the other."""
        return (self.dq.latency_ms or 0.0) + (self.dkv.latency_ms or 0.0)

    @property
    def flops(self) -> int:
        return (self.dq.flops or 0) + (self.dkv.flops or 0)

    @property
    def effective_tflops(self) -> float:
        return self.flops / self.latency_ms / 1e9

    @property
    def mfu(self) -> float | None:
        """Both halves are rated against one peak, so the whole is too."""
        if not self.dq.mfu or not self.dq.effective_tflops:
            return None
        return self.dq.mfu * self.effective_tflops / self.dq.effective_tflops

    @property
    def text(self) -> str:
        share = f", MFU {self.mfu:.1%}" if self.mfu is not None else ""
        halves = " + ".join(milliseconds(r.latency_ms or 0.0) for r in (self.dq, self.dkv))
        return (
            f"{halves} = {milliseconds(self.latency_ms)} {self.dq.evidence}, "
            f"{self.effective_tflops:.1f} TFLOP/s{share}"
        )


def shared(dq: str, dkv: str) -> str:
    """What the names of two halves have in common, word by word; both where that is nothing."""
    if not dq or not dkv:
        return dq or dkv
    words = zip(dq.split(" "), dkv.split(" "), strict=False)
    alike = " ".join(one for one, other in words if one == other)
    return alike.rstrip(" ,:;/-") or f"{dq} + {dkv}"


def backward_pairs(boards: Sequence[Board]) -> list[BackwardPair]:
    """Pairs of `<family>_dq` and `<family>_dkv` boards that share device and problem."""
    best = {_identity(b.best): b.best for b in boards if b.best is not None}
    pairs = []
    for (kernel, device, problem), dq in best.items():
        dkv = best.get((kernel.removesuffix("_dq") + "_dkv", device, problem))
        if kernel.endswith("_dq") and dkv is not None and dkv.evidence == dq.evidence:
            pairs.append(BackwardPair(dq=dq, dkv=dkv))
    return pairs


def _identity(row: Row) -> tuple[str, str, str]:
    return row.kernel, row.device, row.problem
