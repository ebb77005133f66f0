"""Compiles Mosaic GPU kernels for Hopper on a machine without a GPU, and reports what came out.

    for report in compile_kernels(fn, args):
        print(report)
        assert not report.faults()

The CUDA plugin builds a compile-only device from a description, so `jax.jit(fn).lower().compile()`
runs the real pipeline (MLIR, LLVM, PTX, ptxas) with no driver. It needs the `compile` extra of
pyproject.toml: the plugin of the same version as jax, ptxas and, for counts of instructions,
nvdisasm.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels.canonicalize import lowering_faster

# What XLA reads from an H100 SXM. Mosaic uses the compute capability alone.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 1 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# What a ptxas note of a slow kernel says: wgmma serialised (C7512 to C7514) or setmaxnreg ignored,
# and a wait injected (C7517). Each costs 20 to 35%; an injected arrive (C7519) costs nothing.
SLOW = ("Potential Performance Loss", "(C7512)", "(C7513)", "(C7514)", "(C7517)")

# SASS opcodes counted together, in the order shown.
FAMILIES = {
    "wgmma, A in shared memory": r"[HQI]GMMA\S*#SS",
    "wgmma, A in registers": r"[HQI]GMMA\S*#RS",
    "wgmma arrive": r"WARPGROUP\.ARRIVE",
    "wgmma wait": r"WARPGROUP\.DEPBAR",
    "TMA load": r"UTMALDG",
    "TMA store": r"UTMASTG",
    "TMA reduce": r"UTMAREDG",
    "mbarrier": r"SYNCS",
    "named barrier": r"BAR\.",
    "exp2, reciprocal, log": r"MUFU",
    "float32 arithmetic": r"F(FMA|MUL|ADD|MNMX|SEL|SETP)",
    "conversion": r"F2F|F2FP|I2F|F2I|PRMT|HADD2|HMUL2|HFMA2",
    "shuffle": r"SHFL",
    "ldmatrix, stmatrix": r"(LDSM|STSM)",
    "shared load, store": r"(LDS|STS)(\.|$)",
    "global load, store, atomic": r"(LDG|STG|RED|ATOM)",
    "local load, store (spills)": r"(LDL|STL)",
    "move": r"(MOV|R2UR|UMOV|IMAD\.MOV)",
}


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says about one kernel."""

    registers: int  # a thread's at launch; setmaxnreg changes it
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    notes: tuple[str, ...]  # lines with a (Cnnnn) code, and warnings

    def faults(self) -> list[str]:
        """Why this kernel is not fit to ship: spills, serialised wgmma."""
        faults = [note for note in self.notes if any(slow in note for slow in SLOW)]
        if self.spill_store_bytes or self.spill_load_bytes:
            faults.append(
                f"spills: {self.spill_store_bytes} bytes stored, {self.spill_load_bytes} loaded"
            )
        return faults


@dataclasses.dataclass(frozen=True)
class Sass:
    """What the machine code of one kernel holds."""

    instructions: int
    live_registers: int  # most at any one instruction
    families: dict[str, int]
    wgmma_shapes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled kernel. Its str() is a page to read."""

    name: str
    block: tuple[int, ...]
    setmaxnreg: tuple[str, ...]
    resources: Resources
    sass: Sass | None  # None if not asked for, or without nvdisasm

    def faults(self) -> list[str]:
        return self.resources.faults()

    def __str__(self) -> str:
        r = self.resources
        lines = [
            f"kernel {self.name}",
            f"  launch     block {self.block}",
            f"  registers  {r.registers} at launch, setmaxnreg {', '.join(self.setmaxnreg)}",
            f"  spills     {r.spill_store_bytes} bytes stored, {r.spill_load_bytes} loaded,"
            f" {r.stack_bytes} of stack",
            *(f"  note       {note}" for note in r.notes),
        ]
        if self.sass:
            lines += [
                f"  SASS       {self.sass.instructions} instructions,"
                f" at most {self.sass.live_registers} live registers",
                *(f"    {name:<28}{n:>6}" for name, n in self.sass.families.items() if n),
                *(f"    {shape:<28}{n:>6}" for shape, n in self.sass.wgmma_shapes.items()),
            ]
        return "\n".join(lines)


def missing() -> str | None:
    """What this machine lacks to compile kernels, None if nothing."""
    modules = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13")
    if not all(_importable(module) for module in modules):
        return "the CUDA plugin of jax is not installed: pip install -e '.[compile]'"
    if find_tool("ptxas") is None:
        return "ptxas is not installed: pip install -e '.[compile]'"
    return None


def find_tool(name: str) -> str | None:
    """Path of a CUDA tool: NVIDIA's wheels first, then PATH."""
    for root in sys.path:
        path = pathlib.Path(root, "nvidia/cu13/bin", name)
        if path.is_file():
            return str(path)
    return shutil.which(name)


def compile_kernels(
    fn: Callable,
    args: Any,
    keep: str | None = None,
    sass: bool | str = True,
) -> list[Report]:
    """Compiles `fn(*args)` for an H100 and reports on every Mosaic kernel in it.

    The plugin compiles equal kernels once in a process, so a kernel that an earlier call reported
    is not reported again.

    Args:
      fn: function to jit, with Mosaic GPU kernels in it.
      args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
      keep: directory to leave the PTX, the output of ptxas, cubin and SASS in.
      sass: count instructions too, which assembles every kernel once more, or the one of a name.

    Raises:
      ValueError: `fn` has no Mosaic kernel.
      RuntimeError: a kernel was compiled before by something else, so that nothing is known of it.
    """
    with _quiet_stderr():
        with lowering_faster():
            lowered = _lowered(fn, args)
        kernels = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', lowered.as_text()))
        # MOSAIC_GPU_DUMP_TO would write the IR after every pass too, up to 200 MB for a kernel.
        dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        ptxas_first = os.path.dirname(find_tool("ptxas")) + os.pathsep + os.environ["PATH"]
        with _environment(**dumps, PATH=ptxas_first), tempfile.TemporaryFile() as log:
            with _redirected(1, log):
                lowered.compile()
            log.seek(0)
            printed = log.read().decode()
    if not kernels:
        raise ValueError("the function has no Mosaic GPU kernel")
    compiled = re.split(r"^(?=//\n// Generated by LLVM NVPTX)", printed, flags=re.M)[1:]
    new = kernels - _reported
    if len(compiled) != len(new):
        raise RuntimeError(f"{len(new)} kernels were to compile, {len(compiled)} did")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        reports = [_report(text, folder, sass) for text in compiled]
    _reported.update(new)
    return reports


def compiled_program(fn: Callable, args: Any, **jit_options) -> str:
    """The HLO of the entry computation of `fn(*args)`, compiled for an H100.

    Its kernels count as compiled before for `compile_kernels`: give them shapes of their own.

    Args:
      fn: function to jit.
      args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
      **jit_options: of `jax.jit`.
    """
    with _quiet_stderr():
        text = _lowered(fn, args, **jit_options).compile().as_text()
    return text[text.index("\nENTRY") :]


_reported: set[str] = set()  # hashes of the kernels of earlier calls


def parse_ptxas_log(log: str) -> Resources:
    """Reads what `ptxas -v` printed for one kernel."""

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        if found is None:
            raise ValueError(f"no {pattern!r} in the output of ptxas:\n{log}")
        return int(found[1])

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
        notes=tuple(
            line.strip()
            for line in log.splitlines()
            if re.search(r"\(C\d+\)|[Ww]arning|Potential", line)
        ),
    )


# Opcode and operands, without the predicate.
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)([^;]*);")


def parse_sass(text: str) -> Sass:
    """Reads `nvdisasm --life-range-mode count`."""
    opcodes = collections.Counter()
    live = 0
    for line in text.splitlines():
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        opcode, operands = instruction.groups()
        if re.match(r"[HQI]GMMA", opcode):
            opcode += "#SS" if operands.split(",")[1].lstrip().startswith("gdesc") else "#RS"
        opcodes[opcode] += 1
        if alive := re.search(r"// \|\s*(\d+)", line):
            live = max(live, int(alive[1]))
    del opcodes["NOP"]
    return Sass(
        instructions=opcodes.total(),
        live_registers=live,
        families={
            family: sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))
            for family, pattern in FAMILIES.items()
        },
        wgmma_shapes={op: n for op, n in sorted(opcodes.items()) if "#" in op},
    )


def wgmma_loops(sass: str) -> list[list[str]]:
    """Opcodes, with operands, of the innermost loops with wgmma in them, the shortest first."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append("".join(instruction.groups()))
    loops = []
    for end, text in enumerate(code):
        target = re.match(r"BRA.*`\((\.L_\w+)\)", text)
        if target and labels.get(target[1], end + 1) <= end:
            loops.append(range(labels[target[1]], end + 1))
    innermost: list[range] = []
    for loop in sorted(loops, key=len):
        holds_another = any(inner[0] <= loop[-1] and loop[0] <= inner[-1] for inner in innermost)
        if not holds_another and any("GMMA" in code[n] for n in loop):
            innermost.append(loop)
    return [[code[n] for n in loop] for loop in innermost]


def _report(printed: str, folder: pathlib.Path, sass: bool | str) -> Report:
    """Reads PTX with the output of ptxas behind it, and leaves both in a folder."""
    text, log = re.split(r"^(?=ptxas )", printed, maxsplit=1, flags=re.M)
    name = re.search(r"\.entry (\w+)", text)[1].removesuffix("_mosaic_gpu_kernel")
    ptx = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.ptx"
    ptx.write_text(text)
    ptx.with_suffix(".ptxas").write_text(log)
    return Report(
        name=name,
        block=tuple(map(int, re.search(r"\.maxntid (\d+), (\d+), (\d+)", text).groups())),
        setmaxnreg=tuple(
            f"{action} {count}"
            for action, count in re.findall(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)", text)
        ),
        resources=parse_ptxas_log(log),
        sass=_disassemble(ptx) if sass in (True, name) else None,
    )


def _disassemble(ptx: pathlib.Path) -> Sass | None:
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm is None:
        return None
    cubin = ptx.with_suffix(".cubin")
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    run([find_tool("ptxas"), "-arch=sm_90a", "-O3", "-lineinfo", str(ptx), "-o", str(cubin)])
    sass = run([nvdisasm, "-c", "--life-range-mode", "count", str(cubin)]).stdout
    ptx.with_suffix(".sass").write_text(sass)
    return parse_sass(sass)


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


@functools.cache
def compile_only_devices(count: int) -> list:
    """H100s of one host that exist as a description only; programs for them compile."""
    with _quiet_stderr():
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="H100", topology=f"1x{count}x1", target_config=H100
        )
    return list(topology.devices)


def _lowered(fn: Callable, args: Any, **jit_options) -> jax.stages.Lowered:
    """`fn(*args)` lowered for one H100 that exists as a description only."""
    mesh = jax.sharding.Mesh(np.array(compile_only_devices(1)), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(fn, **jit_options).lower(*args)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _redirected(descriptor: int, log: IO[bytes]) -> Iterator[None]:
    """Sends what the plugin writes to a file, which Python's own sys.stdout does not see."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    saved = os.dup(descriptor)
    os.dup2(log.fileno(), descriptor)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Hides what the plugin says about a missing driver, unless something raises."""
    with tempfile.TemporaryFile() as log:
        try:
            with _redirected(2, log):
                yield
        except BaseException:
            log.seek(0)
            os.write(2, log.read())
            raise
