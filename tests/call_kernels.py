"""Small kernels for the tests of the traced call, and shortcuts to trace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autotune import device
from autotune.call_record import PallasCall
from autotune.pallas_call import trace

MIB = 2**20
BF16, F32 = jnp.bfloat16, jnp.float32
shaped = jax.ShapeDtypeStruct
Built = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def one(fn: Callable[..., Any], *args: Any, on: str = "tpu7x") -> PallasCall:
    (call,) = trace(fn, args, device.get(on)).calls
    return call


def of(built: Built, on: str = "tpu7x") -> PallasCall:
    return one(built[0], *built[1], on=on)


def moving(
    grid: tuple[int, ...],
    inputs: Sequence[tuple[tuple[int, ...], tuple[Any, ...], Callable[..., Any]]],
    output: tuple[tuple[int, ...], tuple[Any, ...], Callable[..., Any]],
    *,
    dtype: Any = BF16,
    out_dtype: Any = F32,
    semantics: Any = None,
    table: Any = None,
) -> Built:
    """A call that only moves blocks: (array shape, block, index map) per operand."""

    def kernel(*refs: Any) -> None:
        del refs

    shape, block, index_map = output
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=0 if table is None else 1,
        grid=grid,
        in_specs=[pl.BlockSpec(b, m) for _, b, m in inputs],
        out_specs=pl.BlockSpec(block, index_map),
    )
    call = pl.pallas_call(
        kernel, name="moving", grid_spec=spec, out_shape=shaped(shape, out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )  # fmt: skip
    fn = call if table is None else lambda *args: call(table, *args)
    return fn, [shaped(s, dtype) for s, _, _ in inputs]


def matmul(
    m: int, k: int, n: int, bm: int, bk: int, bn: int, *,
    semantics: Any = ("parallel", "parallel", "arbitrary"), dtype: Any = BF16,
    limit: int | None = None,
) -> Built:  # fmt: skip
    def kernel(x: Any, y: Any, z: Any, acc: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            with jax.named_scope("init"):
                acc[...] = jnp.zeros_like(acc)

        with jax.named_scope("step"):
            acc[...] += jnp.dot(x[...], y[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            with jax.named_scope("finalize"):
                z[...] = acc[...].astype(z.dtype)

    call = pl.pallas_call(
        kernel, name="mm", grid=(pl.cdiv(m, bm), pl.cdiv(n, bn), pl.cdiv(k, bk)),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=shaped((m, n), dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), F32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=limit
        ),
    )  # fmt: skip
    return call, [shaped((m, k), dtype), shaped((k, n), dtype)]


def vmem_bytes(call: PallasCall) -> int:
    windows = sum(w.buffers * w.window_bytes for w in call.windows if w.memory == "vmem")
    return windows + sum(s.bytes for s in call.scratch if s.memory == "vmem")


def copy_call(
    index_map: Callable[..., Any], grid: tuple[int, ...] = (4,), mode: Any = None
) -> Built:
    def kernel(x: Any, z: Any) -> None:
        z[...] = x[...]

    extra = {} if mode is None else {"pipeline_mode": mode}
    call = pl.pallas_call(
        kernel, name="copy", grid=grid,
        in_specs=[pl.BlockSpec((256, 1024), index_map, **extra)],
        out_specs=pl.BlockSpec((256, 1024), lambda *ids: (ids[0], 0)),
        out_shape=shaped((65536, 1024), BF16),
    )  # fmt: skip
    return call, [shaped((65536, 1024), BF16)]


BUFFER_CASES = [
    ("moving", (lambda i: (i, 0), (4,)), 2),
    ("constant", (lambda i: (3, 0), (4,)), 1),
    ("times zero", (lambda i: (i * 0, 0), (4,)), 1),
    ("minus itself", (lambda i: (i - i, 0), (4,)), 1),
    ("never changes, but depends", (lambda i: (i // 8, 0), (4,)), 2),
    ("clamped", (lambda i: (jnp.minimum(i, 0), 0), (4,)), 2),
    ("an axis of one", (lambda i, j: (j, 0), (4, 1)), 1),
    ("a grid of one", (lambda i: (i, 0), (1,)), 1),
    ("single buffering", (lambda i: (i, 0), (4,), pl.Buffered(1)), 1),
]


def check_timeline(call: PallasCall) -> None:
    """The classes hold every step, scope, FLOP and byte of the call exactly once."""
    assert sum(c.steps for c in call.classes) == call.grid_steps
    for scope in call.scopes.keys() - {""}:
        assert sum(c.steps * c.scopes.get(scope, 0) for c in call.classes) == call.scopes[scope]
    assert sum(c.steps * c.flops for c in call.classes) == call.executed_flops
    for role, first, rest in (
        ("input", call.fill_bytes, sum(c.steps * c.next_in_bytes for c in call.classes)),
        ("output", call.drain_bytes, sum(c.steps * c.prev_out_bytes for c in call.classes)),
    ):
        moved = sum(w.bytes_moved for w in call.windows if w.role == role)
        assert first + rest == moved, f"{role} bytes of the timeline and of the windows differ"


def attention(
    block_q: int, block_kv: int, *, online: bool, head_dim: int = 128, limit: int | None = None
) -> Built:
    """Attention of one head a grid row: online softmax, or a constant in place of the maximum."""
    heads, length = 8, 16384

    def kernel(q: Any, k: Any, v: Any, o: Any, sums: Any, acc: Any, m: Any, l: Any) -> None:
        with jax.named_scope("step"):
            contract = (((1,), (1,)), ((), ()))
            s = jax.lax.dot_general(q[...], k[...], contract, preferred_element_type=F32)
            if online:
                top = jnp.maximum(m[...], jnp.max(s, axis=1, keepdims=True))
                p, scale = jnp.exp(s - top[:, :1]), jnp.exp(m[...] - top)
                m[...] = top
            else:
                p, scale = jnp.exp(s - 20.0), jnp.ones_like(l)
                m[...] += 1.0
            l[...] = l[...] * scale + jnp.sum(p, axis=1, keepdims=True)
            pv = jnp.dot(p.astype(v.dtype), v[...], preferred_element_type=F32)
            acc[...] = acc[...] * scale[:, :1] + pv

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            with jax.named_scope("finalize"):
                o[...] = acc[...]
                sums[...] = l[...] + m[...]

    q = lambda h, i, j: (h, i, 0)
    kv = lambda h, i, j: (h, j, 0)
    call = pl.pallas_call(
        kernel, name="attention", grid=(heads, length // block_q, length // block_kv),
        in_specs=[
            pl.BlockSpec((None, block_q, head_dim), q),
            pl.BlockSpec((None, block_kv, head_dim), kv),
            pl.BlockSpec((None, block_kv, 128), kv),
        ],
        out_specs=[pl.BlockSpec((None, block_q, 128), q)] * 2,
        out_shape=[shaped((heads, length, 128), F32)] * 2,
        scratch_shapes=[pltpu.VMEM((block_q, 128), F32)] * 3,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
    )  # fmt: skip
    qk = shaped((heads, length, head_dim), BF16)
    return call, [qk, qk, shaped((heads, length, 128), BF16)]


def tiled(block: tuple[int, ...], array: tuple[int, ...], dtype: Any) -> Built:
    """Copies blocks of `array` along its first axis that has more than one."""
    axis = next(n for n, (b, a) in enumerate(zip(block, array, strict=True)) if b != a)

    def kernel(x: Any, z: Any, kept: Any) -> None:
        kept[...] = x[...]
        z[...] = kept[...]

    spec = pl.BlockSpec(block, lambda i: tuple(i if n == axis else 0 for n in range(len(block))))
    call = pl.pallas_call(
        kernel, name="tiled", grid=(array[axis] // block[axis],), in_specs=[spec], out_specs=spec,
        out_shape=shaped(array, dtype), scratch_shapes=[pltpu.VMEM(block, dtype)],
    )  # fmt: skip
    return call, [shaped(array, dtype)]


MANY = 2**16
TILES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((256, 64), (MANY * 16, 64)),
    ((256, 192), (MANY * 8, 192)),
    ((1, 1024), (1, MANY * 1024)),
    ((4, 1024), (4, MANY * 512)),
    ((100, 1024), (100, MANY * 64)),
    ((2, 1, 128), (MANY * 4, 1, 128)),
    ((1, 4, 128), (MANY * 4, 4, 128)),
    ((4096,), (MANY * 1024,)),
]


def window_cases() -> list[tuple[str, Built]]:
    """Cases whose VMEM windows and scratch the compiler lists."""
    cases = [(name, copy_call(*case)) for name, case, _ in BUFFER_CASES]
    for dtype in (F32, BF16, jnp.int8):
        cases += [(f"{jnp.dtype(dtype)} {b} of {a}", tiled(b, a, dtype)) for b, a in TILES]
    return cases


def temporary_cases() -> list[tuple[str, Callable[[int | None], Built]]]:
    """Cases whose values need VMEM of their own, as functions of the VMEM limit."""
    return [
        (
            f"{'online' if online else 'constant'} {bq} x {bkv}",
            lambda limit, bq=bq, bkv=bkv, online=online: attention(
                bq, bkv, online=online, limit=limit
            ),
        )
        for bq, bkv in ((256, 256), (512, 512), (1024, 512), (512, 1024), (1024, 1024))
        for online in (True, False)
    ]
