"""Every kernel variant compiles for Hopper without spills or serialised wgmma."""

import functools
import json
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jax_flash
from jax_flash import launch
from pallas_kernels import canonicalize
from tests.support import compile as support
from tests.support import fingerprint
from tests.support.cases import slow
from tests.support.kernel_cases import decode_cases, has_fewer_masks, kernel_cases

# Compiled in any case, to see that it can be done here.
ALWAYS = ("H64-causal-ragged", "fp8-H128-causal-ragged", "decode-H128-splits")


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "fn", "args"),
    [
        pytest.param(name, fn, args, id=name, marks=[pytest.mark.slow] * has_fewer_masks(name))
        for name, fn, args in kernel_cases() + decode_cases()
    ],
)
def test_kernel_compiles_without_faults(name, fn, args):
    if name in ALWAYS:
        # What is not traced is known, and what is not lowered.
        now = fingerprint.outline(fn, args), fingerprint.fingerprint(fn, args)
        assert fingerprint.found(name, fn, args) == now
    elif fingerprint.golden().get(name) == fingerprint.found(name, fn, args)[1]:
        return  # as it was compiled before, and had none
    reports = support.compile_kernels(fn, args, sass=False)
    print(*reports, sep="\n")
    assert {report.name: report.faults() for report in reports if report.faults()} == {}


def test_a_fingerprint_is_of_the_code_and_not_of_its_lines():
    fn, args = matmul(width=64, accumulators=1, wait_n=0)
    own = fingerprint.fingerprint(fn, args)
    moved, _ = MOVED(width=64, accumulators=1, wait_n=0)
    assert fingerprint.fingerprint(moved, args) == own
    for changed in ({"width": 128}, {"accumulators": 2}, {"wait_n": 1}):
        other = matmul(**{"width": 64, "accumulators": 1, "wait_n": 0} | changed)
        assert fingerprint.fingerprint(*other) != own


def decoding(**options):
    x = jax.ShapeDtypeStruct((1, 200, 1, 64), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    options = {"num_splits": 1, "implementation": "mosaic_gpu"} | options
    one = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
    return functools.partial(jax_flash.decode_attention, **options), (one, x, x, lengths)


def test_an_outline_is_of_what_is_traced(monkeypatch):
    own = fingerprint.outline(*decoding())
    for options in ({"num_splits": 2}, {"local_window_size": 70}, {"logits_soft_cap": 2.0}):
        assert fingerprint.outline(*decoding(**options)) != own
    jax.clear_caches()
    with jax.enable_x64(True):
        assert fingerprint.outline(*decoding()) == own
    monkeypatch.setattr(fingerprint, "_sources_of_ptx", lambda: "others")
    assert fingerprint.outline(*decoding()) != own


def test_an_outline_is_of_what_functions_close_over():
    """As a jaxpr has the name alone of a function that writes PTX."""

    def writes(columns, inner):
        return lambda also=columns: (inner, also)

    def described(columns):
        return fingerprint._described(writes(0, writes(columns, "ex2.approx")))

    assert described(8) == described(8) != described(16)
    with pytest.raises(TypeError, match="nobody knows what this is"):
        described(object())


def test_what_is_traced_is_of_sources_that_count():
    allowed = {path.stem for path in fingerprint.TRACED if path.parent.name == "support"}
    for path in (path for path in fingerprint.TRACED if path.stem in allowed):
        text = path.read_text()
        imported = re.findall(
            r"^from tests\.support(?:\.(\w+) import .+| import (\w+))$", text, re.M
        )
        assert len(imported) == len(re.findall(r"^(?:from|import) tests\b", text, re.M)), path
        assert {module or name for module, name in imported} <= allowed, path


def test_sources_are_code_and_not_what_is_said_of_it(monkeypatch, tmp_path):
    path = tmp_path / "kernel.py"
    monkeypatch.setattr(fingerprint, "TRACED", [path])
    monkeypatch.setattr(fingerprint, "_ROOT", tmp_path)

    def of(text):
        path.write_text(text)
        return fingerprint.sources.__wrapped__()

    own = of('"""A kernel."""\n\ndef f(x):\n    """Twice."""\n    return 2 * x\n')
    assert of("def f(x):\n    # Doubled.\n    return 2 * x\n") == own
    assert of("def f(x):\n    return 3 * x\n") != own


def test_functions_that_write_ptx_are_of_sources_that_count():
    """And import nothing else of `pallas_kernels`, but for what tells whether to write any."""
    allowed = {path.stem for path in fingerprint.SOURCES} | {"interpret"}
    for path in (path for path in fingerprint.SOURCES if path.parent.name == "ptx"):
        imported = re.findall(r"^\s*(?:from|import) pallas_kernels\.(\S+)", path.read_text(), re.M)
        assert {name.removeprefix("ptx.") for name in imported} <= allowed, path


@pytest.fixture
def file(monkeypatch, tmp_path):
    """Writes what fingerprints.json is to hold."""
    monkeypatch.setattr(fingerprint, "GOLDEN", tmp_path / "golden.json")

    def write(fingerprints, versions=None, sources=None):
        record = {"versions": versions or fingerprint.versions(), "fingerprints": fingerprints}
        record |= {"sources": sources} if sources else {}
        record["outlines"] = {name: f"of {name}" for name in fingerprints}
        fingerprint.GOLDEN.write_text(json.dumps(record))

    return write


def test_what_other_versions_compiled_is_not_known(file, capsys):
    own, known = fingerprint.versions(), {"a": {"kernel": "1"}}
    file(known)
    assert fingerprint.golden() == known
    for package in own:
        file(known, own | {package: "0"})
        assert fingerprint.golden() == {}
        for arguments in ([], ["--update"]):
            assert fingerprint.main(arguments) == 2
            assert "nothing can be compared" in capsys.readouterr().out


def test_where_no_source_has_changed_nothing_is_traced(file, monkeypatch):
    case = "a", *decoding()
    file({"a": {"kernel": "1"}})  # of no sources that are known
    monkeypatch.setattr(fingerprint, "fingerprint", lambda *_: {"kernel": "2"})
    assert fingerprint.found(*case) == (fingerprint.outline(*case[1:]), {"kernel": "2"})
    file({"a": {"kernel": "1"}}, sources=fingerprint.sources())
    assert fingerprint.found(*case) == ("of a", {"kernel": "1"})
    monkeypatch.setattr(fingerprint, "sources", lambda: "others")
    assert fingerprint.found(*case) == (fingerprint.outline(*case[1:]), {"kernel": "2"})


@pytest.fixture
def compiled(file, monkeypatch):
    """Names of the cases that are compiled, of four that there are beside one that is gone."""
    file({name: {"kernel": "1"} for name in ("same", "changed", "bad", "gone")})
    now = {"same": "1", "changed": "2", "bad": "2", "new": "2"}
    monkeypatch.setattr(fingerprint, "cases", lambda: dict.fromkeys(now))
    compiled = []

    def for_all(function, names, _):
        if function is fingerprint._found:
            return {name: (f"now of {name}", {"kernel": now[name]}) for name in names}
        compiled.extend(names)
        return {name: ["spills"] if name == "bad" else [] for name in names}

    monkeypatch.setattr(fingerprint, "_for_all", for_all)
    return compiled


LISTED = ["changed: kernel", "bad: kernel", "new: kernel", "gone is gone"]


def test_fingerprints_that_changed_are_listed(compiled, capsys):
    before = fingerprint.golden()
    assert fingerprint.main([]) == 1
    assert capsys.readouterr().out.splitlines() == LISTED
    assert not compiled and fingerprint.golden() == before


def test_what_compiles_is_kept(compiled, capsys):
    assert fingerprint.main(["--update"]) == 1
    assert capsys.readouterr().out.splitlines() == [*LISTED, "bad", "  spills"]
    assert compiled == ["changed", "bad", "new"]
    kept = {"changed": "2", "new": "2", "same": "1"}
    assert fingerprint.golden() == {name: {"kernel": x} for name, x in kept.items()}
    assert fingerprint.golden("outlines") == {name: f"now of {name}" for name in kept}
    assert fingerprint.outlines_of_these_sources() == fingerprint.golden("outlines")


def test_other_cases_stay_as_they_are(compiled, capsys):
    assert fingerprint.main(["chang", "--update"]) == 0
    assert capsys.readouterr().out.splitlines() == LISTED[:1]
    kept = {"bad": "1", "changed": "2", "gone": "1", "same": "1"}
    assert fingerprint.golden() == {name: {"kernel": x} for name, x in kept.items()}
    assert fingerprint.golden("outlines") == {
        name: f"now of {name}" if name == "changed" else f"of {name}" for name in kept
    }
    assert fingerprint.outlines_of_these_sources() == {}  # as others are of other sources


def matmul(width: int, accumulators: int, wait_n: int):
    """A `[64, 64] @ [64, width]` on one warpgroup, and its arguments.

    Args:
      width: columns of the product.
      accumulators: how many products are kept in registers at a time, `width / 2` of them each.
      wait_n: how many products may be in flight as the accumulator is read: 0 is right.
    """

    def swizzled(columns: int):
        return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(*refs):
            @pl.loop(0, 4)
            def _(_):
                for ref in refs:
                    plgpu.wgmma(ref, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            plgpu.wgmma(refs[0], a_smem, b_smem)
            total = plgpu.wgmma_accumulator_load(refs[0], wait_n=wait_n)
            return sum((ref[...] for ref in refs[1:]), start=total)

        out_smem[...] = pl.run_scoped(multiply, *[plgpu.ACC((64, width))] * accumulators)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    fn = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, width), jnp.float32),
        scratch_types=(
            plgpu.SMEM((64, 64), jnp.bfloat16, transforms=swizzled(64)),
            plgpu.SMEM((64, width), jnp.bfloat16, transforms=swizzled(64)),
            plgpu.SMEM((64, width), jnp.float32, transforms=swizzled(32)),
            plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="matmul",
    )
    a = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    return fn, (a, jax.ShapeDtypeStruct((64, width), jnp.bfloat16))


# The same on other lines.
MOVED = types.FunctionType(
    matmul.__code__.replace(co_firstlineno=matmul.__code__.co_firstlineno + 1000), globals()
)


@pytest.mark.compiler
def test_report_of_a_sound_kernel():
    (report,) = support.compile_kernels(*matmul(width=64, accumulators=1, wait_n=0))
    assert report.faults() == []
    assert report.name == "matmul"
    assert report.block == (128, 1, 1)
    assert 0 < report.resources.registers <= 255
    assert "kernel matmul" in str(report)


@pytest.mark.compiler
@pytest.mark.skipif(support.find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
def test_machine_code_is_counted():
    (report,) = support.compile_kernels(*matmul(width=128, accumulators=1, wait_n=0))
    assert report.sass.wgmma_shapes == {"HGMMA.64x128x16.F32.BF16#SS": 5 * 4}
    assert report.sass.families["TMA load"] == 2
    assert report.sass.families["local load, store (spills)"] == 0
    assert 64 < report.sass.live_registers <= report.resources.registers


def forward(width: int, shape: tuple[int, int, int] = (1, 1000, 2)):
    x = jax.ShapeDtypeStruct((*shape, width), jnp.bfloat16)
    return functools.partial(jax_flash.attention, implementation="mosaic_gpu"), (x, x, x)


def gradients(width: int):
    fn, args = forward(width)
    return lambda *qkvd: jax.vjp(fn, *qkvd[:3])[1](qkvd[3]), (*args, args[0])


def long_forward(width: int):
    """With tiles for every SM, and so two consumers, and early values."""
    return forward(width, (1, 4000, 16))


def backward(width: int):
    """Without the forward, which would be compiled for nothing."""
    fn, args = forward(width)
    kept = jax.eval_shape(lambda *qkv: jax.vjp(fn, *qkv)[1], *args)
    return lambda kept, d_out: kept(d_out), (kept, args[0])


@pytest.mark.compiler
@pytest.mark.skipif(support.find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize(
    ("make", "width", "kernel"),
    [
        pytest.param(long_forward, 128, "attention_forward", id="forward-H128"),
        pytest.param(backward, 64, "attention_backward", id="backward-H64"),
    ],
)
def test_exponentials_stand_before_the_wait_for_an_earlier_product(make, width, kernel, tmp_path):
    # ptxas is free to put them behind it, which costs 3 to 6%.
    support.compile_kernels(*make(width), keep=tmp_path, sass=kernel)
    (path,) = tmp_path.glob("*.sass")
    step = support.wgmma_loops(path.read_text())[0]
    waits = [n for n, text in enumerate(step) if re.match(r"WARPGROUP\.DEPBAR.*0x0", text)]
    exponentials = [n for n, text in enumerate(step) if text.startswith("MUFU.EX2")]
    assert len(exponentials) == 64
    assert exponentials[-1] < waits[0]


@pytest.mark.compiler
@pytest.mark.skipif(support.find_tool("nvdisasm") is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize(("width", "is_prefetched"), [(120, True), slow(56, False)])
def test_what_dq_is_added_to_first_is_prefetched(width, is_prefetched, tmp_path):
    support.compile_kernels(*backward(width), keep=tmp_path, sass="attention_backward")
    (path,) = tmp_path.glob("*.sass")
    assert ("UBLKPF.L2" in path.read_text()) == is_prefetched


@pytest.mark.compiler
def test_lowered_as_jax_does_the_ptx_is_the_same(tmp_path, monkeypatch):
    found = []
    for name in ("as jax does", "in less time"):
        folder = tmp_path / name
        monkeypatch.setattr(support, "_reported", set())
        with monkeypatch.context() as patch:
            if name == "as jax does":
                patch.setattr(canonicalize, "_SERIALIZE", "of another jax")
                patch.setattr(canonicalize, "_VERSION", "of another jax")
            launch._module.cache_clear()
            support.compile_kernels(*gradients(96), keep=folder, sass=False)
        found.append({_without_places(path.read_text()) for path in folder.glob("*.ptx")})
    assert len(found[0]) == 4
    assert found[0] == found[1]


def _without_places(ptx: str) -> str:
    """PTX without what it says of the source: of operations that were one, either's."""
    return re.sub(r"^\t\.loc\t.*\n", "", ptx, flags=re.M)


@pytest.mark.compiler
def test_spills_are_a_fault():
    # 2 * 256 * 64 float32 are 256 registers in each of 128 threads, which have 255.
    (report,) = support.compile_kernels(*matmul(width=256, accumulators=2, wait_n=0), sass=False)
    assert report.resources.spill_store_bytes > 0
    assert any("spills" in fault for fault in report.faults())


@pytest.mark.compiler
def test_serialised_wgmma_is_a_fault():
    (report,) = support.compile_kernels(*matmul(width=64, accumulators=1, wait_n=1), sass=False)
    assert any("C7514" in fault for fault in report.faults())


@pytest.mark.compiler
def test_function_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no Mosaic GPU kernel"):
        support.compile_kernels(lambda x: x + 1, (jax.ShapeDtypeStruct((8,), jnp.float32),))


@pytest.mark.compiler
def test_kernel_compiled_before_is_not_reported_again():
    kernel = matmul(width=192, accumulators=1, wait_n=0)
    assert len(support.compile_kernels(*kernel, sass=False)) == 1
    assert support.compile_kernels(*kernel, sass=False) == []


LOG = """\
{note}
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    16 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""


@pytest.mark.parametrize(
    ("note", "stores", "loads", "faults"),
    [
        ("", 0, 0, 0),
        ("", 8, 0, 1),
        ("", 0, 8, 1),
        (
            "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            0,
            0,
            1,
        ),
        (
            "(C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            0,
            8,
            2,
        ),
        (
            "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            0,
            0,
            1,
        ),
        ("(C7508) Potential Performance Loss: 'setmaxnreg' ignored", 0, 0, 1),
        ("(C7517) warpgroup.wait is injected in around line 239 by compiler", 0, 0, 1),
        ("(C7519) warpgroup.arrive is injected in around line 239 by compiler", 0, 0, 0),
    ],
)
def test_faults_in_a_ptxas_log(note, stores, loads, faults):
    log = LOG.format(note=f"ptxas info    : {note}" if note else "", stores=stores, loads=loads)
    resources = support.parse_ptxas_log(log)
    assert len(resources.faults()) == faults
    assert (resources.registers, resources.stack_bytes) == (168, 16)


def test_unreadable_ptxas_log_is_refused():
    with pytest.raises(ValueError, match="registers"):
        support.parse_ptxas_log("ptxas fatal   : something else")
