"""Which implementation runs a call, and the reasons given; what cuDNN is trusted with."""

import ctypes
import dataclasses
import logging
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import jax_flash
from jax_flash import autodiff, cudnn, device, dispatch, xla
from jax_flash.device import Device
from pallas_kernels import defaults

CPU = Device("cpu", "cpu")
H100 = Device("gpu", "NVIDIA H100", (9, 0))
SLOW_H100 = dataclasses.replace(H100, slow_kernels="it is a Monday")
A100 = Device("gpu", "NVIDIA A100", (8, 0))
B200 = Device("gpu", "NVIDIA B200", (10, 0))
V100 = Device("gpu", "NVIDIA V100", (7, 0))
MI300 = Device("gpu", "AMD Instinct MI300X")
TPU = Device("tpu", "TPU v6 lite")

B, T, S, N, K, H = 2, 128, 256, 4, 2, 64


def shapes(t=T, s=S, heads=(N, K), width=H, dtype=jnp.bfloat16, batch=B):
    """Query, key and value that need no memory."""
    query = jax.ShapeDtypeStruct((batch, t, heads[0], width), dtype)
    key = jax.ShapeDtypeStruct((batch, s, heads[1], width), dtype)
    return query, key, key


@pytest.fixture(autouse=True)
def fresh_log():
    dispatch._log_once.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """Pretends that a device is present, and that the kernels and cuDNN refuse as told."""

    def pretend(here, kernels=None, cudnn_missing=None):
        monkeypatch.setattr(device, "device_of", lambda array: here)
        monkeypatch.setattr(autodiff, "unsupported", lambda call: kernels)
        monkeypatch.setattr(cudnn, "_installation_reason", lambda: cudnn_missing)

    return pretend


# --- the order ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "kernels", "cudnn_missing", "chosen", "passed_over"),
    [
        (H100, None, None, "mosaic_gpu", []),
        (H100, "no such width", None, "cudnn", ["mosaic_gpu"]),
        (H100, "no such width", "none found", "xla", ["mosaic_gpu", "cudnn"]),
        (SLOW_H100, None, None, "cudnn", []),
        (SLOW_H100, None, "none found", "mosaic_gpu", ["cudnn"]),
        (SLOW_H100, "no such width", "none found", "xla", ["cudnn", "mosaic_gpu"]),
        (A100, None, None, "cudnn", ["mosaic_gpu"]),
        (A100, None, "none found", "xla", ["mosaic_gpu", "cudnn"]),
        (B200, None, None, "cudnn", ["mosaic_gpu"]),
        (V100, None, None, "xla", ["mosaic_gpu", "cudnn"]),
        (MI300, None, None, "xla", ["mosaic_gpu", "cudnn"]),
        (TPU, None, None, "xla", ["mosaic_gpu", "cudnn"]),
        (CPU, None, None, "xla", ["mosaic_gpu", "cudnn"]),
    ],
)
def test_fastest_that_can(on, here, kernels, cudnn_missing, chosen, passed_over):
    on(here, kernels, cudnn_missing)
    explanation = jax_flash.explain(*shapes())
    assert explanation.implementation == chosen
    assert list(explanation.reasons) == passed_over
    if kernels and here is H100:
        assert explanation.reasons["mosaic_gpu"] == kernels
    if cudnn_missing:
        assert explanation.reasons["cudnn"] == cudnn_missing


def test_reasons_name_the_device(on):
    on(A100)
    assert jax_flash.explain(*shapes()).reasons == {
        "mosaic_gpu": "it needs a Hopper GPU (compute capability 9.x); "
        "this is NVIDIA A100 (compute capability 8.0)"
    }
    on(TPU)
    assert jax_flash.explain(*shapes()).reasons["cudnn"] == (
        "it needs an NVIDIA GPU; this is tpu (TPU v6 lite)"
    )


def test_explanation_as_text(on):
    on(H100, "no such width", "none found")
    assert str(jax_flash.explain(*shapes())) == (
        "xla\n  mosaic_gpu passed over: no such width\n  cudnn passed over: none found"
    )
    on(H100)
    assert str(jax_flash.explain(*shapes())) == "mosaic_gpu"


def test_nothing_can(on, monkeypatch):
    on(CPU)
    monkeypatch.setattr(xla, "unsupported", lambda call: "a reason")
    with pytest.raises(NotImplementedError, match=r"No implementation can do this call.*a reason"):
        jax_flash.explain(*shapes())


def test_attention_runs_what_explain_says(on, monkeypatch):
    ran = []
    in_xla = xla.attention
    for name, module in zip(dispatch.IMPLEMENTATIONS, (autodiff, cudnn, xla), strict=True):

        def record(call, name=name):
            ran.append(name)
            return in_xla(call)

        monkeypatch.setattr(module, "attention", record)
    query, key, value = (jnp.ones(x.shape, x.dtype) for x in shapes(t=8, s=8))
    on(H100)
    jax_flash.attention(query, key, value)
    on(A100)
    jax_flash.attention(query, key, value)
    on(CPU)
    jax_flash.attention(query, key, value)
    jax_flash.attention(query, key, value, implementation="mosaic_gpu")
    assert ran == ["mosaic_gpu", "cudnn", "xla", "mosaic_gpu"]


# --- the kernels --------------------------------------------------------------------------------


DROPOUT = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"local_window_size": (5, 3)}, None),
        ({"local_window_size": (5, 0), "is_causal": True, "query_offset": S - T}, None),
        ({"local_window_size": 9, "query_offset": jnp.int32(0)}, None),
        ({"is_causal": True, "query_offset": jnp.zeros(B, jnp.int32)}, None),
        ({"query_seq_lengths": jnp.ones(B, jnp.int32)}, None),
        ({"is_causal": True, "key_value_seq_lengths": jnp.ones(B, jnp.int32)}, None),
        (
            {
                "query_segment_ids": jnp.ones((B, T), jnp.int32),
                "key_value_segment_ids": jnp.ones((B, S), jnp.int32),
                "logits_soft_cap": 30.0,
            },
            None,
        ),
        (
            {
                "query_segment_ids": jnp.ones((B, T), jnp.int32),
                "key_value_segment_ids": jnp.ones((B, S), jnp.int32),
                "bias": jnp.ones((N, T, S)),
                "mask": jnp.ones((B, 1, 1, S), bool),
            },
            None,
        ),
        ({"local_window_size": 9, "sinks": jnp.ones(N)}, None),
        ({"mask": jnp.ones((B, 1, T, S), bool)}, None),
        ({"bias": jnp.ones((N, 1, S), jnp.float16), "is_causal": True}, None),
        ({"local_window_size": 9, "logits_soft_cap": 30.0}, None),
        ({"logits_soft_cap": 1e-4}, "logits_soft_cap 0.0001 is not in (0.001, 1000000.0)"),
        (DROPOUT | {"is_causal": True, "sinks": jnp.ones(N)}, None),
        (DROPOUT | {"logits_soft_cap": 30.0, "mask": jnp.ones((B, 1, 1, S), bool)}, None),
        (DROPOUT | {"bias": jnp.ones((N, T, S))}, None),
    ],
)
def test_what_the_kernels_take(monkeypatch, options, reason):
    monkeypatch.setattr(device, "device_of", lambda array: H100)
    explanation = jax_flash.explain(*shapes(), **options)
    assert explanation.reasons.get("mosaic_gpu") == reason
    assert (explanation.implementation == "mosaic_gpu") == (reason is None)


@pytest.mark.parametrize("width", [64, 256])
def test_the_kernels_take_all_options_together(monkeypatch, width):
    monkeypatch.setattr(device, "device_of", lambda array: H100)
    options = {
        "is_causal": True,
        "local_window_size": (5, 0),
        "query_offset": jnp.zeros(B, jnp.int32),
        "query_seq_lengths": jnp.ones(B, jnp.int32),
        "key_value_seq_lengths": jnp.ones(B, jnp.int32),
        "query_segment_ids": jnp.ones((B, T), jnp.int32),
        "key_value_segment_ids": jnp.ones((B, S), jnp.int32),
        "mask": jnp.ones((B, N, T, S), bool),
        "bias": jnp.ones((B, N, T, S)),
        "sinks": jnp.ones(N),
        "logits_soft_cap": 30.0,
        "return_residual": True,
        "deterministic": True,
    }
    explanation = jax_flash.explain(*shapes(width=width), **options, **DROPOUT)
    assert explanation.implementation == "mosaic_gpu"


# --- an explicit choice -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "value_width", "reason"),
    [
        (8, 8, None),
        (192, 128, None),
        (64, 256, None),
        (264, 64, "head width 264: the kernels take multiples of 8 up to 256"),
        (100, 64, "head width 100: the kernels take multiples of 8 up to 256"),
        (64, 4, "value width 4: the kernels take multiples of 8 up to 256"),
    ],
)
def test_widths_the_kernels_take(monkeypatch, width, value_width, reason):
    monkeypatch.setattr(device, "device_of", lambda array: H100)
    query, key, _ = shapes(width=width)
    explanation = jax_flash.explain(query, key, shapes(width=value_width)[2])
    assert explanation.reasons.get("mosaic_gpu") == reason


@pytest.mark.parametrize(
    ("implementation", "here"),
    [
        ("mosaic_gpu", H100),
        ("mosaic_gpu", CPU),  # to lower for a GPU elsewhere
        ("mosaic_gpu", TPU),
        ("cudnn", H100),
        ("cudnn", A100),
        ("xla", H100),
        ("xla", CPU),
    ],
)
def test_explicit_choice(on, implementation, here):
    on(here)
    explanation = jax_flash.explain(*shapes(), implementation=implementation)
    assert explanation == dispatch.Explanation(implementation, {})


@pytest.mark.parametrize(
    ("implementation", "here", "reason"),
    [
        ("mosaic_gpu", A100, "it needs a Hopper GPU .* this is NVIDIA A100"),
        ("mosaic_gpu", MI300, r"it needs a Hopper GPU .* this is gpu \(AMD"),
        ("mosaic_gpu", H100, "no such width"),
        ("mosaic_gpu", CPU, "no such width"),
        ("cudnn", CPU, "it needs an NVIDIA GPU; this is cpu"),
        ("cudnn", MI300, "it needs an NVIDIA GPU"),
        ("cudnn", A100, "none found"),
    ],
)
def test_explicit_choice_never_falls_back(on, implementation, here, reason):
    on(here, "no such width", "none found")
    query, key, value = (jnp.ones(x.shape, x.dtype) for x in shapes(t=8, s=8))
    for function in (jax_flash.attention, jax_flash.explain):
        with pytest.raises(
            NotImplementedError, match=f"implementation='{implementation}': {reason}"
        ):
            function(query, key, value, implementation=implementation)


def test_deterministic_runs_on_the_kernels(monkeypatch):
    monkeypatch.setattr(device, "device_of", lambda array: H100)
    explanation = jax_flash.explain(*shapes(width=64), deterministic=True)
    assert explanation.implementation == "mosaic_gpu"


def test_config_does_not_choose(on):
    on(CPU)
    assert jax_flash.explain(*shapes(), config=defaults.default(64)).implementation == "xla"


# --- the log ------------------------------------------------------------------------------------


def log_of(caplog, *args, **kwargs):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jax_flash"):
        jax_flash.explain(*args, **kwargs)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_log_once_per_reason(on, caplog):
    on(H100, "no such width")
    message = "attention runs on cudnn (mosaic_gpu passed over: no such width)"
    assert log_of(caplog, *shapes()) == [("WARNING", message)]
    assert log_of(caplog, *shapes()) == []
    on(H100, "another reason")
    assert len(log_of(caplog, *shapes())) == 1


def test_log_is_quiet_where_nothing_faster_is_hoped_for(on, caplog):
    on(H100)
    assert log_of(caplog, *shapes()) == []
    on(H100, "no such width")
    assert log_of(caplog, *shapes(), implementation="xla") == []
    on(A100)
    assert [level for level, _ in log_of(caplog, *shapes())] == ["INFO"]


# --- explain() ----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu", "cudnn"])
def test_log_says_that_kernels_are_slow(on, caplog, implementation):
    on(SLOW_H100)
    for _ in range(2):
        jax_flash.explain(*shapes(), implementation=implementation)
    message = "the kernels are slow here: it is a Monday"
    assert caplog.record_tuples == [("jax_flash", logging.WARNING, message)]


def test_explain_takes_arrays_and_shapes_alike():
    options = {
        "is_causal": True,
        "bias": jnp.zeros((1, N, 8, 8)),
        "key_value_seq_lengths": jnp.zeros(B, jnp.int32),
        "query_offset": jnp.zeros(B, jnp.int32),
        "sinks": jnp.zeros(N),
        "dropout_rate": 0.5,
        "dropout_key": jax.random.key(0),
        "scale": jnp.float32(1),
    }
    as_shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x
        for name, x in options.items()
    }
    structs = shapes(t=8, s=8)
    arrays = [jnp.zeros(x.shape, x.dtype) for x in structs]
    expected = jax_flash.explain(*arrays, **options)
    assert expected.implementation == "xla"
    assert jax_flash.explain(*structs, **as_shapes) == expected
    assert jax_flash.explain(*structs, **options) == expected
    assert jax_flash.explain(*arrays, **as_shapes) == expected


def test_explain_inside_jit():
    explanations = []

    @jax.jit
    def function(query, key, value):
        explanations.append(jax_flash.explain(query, key, value))
        return query

    function(*(jnp.zeros(x.shape, x.dtype) for x in shapes(t=8, s=8)))
    assert explanations[0].implementation == "xla"


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("9.0", (9, 0)), ("10.3", (10, 3)), ("gfx942", None), (None, None)],
)
def test_compute_capability(capability, expected):
    fake = types.SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)
    assert device._describe(fake).compute_capability == expected


@pytest.mark.parametrize(
    ("version", "libraries", "slow"),
    [
        ((0, 12, 0, 1), ["libnvJitLink.so.13"], "jax 0.12.0.1 assembles them with libnvJitLink"),
        ((0, 12, 0), ["libnvJitLink.so.12"], "which ignores setmaxnreg"),
        ((0, 12, 0, 1), [], None),
        ((0, 11, 2), ["libnvJitLink.so.13"], None),
        ((0, 12, 1), ["libnvJitLink.so.13"], None),
    ],
)
def test_where_kernels_are_slow(monkeypatch, version, libraries, slow):
    def load(name):
        if name not in libraries:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    device._slow_kernels.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", version)
    kernels, others = (
        device._describe(
            types.SimpleNamespace(platform="gpu", device_kind="", compute_capability=capability)
        ).slow_kernels
        for capability in ("9.0", "8.0")
    )
    device._slow_kernels.cache_clear()
    assert others is None
    assert kernels is None if slow is None else slow in kernels


def test_device_of_arrays_and_tracers():
    cpu = jax.devices("cpu")[0]
    expected = Device("cpu", cpu.device_kind)
    assert device.device_of(jax.device_put(jnp.ones(3), cpu)) == expected
    for default in (None, "cpu", cpu):
        if default is None and jax.default_backend() != "cpu":
            continue
        with jax.default_device(default):
            seen = []
            jax.eval_shape(lambda x, seen=seen: seen.append(device.device_of(x)), jnp.ones(3))
            assert seen == [expected]


# --- cuDNN --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (shapes(), {}),
        (shapes(), {"is_causal": True}),
        (shapes(t=S), {"is_causal": True, "local_window_size": (7, 3)}),
        (shapes(t=S), {"local_window_size": (7, 0)}),  # causal by another name
        (shapes(t=S), {"is_causal": True, "local_window_size": 4000}),  # restricts nothing
        (shapes(), {"query_offset": 3}),  # means nothing without causal or window
        (shapes(), {"is_causal": True, "query_offset": S - 1}),  # hides nothing
        (shapes(dtype=jnp.float16), {"scale": 0.1}),
        (shapes(t=114, s=204), {"is_causal": True}),
        (shapes(width=8), {}),
        (shapes(width=128), {}),
        (shapes(), {"dropout_key": jax.random.key(0)}),
    ],
)
@pytest.mark.parametrize("here", [A100, H100], ids=["A100", "H100"])
def test_cudnn_takes(on, here, arguments, options):
    on(here)
    assert jax_flash.explain(*arguments, implementation="cudnn", **options)


INT = jnp.int32


@pytest.mark.parametrize(
    ("here", "arguments", "options", "reason"),
    [
        (H100, shapes(dtype=jnp.float32), {}, "bfloat16 and float16, not float32"),
        (H100, (*shapes()[:2], shapes(width=32)[2]), {}, "as wide as the keys, not 32 and 64"),
        (H100, shapes(width=12), {}, "multiples of 8, not 12"),
        (H100, shapes(width=264), {}, "up to 256, not 264"),
        (A100, shapes(width=256), {}, "up to 128 on GPUs other than Hopper, not 256"),
        (B200, shapes(width=136), {}, "up to 128 on GPUs other than Hopper, not 136"),
        (V100, shapes(), {}, r"compute capability 8.0, not \(7, 0\)"),
        (H100, shapes(t=1), {}, "wrong for a length of 1"),
        (H100, shapes(s=1), {}, "wrong for a length of 1"),
        (H100, shapes(t=33), {}, "even lengths; T, S are 33,"),
        (H100, shapes(s=33), {}, "even lengths"),
        (H100, shapes(s=192), {}, "S % 128 is 64, as in S = 192"),
        (H100, shapes(t=2**18), {"batch": 32}, r"wrong beyond 2\*\*31 elements"),
        (H100, shapes(s=2**18), {"batch": 64}, r"wrong beyond 2\*\*31 elements"),
        (H100, shapes(), {"mask": jax.ShapeDtypeStruct((1, 1, 1, S), bool)}, "it has no mask"),
        (H100, shapes(), {"query_seq_lengths": jnp.ones(B, INT)}, "some row may see no key"),
        (H100, shapes(), {"key_value_seq_lengths": jnp.ones(B, INT)}, "some row may see no key"),
        (
            H100,
            shapes(),
            {
                "query_segment_ids": jnp.ones((B, T), INT),
                "key_value_segment_ids": jnp.ones((B, S), INT),
            },
            "no segment ids",
        ),
        (H100, shapes(), {"is_causal": True, "query_offset": S - T}, "no query_offset"),
        (H100, shapes(), {"is_causal": True, "query_offset": jnp.int32(0)}, "no query_offset"),
        (H100, shapes(t=S), {"local_window_size": (5, 1)}, "windows only with is_causal"),
        (H100, shapes(), {"local_window_size": (5, 0)}, "where T != S, as in 128 != 256"),
        (H100, shapes(), {"scale": jnp.float32(1)}, "scale known at compile time"),
        (H100, shapes(), {"bias": jax.ShapeDtypeStruct((T, S), jnp.bfloat16)}, "may give NaN"),
        (H100, shapes(), {"logits_soft_cap": 30.0}, "no logits_soft_cap"),
        (H100, shapes(), {"sinks": jnp.ones(N)}, "no sinks"),
        (
            H100,
            shapes(),
            {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
            "drop other weights",
        ),
        (H100, shapes(), {"return_residual": True}, "LSE is not differentiable"),
        (H100, shapes(), {"deterministic": True}, "not reproducible"),
    ],
)
def test_cudnn_refuses(on, here, arguments, options, reason):
    on(here, kernels="not these")
    options = dict(options)
    if "batch" in options:
        batch = options.pop("batch")
        arguments = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arguments]
    with pytest.raises(NotImplementedError, match=reason):
        jax_flash.explain(*arguments, implementation="cudnn", **options)
    explanation = jax_flash.explain(*arguments, **options)
    assert explanation.implementation == "xla"


def test_cudnn_that_is_not_installed(monkeypatch):
    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(device, "device_of", lambda array: A100)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", missing)
    with pytest.raises(NotImplementedError, match="jax found no usable cuDNN: cuDNN is not det"):
        jax_flash.explain(*shapes(), implementation="cudnn")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.2},
        {"is_causal": True, "local_window_size": (3, 9)},
        {"local_window_size": (3, 0)},
    ],
)
def test_what_is_handed_to_cudnn(on, monkeypatch, options):
    """jax.nn's own XLA path in the place of its cuDNN path: the arguments mean the same."""
    real = cudnn.dot_product_attention

    def in_xla(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return real(*args, implementation="xla", **kwargs)

    on(A100)
    monkeypatch.setattr(cudnn, "dot_product_attention", in_xla)
    query, key, value = (
        jax.random.normal(jax.random.key(i), x.shape).astype(x.dtype)
        for i, x in enumerate(shapes(t=16, s=16, width=8))
    )
    ours = jax_flash.attention(query, key, value, implementation="cudnn", **options)
    expected = jax_flash.attention(query, key, value, implementation="xla", **options)
    chex.assert_trees_all_close(
        ours.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0), (1, 2, 3), (4, 4, 4), (None, 1, 2), (3, None, None)]
)
def test_cudnn_under_vmap_of_any_axes(on, monkeypatch, in_axes):
    """Traced, not run: jax.nn's rule for cuDNN refuses a batch axis that is not the first."""
    on(A100)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def gradients(query, key, value, dout):
        def function(*qkv):
            return jax_flash.attention(*qkv, implementation="cudnn")

        return jax.vjp(function, query, key, value)[1](dout)

    arguments = (*shapes(t=8, s=16), shapes(t=8)[0])
    in_axes = (*in_axes, 4)  # the cotangent of the output has a batch axis of its own
    batched = [
        x if axis is None else jax.ShapeDtypeStruct((*x.shape[:axis], 3, *x.shape[axis:]), x.dtype)
        for x, axis in zip(arguments, in_axes, strict=True)
    ]
    grads = jax.eval_shape(jax.vmap(gradients, in_axes=in_axes), *batched)
    chex.assert_shape(grads, [(3, *x.shape) for x in arguments[:3]])


# --- on a Hopper GPU ----------------------------------------------------------------------------


def on_gpu(t, s, width, dtype, heads=(N, K)):
    return (
        jax.random.normal(jax.random.key(i), x.shape).astype(x.dtype)
        for i, x in enumerate(shapes(t, s, heads, width, dtype))
    )


def gradients(implementation, query, key, value, dtype=None, **options):
    """Output and gradients, in float32, of inputs cast to `dtype`."""
    dout = jax.random.normal(jax.random.key(9), query.shape)

    def loss(*qkv):
        qkv = qkv if dtype is None else [x.astype(dtype) for x in qkv]
        out = jax_flash.attention(*qkv, implementation=implementation, **options)
        out = out.astype(jnp.float32)
        return (out * dout).sum(), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (out, *grads))


def assert_as_good_as_xla(ours, low, exact):
    """As far from float32 as plain attention in the low precision, or at most twice as far."""
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, low, exact, strict=True):
        assert np.isfinite(a).all(), name
        assert np.abs(a - c).max() <= 2 * np.abs(b - c).max() + 1e-3, name


@pytest.mark.fast_cases(
    "4-4-64-bfloat16-full",
    "114-204-64-bfloat16-causal",
    "128-218-128-float16-full",
    "798-4-64-bfloat16-full",
    "1022-1024-128-bfloat16-causal",
    "1024-1022-128-float16-full",
)
@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("t", "s", "width"),
    [
        (4, 4, 64),
        (114, 204, 64),
        (128, 218, 128),
        (108, 256, 40),
        (798, 4, 64),
        (1022, 1024, 128),
        (1024, 1022, 128),
        (256, 384, 256),
    ],
)
def test_cudnn_on_gpu(t, s, width, dtype, options):
    query, key, value = on_gpu(t, s, width, dtype)
    ours = gradients("cudnn", query, key, value, **options)
    low = gradients("xla", query, key, value, **options)
    exact = gradients("xla", query, key, value, jnp.float32, **options)
    assert_as_good_as_xla(ours, low, exact)


@pytest.mark.fast_cases("114-window0", "384-window0")
@pytest.mark.gpu
@pytest.mark.parametrize("window", [(0, 0), (7, 0), (130, 5)])
@pytest.mark.parametrize("length", [114, 384])
def test_cudnn_window_on_gpu(length, window):
    query, key, value = on_gpu(length, length, 64, jnp.bfloat16)
    options = {"is_causal": True, "local_window_size": window}
    ours = gradients("cudnn", query, key, value, **options)
    low = gradients("xla", query, key, value, **options)
    exact = gradients("xla", query, key, value, jnp.float32, **options)
    assert_as_good_as_xla(ours, low, exact)


@pytest.mark.gpu
def test_cudnn_gradients_of_low_lse_on_gpu():
    """Rows whose LSE is about -100, where masks that cuDNN forgets would overflow."""
    for length in (128, 200, 204, 384):
        query, key, value = on_gpu(length, length, 64, jnp.bfloat16)
        query, key = query * 0.1, key * 0.1
        query = query.at[..., 0].set(1.0)
        key = key.at[..., 0].set(-100 * 8.0)
        assert all(np.isfinite(x).all() for x in gradients("cudnn", query, key, value))


@pytest.mark.gpu
def test_cudnn_vmap_on_gpu():
    query, key, value = on_gpu(96, 128, 64, jnp.bfloat16)

    def run(implementation):
        def function(query, key, value):
            return jax_flash.attention(query, key, value, implementation=implementation)

        mapped = jax.vmap(function, in_axes=(3, 1, None), out_axes=2)
        return mapped(jnp.stack([query, -query], 3), jnp.stack([key, 2 * key], 1), value)

    ours, theirs = run("cudnn").astype(jnp.float32), run("xla").astype(jnp.float32)
    chex.assert_trees_all_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_fastest_on_gpu():
    query, key, value = on_gpu(256, 256, 128, jnp.bfloat16)
    explanation = jax_flash.explain(query, key, value, is_causal=True)
    fastest = "cudnn" if device.device_of(query).slow_kernels else "mosaic_gpu"
    assert explanation == dispatch.Explanation(fastest, {})
    explanation = jax_flash.explain(*(x.astype(jnp.float32) for x in (query, key, value)))
    assert explanation.implementation == "xla"
    assert list(explanation.reasons) == ["mosaic_gpu", "cudnn"]
