"""Small kernels for the compiler tests: a matmul, and ones that misbehave while they are traced."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.error_handling import MosaicError
from jax.errors import JaxRuntimeError
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jaxlib.mlir.ir import MLIRError

from autotune.candidate import Config
from autotune.device import Device
from autotune.kernels.base import Call, Kernel, Tunable
from autotune.problem import Problem

DTYPES = (
    "bfloat16",
    "float32",
    "float16",
    "int8",
    "int4",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
)
SHAPE = {"m": 512, "k": 512, "n": 512}


def matmul(problem: Problem, config: Config, *, name: str = "tile") -> Call:
    """A K-last matmul in `bm`, `bk`, `bn` blocks with scopes init, step and finalize."""
    m, k, n = (problem.shape[axis] for axis in "mkn")
    bm, bk, bn = (int(config[block]) for block in ("bm", "bk", "bn"))  # type: ignore[arg-type]
    dtype = jnp.dtype(problem.dtype)
    accumulator = jnp.int32 if problem.dtype.startswith("int") else jnp.float32
    output = jnp.int32 if problem.dtype.startswith("int") else jnp.bfloat16

    def kernel(x_ref, y_ref, z_ref, acc_ref):  # type: ignore[no-untyped-def]
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            with jax.named_scope("init"):
                acc_ref[...] = jnp.zeros_like(acc_ref)

        with jax.named_scope("step"):
            acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=accumulator)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            with jax.named_scope("finalize"):
                z_ref[...] = acc_ref[...].astype(z_ref.dtype)

    limit = config.get("vmem_limit_mib")
    call = pl.pallas_call(
        kernel,
        name=name,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, s: (i, s)),
            pl.BlockSpec((bk, bn), lambda i, j, s: (s, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), output),
        scratch_shapes=[pltpu.VMEM((bm, bn), accumulator)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=None if limit is None else int(limit) << 20,
        ),
    )
    return call, (jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype))


def two_calls(problem: Problem, config: Config) -> Call:
    """Two calls of one name, the second with half the rows a block, and XLA's work between."""
    first, arguments = matmul(problem, config)
    second, _ = matmul(problem, {**config, "bm": int(config["bm"]) // 2})  # type: ignore[arg-type]
    other, _ = matmul(problem, config, name="other")

    def program(x, y):  # type: ignore[no-untyped-def]
        return jax.nn.softmax(other(second(first(x, y) * 2, y), y).astype(jnp.float32))

    return program, arguments


def scratch(problem: Problem, config: Config) -> Call:
    """Doubles a small array next to `scratch_mib` MiB of VMEM (or SMEM) scratch."""
    mib = int(config["scratch_mib"])  # type: ignore[arg-type]
    shape = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    in_smem = config.get("memory") == "smem"

    def kernel(x_ref, o_ref, scratch_ref):  # type: ignore[no-untyped-def]
        o_ref[...] = x_ref[...] * 2
        if in_smem:
            scratch_ref[0] = 1
        else:
            scratch_ref[-256:, :] = x_ref[...]
            o_ref[...] += scratch_ref[0:256, :]

    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        scratch_shapes=[
            pltpu.SMEM((mib << 18,), jnp.int32)
            if in_smem
            else pltpu.VMEM((mib << 11, 128), jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=int(config.get("vmem_limit_mib", 64)) << 20  # type: ignore[arg-type]
        ),
    )
    return call, (shape,)


def misbehave(problem: Problem, config: Config) -> Call:
    """Does while it is traced what `config["act"]` says, then is a matmul."""
    call, arguments = matmul(problem, {"bm": 256, "bk": 256, "bn": 256})

    def program(x, y):  # type: ignore[no-untyped-def]
        act(str(config["act"]))
        return call(x, y)

    return program, arguments


def act(what: str) -> None:
    raised = {
        "value error": ValueError("block 96 does not divide 100"),
        "not implemented": NotImplementedError("no such epilogue"),
        "assertion": AssertionError(),
        "mlir": MLIRError("the verifier said no", []),
        "mosaic": MosaicError("my own words"),
        "runtime": JaxRuntimeError("INTERNAL: something broke"),
        "memory error": MemoryError("cannot hold the mask"),
    }
    if what in raised:
        raise raised[what]
    if what == "abort":
        print("about to go", flush=True)
        os.abort()
    if what == "check fails":
        sys.stderr.write("F1129 17:17:30.671779    1234 emitter.cc:42] Check failed: a == b\n")
        sys.stderr.flush()
        os.abort()
    if what == "hang":
        time.sleep(60)
    if what == "spin":
        while True:
            pass
    if what == "eat memory":
        held = []
        while True:
            held.append(b"x" * (1 << 27))
    if what == "start another and hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open(os.environ["AUTOTUNE_TEST_PID_FILE"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if what == "scribble":
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"not an answer\n")
    if what == "exit":
        sys.exit(3)
    if what == "print":
        print('{"status": "ok"}', flush=True)
    if what == "ask for the chip":
        assert pltpu.get_tpu_info().num_lanes == 128
    if what == "eager table":
        with jax.ensure_compile_time_eval():
            assert int(jnp.arange(16).sum()) == 120


def _kernel(name: str, build, **more) -> Kernel:  # type: ignore[no-untyped-def]
    def tunables(problem: Problem, device: Device) -> dict[str, Tunable]:
        return {block: Tunable(values=(128, 256, 512)) for block in ("bm", "bk", "bn")}

    return Kernel(
        name=name,
        axes=("m", "k", "n"),
        build=build,
        tunables=tunables,
        flops=lambda problem: 2 * problem.shape["m"] * problem.shape["k"] * problem.shape["n"],
        dtypes=DTYPES,
        **more,
    )


def jax_flash(problem: Problem, config: Config) -> Call:
    """JAX's own flash attention of one head, `m` tokens and head dimension `k`."""
    array = jax.ShapeDtypeStruct((1, 1, problem.shape["m"], problem.shape["k"]), jnp.bfloat16)
    return flash_attention.flash_attention, (array, array, array)


MATMUL = _kernel("tile", matmul)
JAX_FLASH = _kernel("jax_flash", jax_flash)
SCRATCH = _kernel("scratch", scratch)
TWO_CALLS = _kernel("two_calls", two_calls)
MISBEHAVE = _kernel("misbehave", misbehave)
NOT_A_KERNEL = 42
