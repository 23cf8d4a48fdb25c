"""From the compiler's error text to a status and a one-line reason. Pure functions over text."""

from __future__ import annotations

import re
import signal
import traceback
from dataclasses import dataclass

MAX_REASON = 500

_MOSAIC = re.compile(
    r"Mosaic failed to compile TPU kernel"
    r"(?: with MLIR module name `[^`]*`)?(?: HLO name `[^`]*`)?:\s*"
)
_CODE = re.compile(r"\b(E\d{4}): (?:[A-Z]\w+:?)?\s*")
_STATUS_CODE = re.compile(
    r"^(?:INTERNAL|INVALID_ARGUMENT|UNIMPLEMENTED|RESOURCE_EXHAUSTED|UNKNOWN"
    r"|FAILED_PRECONDITION): (?:XLA:TPU compile permanent error\. )?"
)
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:\"'`,;()]+/)+([^\s/:\"'`,;()]*)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
_ELSEWHERE = re.compile(r"\s*(?:See (?:details at )?https?://\S+(?: for more details)?\.?)", re.I)
_BUG_REPORT = re.compile(r"\s*Please (?:file an issue|report a bug) at:? https?://\S+")

# What the compiler says when memory does not suffice. The printed sizes are those of the program
# or of its first too large allocation, so the reason repeats what the number stands for.
_OUT_OF_MEMORY: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"Scoped allocation with size (\S+) and limit (\S+) exceeded scoped vmem"),
        "VMEM: the kernel allocates {0}, its limit is {1} (E1001)",
    ),
    (
        re.compile(r"[Uu]sed (\S+) of (\S+) (vmem|smem|hbm|sflag|cmem)\b"),
        "{2}: used {0} of {1}",
    ),
    (
        re.compile(
            r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)(?:[^\n]*?space=(\w+))?"
            r"(?:[^\n]*?tag = '([^'.]*))?"
        ),
        "{2}: one allocation of {0} bytes{3} exceeds the memory of {1} bytes",
    ),
    (
        re.compile(
            r"[Rr]an out of memory on HBM, the total memory required for (.+?) \((\S+?)\) "
            r"exceeds available HBM \((\S+?)\)"
        ),
        "HBM: {0} need {1} of {2}",
    ),
)
_OUT_OF_MEMORY_HINT = re.compile(
    r"RESOURCE_EXHAUSTED|E100[01]\b|[Rr]an out of memory in memory space"
    r"|exceed(?:s|ed)? .{0,40}\b(?:vmem|smem|hbm)\b|out of (?:vmem|smem|hbm)",
    re.I,
)
# Refusals of an operand type, a shape or an operation, as libtpu 0.0.42 / 0.0.50 and Pallas word
# them outside Mosaic's own prefix.
_UNSUPPORTED = re.compile(
    r"Unsupported|[Nn]ot implemented|Unimplemented|UNIMPLEMENTED|not supported|E2\d{3}\b"
    r"|The Pallas TPU lowering currently requires|VectorElementTypeInterface"
    r"|Invalid (?:vector )?(?:element )?type"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`status` as in the leaderboard, `reason` in one line; `repeatable` as in `Compiled`."""

    status: str
    reason: str
    repeatable: bool = True


def classify(error: BaseException) -> Verdict:
    """The verdict on an exception that a candidate's build, trace, lowering or compile raised.

    A refusal counts as `unsupported` only where JAX or the compiler raised it: the kernel's own
    NotImplementedError or ValueError is a `failed` candidate. Mosaic's are known by their wording,
    because JAX makes their traceback end in the kernel.
    """
    if isinstance(error, MemoryError):
        reason = _line(f"out of host memory: {error}".rstrip(": "))
        return Verdict(status="failed", reason=reason, repeatable=False)
    frames = traceback.extract_tb(error.__traceback__)
    library = bool(frames) and _is_library(frames[-1].filename)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return classify_text(type(error).__name__, str(error), from_library=library, where=where)


def classify_text(kind: str, text: str, *, from_library: bool = True, where: str = "") -> Verdict:
    """`kind` is the exception's class name; `where` stands in for an empty text."""
    memory = _out_of_memory(text)
    if memory is None and from_library and _OUT_OF_MEMORY_HINT.search(text):
        memory = _first_sentence(text)
    if memory:
        return Verdict(status="oom", reason=_line(memory))
    if not text.strip():
        return Verdict(
            status="failed", reason=_line(f"{kind} raised at {where or 'no known line'}")
        )
    mosaic = _MOSAIC.search(text)
    told = _first_sentence(text[mosaic.end() :] if mosaic else text)
    refused = kind == "NotImplementedError" or _UNSUPPORTED.search(text)
    if mosaic or (from_library and refused):
        return Verdict(status="unsupported", reason=_line(told))
    return Verdict(status="failed", reason=_line(f"{kind}: {told}"))


def _is_library(filename: str) -> bool:
    return bool(re.search(r"[/\\](?:jax|jaxlib|libtpu)[/\\]", filename))


def _out_of_memory(text: str) -> str | None:
    for pattern, reason in _OUT_OF_MEMORY:
        found = pattern.search(text)
        if found:
            groups = [group or "" for group in found.groups()]
            if reason.startswith("{2}"):
                groups[2] = groups[2].upper() or "memory"
            if len(groups) == 4 and groups[3]:
                groups[3] = f" ({groups[3].strip()})"
            return reason.format(*groups)
    return None


def _first_sentence(text: str) -> str:
    """The first line that says something; the next one too where it only announces."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = _STATUS_CODE.sub("", lines[0])
    code = _CODE.search(head)
    if code:
        head = _CODE.sub("", head).strip()
    if (not head or head.endswith(":")) and len(lines) > 1:
        head = f"{head} {lines[1]}".strip()
    return f"{head.removesuffix('.')} ({code[1]})" if code else head


def _line(text: str) -> str:
    """One line without machine paths, addresses or advice to file a bug, of bounded length."""
    text = _BUG_REPORT.sub("", _ELSEWHERE.sub("", text))
    text = _ADDRESS.sub("", _PATH.sub(r"\1", text))
    text = " ".join(text.split()).removesuffix(".")
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1].rstrip() + "…"


def crash(stderr: str, exit_code: int, *, busy: str = "compile", what: str = "compiler") -> Verdict:
    """Why a worker process ended: the line of its stderr that explains it, else the signal.

    `busy` is what the worker was for, `what` it ran.

    libtpu's internal checks print a line `F1129 17:17:30.671779 1234 file.cc:42] Check failed: …`.
    The compiler's own end comes again; that of a process killed from outside need not.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} \d\d:\d\d:\d\d", line)]
    python = [line for line in lines if line.startswith("Fatal Python error:")]
    told = next(iter(fatal or python), None)
    ended = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    if told is None:
        reason = _line(f"the {busy} worker ended with {ended}")
    else:
        told = re.sub(r"^F\d{4} \S+\s+\d+ ", "", told)
        reason = _line(f"the {what} aborted: {told} ({ended})")
    own_doing = -exit_code in (signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)
    return Verdict(status="crashed", reason=reason, repeatable=own_doing)
