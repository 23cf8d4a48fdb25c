"""Compiles the cases of `call_kernels` for one chip and prints what the compiler allocates.

    python allocations.py v5e windows|temporaries

One JSON line a case. `windows`: [tag, bytes] of every VMEM window and scratch operand.
`temporaries`: MiB the compiler needs beyond windows and scratch, as its refusal of a limit of just
those says; null when it fits. A process of its own, because libtpu reads its flags once.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import tempfile
from pathlib import Path

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+).*?tag = '(\w+ window|scratch operand)")
REFUSAL = re.compile(r"size ([\d.]+)([KM]) and limit")


def main(name: str, what: str) -> None:
    dump = tempfile.mkdtemp()
    os.environ.update(
        JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="none", TPU_WORKER_HOSTNAMES="localhost", TPU_LOG_DIR="disabled",
        TPU_MIN_LOG_LEVEL="3", TPU_STDERR_LOG_LEVEL="3", LIBTPU_INIT_ARGS=FLAGS.format(dump),
    )  # fmt: skip
    import call_kernels as kernels
    import jax
    from jax.experimental import topologies

    from autotune import device

    chip = device.get(name)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=chip.kind, num_cores=chip.cores, platform="tpu"
        ),
    )  # fmt: skip
    topology = topologies.get_topology_desc(chip.topology, platform="tpu")
    one = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def refusal(built: kernels.Built) -> str | None:
        fn, args = built
        try:
            with jax.sharding.use_abstract_mesh(mesh):
                lowered = jax.jit(fn, in_shardings=one, out_shardings=one).lower(*args)
            lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return str(error)
        return None

    if what == "windows":
        for label, built in kernels.window_cases():
            assert refusal(built) is None, label
            text = "".join(Path(p).read_text() for p in glob.glob(f"{dump}/*pre-finalize-reg*"))
            found = [(tag, int(size, 16)) for size, tag in ALLOCATION.findall(text)]
            print(json.dumps([label, sorted(found)]))
            for path in glob.glob(f"{dump}/*"):
                os.remove(path)
    for label, built in kernels.temporary_cases() if what == "temporaries" else ():
        needs = kernels.vmem_bytes(kernels.of(built(None), name))
        text = refusal(built(needs))
        match = REFUSAL.search(text or "")
        size = match and float(match[1]) / (1 if match[2] == "M" else 1024)
        print(json.dumps([label, size and round(size - needs / 2**20, 2)]))


main(*sys.argv[1:])
