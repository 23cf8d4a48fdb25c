"""Today's row of a config against the stored one: model or compiled evidence, no noise."""

from __future__ import annotations

import json
import os

from autotune.compiler import environment
from autotune.gate.verdict import INCONCLUSIVE, PASS, REGRESSION, Finding
from autotune.report.units import milliseconds
from autotune.row import Row

_OURS = ("(pipeline)", "ep_")
"""How scopes begin that are the pipeline's own code and no step of the kernel."""


def latency_ms(row: Row, evidence: str) -> float | None:
    """The latency of an `ok` row by a kind of evidence; None where it has none."""
    return row.latency_ms_of(evidence) if row.status == "ok" else None


def compare(stored: Row, today: Row, *, evidence: str, tolerance: float) -> Finding:
    """The finding on a config evaluated anew.

    A regression is a config that ends otherwise than `ok`, whose latency or cycles grew by more
    than `tolerance`, or whose steady step spills more than before. Where autotune's own models or
    the user's compiler flags are not those of the baseline, grown figures and a bill of the model's
    say nothing, and what the compiler says only where the kernel or the compiler changed too.
    """
    before, now = latency_ms(stored, evidence), latency_ms(today, evidence)
    if today.status in ("timeout", "crashed"):
        return Finding(outcome=INCONCLUSIVE, reason=f"{today.status}: {today.reason}")
    unlike = _unlike(stored, today)
    uncertain = unlike is not None and not _compiles_anew(stored, today)
    if now is None or before is None:
        lost = f"{today.status}: {today.reason}"
        if unlike and (uncertain or today.status == "pruned"):
            return Finding(outcome=INCONCLUSIVE, reason=f"{lost}; {unlike}")
        return Finding(outcome=REGRESSION, reason=lost)
    change = now / before - 1
    reason = (
        f"{milliseconds(before)} → {milliseconds(now)} {evidence} ({change:+.1%}, "
        f"tolerance {tolerance:.1%})"
    )
    worst = change
    if evidence == "compiled" and stored.cycles and today.cycles:
        cycles = today.cycles / stored.cycles - 1
        worst = max(worst, cycles)
        reason += f", {stored.cycles} → {today.cycles} cycles ({cycles:+.1%})"
    outcome = PASS
    if not worst <= tolerance:  # not a number is no pass either
        outcome = INCONCLUSIVE if unlike else REGRESSION
    if spills := _new_spills(stored, today, tolerance) if evidence == "compiled" else None:
        outcome, reason = INCONCLUSIVE if uncertain else REGRESSION, f"{reason}; {spills}"
    if outcome == INCONCLUSIVE:
        reason += f"; {unlike}"
    return Finding(
        outcome=outcome, reason=reason, baseline_ms=before, today_ms=now,
        faster=change < -tolerance,
    )  # fmt: skip


def _unlike(stored: Row, today: Row) -> str | None:
    """In words, that the two are not figures of one method; None where they are."""
    if stored.method_fingerprint in (None, today.method_fingerprint):
        return None
    set_today = ", ".join(environment.compile_flags(os.environ))
    flags = f"the compiler flags (today in {set_today})" if set_today else "the compiler flags"
    return f"autotune's models or {flags} changed since, so the two do not compare"


def _compiles_anew(stored: Row, today: Row) -> bool:
    """Whether another compiler or kernel may be why the compiler's word is another, of two rows by
    different methods. It is not where both are the baseline's, since compiling is deterministic;
    and nobody knows where flags are set today, which may be what differs."""
    same = stored.made_with[:3] == today.made_with[:3]
    return not same and not environment.compile_flags(os.environ)


def _new_spills(stored: Row, today: Row, tolerance: float) -> str | None:
    """In words, spills that the steady step did not have; None where there are no new ones.

    The count may grow by `tolerance`: a new compiler allocates registers anew, and a few of some
    hundred spills more or less are no new ones.
    """
    name, before = _steady_spills(stored, None)
    if name is None:
        return None
    _, now = _steady_spills(today, name)
    if now <= before * (1 + tolerance):
        return None
    return f"new spills in the steady step ({name}): {before} → {now}"


def _steady_spills(row: Row, name: str | None) -> tuple[str | None, int]:
    """(scope, its spills) of `name`, or of the scope with the most cycles over the problem."""
    scopes = json.loads(row.scopes) if row.scopes else {}
    if name not in scopes:
        steps = {
            n: s
            for n, s in scopes.items()
            if s.get("cycles") and not n.rpartition("/")[2].startswith(_OURS)
        }
        spent = lambda n: (steps[n]["cycles"] * (steps[n].get("executions") or 0), n)
        name = max(steps, key=spent, default=None)
    scope = scopes.get(name, {})
    return name, (scope.get("spill_loads") or 0) + (scope.get("spill_stores") or 0)
