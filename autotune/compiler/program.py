"""Which kernels a compiled program holds, in program order, and their dump files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.compiler.dump import DumpError, parse_schedule, parse_spilled_bytes
from autotune.compiler.hlo import computation_lines, kernel_shapes
from autotune.device import Device
from autotune.evidence import Schedule

_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|\w+_computations?)=(?:(%[\w.\-]+)|\{([^}]*)\})"
)
_KERNEL = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*custom_call_target=\"tpu_custom_call\"")
_SERIAL = re.compile(r"\.(\d+)(?:\.\D.*)?$")

_TRANSFORMS = "vmap|jvp|transpose|checkpoint|remat|rematted_computation|custom_jvp|custom_vjp"

LONGEST_NAME = 180  # 255 bytes a file name, less the compiler's time stamp and pass name
BUNDLES = "final_bundles.txt"
UTILIZATION = "final_hlo-static-per-bundle-utilization.txt"
ALLOCATIONS = "pre-finalize-registers-and-allocations.txt"


def kernel_instructions(hlo_text: str) -> list[str]:
    """Names of the Pallas kernels of a scheduled HLO module, as they run; loops entered once.

    XLA's own fusions and copies are left out. Names are those of the dump files: the call's own
    with a number, e.g. `matmul.1`.
    """
    entry, bodies = computation_lines(hlo_text)
    seen: list[str] = []
    _walk(entry, bodies, seen, set())
    return seen


def _walk(name: str, bodies: dict[str, list[str]], seen: list[str], done: set[str]) -> None:
    if name in done:
        return
    done.add(name)
    for line in bodies.get(name, ()):
        kernel = _KERNEL.match(line)
        if kernel:
            seen.append(kernel[1])
            continue
        for one, several in _CALLED.findall(line):
            for part in (one or several).split(","):
                _walk(part.strip().lstrip("%"), bodies, seen, done)


def in_trace_order(instructions: Sequence[str], call_names: Sequence[str]) -> list[tuple[str, str]]:
    """(call name, HLO instruction) in the order the calls were traced in.

    The compiler may run independent kernels in another order than they were written. It numbers
    equal names in the order written, sometimes with an operand's name behind. A call without a
    name, or with one HLO does not take, bears another name there (`tpu_custom_call`, or the
    function around it): such instructions go, as they run, to the calls left over. Identical calls
    that the compiler merged leave one schedule.
    """
    bases = [_SERIAL.sub("", i) for i in instructions]
    left = sorted(instructions, key=lambda i: (bases.index(_SERIAL.sub("", i)), _serial(i)))
    own: list[str | None] = []
    for name in call_names:
        wanted = _instruction_pattern(name)
        match = next((i for i in left if wanted.fullmatch(i)), None)
        own.append(match)
        if match is not None:
            left.remove(match)
    pairs = []
    for name, instruction in zip(call_names, own, strict=True):
        found = instruction or (left.pop(0) if left else None)
        if found is not None:
            pairs.append((name, found))
    return pairs + [(_SERIAL.sub("", i), i) for i in left]


def _serial(instruction: str) -> int:
    number = _SERIAL.search(instruction)
    return int(number[1]) if number else 0


def _instruction_pattern(name: str) -> re.Pattern[str]:
    """HLO instruction names of a call: odd characters replaced, then a number.

    A transformation around a call shows in its name: `vmap(f)` is `vmap_f_`.
    """
    own = re.escape(re.sub(r"[^\w.\-]", "_", name))
    return re.compile(rf"(?:(?:{_TRANSFORMS})_)*{own}_*(?:\.\d+(?:\.\D.*)?)?")


def read_schedules(folder: Path, device: Device, call_names: Sequence[str]) -> tuple[Schedule, ...]:
    """The schedules of the one program whose dump lies in `folder`, in trace order.

    Raises DumpError where a file is missing or has an unknown form.
    """
    programs = sorted(folder.glob("*-TLP-hlo.txt"))
    if not programs:
        raise DumpError("the compiler left no dump of the program")
    texts = [program.read_text() for program in programs]
    instructions = [name for text in texts for name in kernel_instructions(text)]
    shapes = {name: types for text in texts for name, types in kernel_shapes(text).items()}
    dumped = {i: _dumped(folder, i, instructions, shapes) for i in instructions}
    spilled: dict[str, int] = {}
    for report in folder.glob("*-TLP-*-vmem_report.html"):
        spilled |= parse_spilled_bytes(report.read_text(errors="replace"))
    return tuple(
        parse_schedule(
            _read(folder, dumped[instruction], BUNDLES),
            _read(folder, dumped[instruction], UTILIZATION),
            _read(folder, dumped[instruction], ALLOCATIONS),
            name,
            device,
            spilled_bytes=spilled.get(dumped[instruction], 0),
        )
        for name, instruction in in_trace_order(instructions, call_names)
    )


def _dumped(
    folder: Path, instruction: str, instructions: Sequence[str], shapes: dict[str, tuple[str, ...]]
) -> str:
    """The instruction whose dump tells of this one: the compiler compiles equal kernels once."""
    if any(_files(folder, instruction, BUNDLES)):
        return instruction
    base, own = _SERIAL.sub("", instruction), shapes.get(instruction)
    equal = (i for i in instructions if _SERIAL.sub("", i) == base and shapes.get(i) == own)
    return next((i for i in equal if any(_files(folder, i, BUNDLES))), instruction)


def _read(folder: Path, instruction: str, part: str) -> str:
    for path in _files(folder, instruction, part):
        return path.read_text(errors="replace")
    if len(instruction) > LONGEST_NAME:
        raise DumpError(
            f"the kernel's name has {len(instruction)} characters, too many for the name of the "
            f"compiler's dump file (at most {LONGEST_NAME})"
        )
    raise DumpError(f"the compiler left no {part} for {instruction}")


def _files(folder: Path, instruction: str, part: str) -> Iterator[Path]:
    # STAMP-INSTRUCTION-NN-PART; `schedule-analysis_final_bundles.txt` is another file.
    wanted = re.compile(rf"\d+-{re.escape(instruction)}-\d+-{re.escape(part)}")
    return (path for path in sorted(folder.iterdir()) if wanted.fullmatch(path.name))
