"""install(): models that call JAX's and Flax's attention run ours, and mean what they meant."""

import functools
import importlib
import inspect
import logging
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.nn import functions

import jax_flash
from jax_flash import cudnn, drop_in
from tests.support.parity import PARITY, B, H, K, N, S, T, draw, qkv, random_mask

pytestmark = pytest.mark.extras

ORIGINAL = jax.nn.dot_product_attention
QUERY, KEY, VALUE = qkv()


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    assert jax.nn.dot_product_attention is functions.dot_product_attention is ORIGINAL
    assert not drop_in._installed


def is_ours(function, *arrays) -> bool:
    """Whether it runs jax_flash.attention, whose output has a name."""
    return jax_flash.CHECKPOINT_NAMES[0] in str(jax.make_jaxpr(function)(*arrays))


def call(query=QUERY, key=KEY, value=VALUE, bias=None, **options):
    """What a model does: it looks the function up when it runs."""
    return jax.nn.dot_product_attention(query, key, value, bias, **options)


def assert_same(function, *arrays, ours: bool, tolerance=2e-5):
    """The same before and after, and of ours or not."""
    jitted = jax.jit(function)
    expected = jitted(*arrays)
    assert not is_ours(function, *arrays)
    with jax_flash.install():
        assert is_ours(function, *arrays) == ours
        found = jitted(*arrays)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, atol=tolerance, rtol=tolerance)


# --- jax.nn -------------------------------------------------------------------------------------


# Of what tests/test_api.py compares in full, every argument.
SOME = "plain", "array scale", "bias 3D", "bias bfloat16", "mask and bias", "window int", "all"


@pytest.mark.parametrize("options", [PARITY[name] for name in SOME], ids=SOME)
def test_output_and_gradients(options):
    bias = [jnp.asarray(options["bias"])] if "bias" in options else []
    others = {name: x for name, x in options.items() if name != "bias"}
    dout = draw(9, (B, T, N, H))

    def run(*arrays):
        out, gradients = jax.vjp(functools.partial(call, **others), *arrays)
        return out, gradients(dout)

    is_rounded = bias and bias[0].dtype == jnp.bfloat16
    tolerance = 1e-2 if is_rounded else 2e-5
    assert_same(run, QUERY, KEY, VALUE, *bias, ours=True, tolerance=tolerance)


def arrays_of(dtype):
    return dict(zip(("query", "key", "value"), ((3 * x).astype(dtype) for x in qkv()), strict=True))


BIAS = draw(3, (B, N, T, S))
TAKEN = {
    "causal 1": {"is_causal": 1},
    "causal numpy": {"is_causal": np.bool_(True)},
    "causal array": {"is_causal": jnp.array(True)},
    "causal None": {"is_causal": None},
    "residual 1": {"return_residual": 1},
    "query of rank 3": {"query": QUERY[0], "key": KEY[:1], "value": VALUE[:1]},
    "key of rank 3": {"query": QUERY[:1], "key": KEY[0], "value": VALUE[:1]},
    "query of rank 2": {"query": QUERY[0, 0], "key": KEY[0], "value": VALUE[0]},
    "residual of rank 2": {
        "query": QUERY[0, 0],
        "key": KEY[0],
        "value": VALUE[0],
        "return_residual": True,
    },
    "lengths without a batch": {
        "query": QUERY[0],
        "key": KEY[0],
        "value": VALUE[0],
        "key_value_seq_lengths": [4],
        "query_seq_lengths": [3],
        "return_residual": False,
    },
    "lists": {"query": np.asarray(QUERY).tolist(), "bias": [[2.0] * S]},
    "float64 numpy": {"query": np.asarray(QUERY, np.float64)},
    "bias a number": {"bias": 2.0},
    "bias float16": {"bias": jnp.ones((T, S), jnp.float16)},
    "mask a bool": {"mask": True},
    "scale integer": {"scale": 2},
    "scale bfloat16": {"scale": jnp.bfloat16(0.5)},
    "window list": {"local_window_size": [1, 2]},
}
REPLACED = {
    "query int32": arrays_of(jnp.int32),
    "query int8": arrays_of(jnp.int8),
    "bias int32": {"bias": jnp.arange(S)},
    "bias bool": {"bias": BIAS > 0},
    "bias of more keys": {"key": KEY[:, :1], "value": VALUE[:, :1], "bias": BIAS},
    "mask of more keys": {"key": KEY[:, :1], "value": VALUE[:, :1], "mask": BIAS > -9},
    "scale of an axis": {"scale": jnp.array([0.3])},
    "scale of key heads": {"scale": jnp.arange(1.0, K + 1)[:, None, None]},
    "scale bool": {"scale": True},
    "scale infinite": {"scale": jnp.inf, "key": jnp.abs(KEY), "query": jnp.abs(QUERY)},
    "window negative": {"local_window_size": (-1, -1)},
    "window left of negative width": {"local_window_size": (-1, 5)},
    "window bool": {"local_window_size": True},
    "window floating": {"local_window_size": (1.5, 2.0)},
    "window array": {"local_window_size": jnp.array([1, 2])},
    "no heads": {"query": QUERY[:, :, :0]},
}


@pytest.mark.parametrize("options", TAKEN.values(), ids=TAKEN)
def test_what_jax_nn_takes_and_attention_does_not_by_itself(options):
    assert_same(functools.partial(call, **options), ours=True)


@pytest.mark.parametrize("options", REPLACED.values(), ids=REPLACED)
def test_what_the_function_that_was_replaced_runs(options):
    assert_same(functools.partial(call, **options), ours=False)


@pytest.mark.parametrize("options", [{"query": QUERY[:, :0]}, {"key": KEY[:, :0]}])
def test_empty_lengths(options):
    value = options.get("key", VALUE)
    expected = call(value=value, **options)
    with jax_flash.install():
        chex.assert_trees_all_equal(call(value=value, **options), expected)


def test_a_window_may_be_traced():
    assert_same(lambda window: call(local_window_size=window), jnp.array([1, 2]), ours=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((T, S))}, "mask dtype should be bool"),
        ({"implementation": "mosaic_gpu"}, "Unsupported implementation"),
        ({"sinks": jnp.zeros(N)}, "unexpected keyword argument 'sinks'"),
        ({"key": KEY.astype(jnp.bfloat16)}, "value dtype should be bfloat16"),
    ],
)
def test_errors_stay_those_of_jax_nn(options, message):
    with jax_flash.install(), pytest.raises((TypeError, ValueError), match=message):
        call(**options)


def test_where_it_differs():
    """As the docstring says: where a query sees no key, and in the LSE."""
    mask = random_mask(B, 1, T, S)
    mask[0, 0, 3] = False
    with jax_flash.install():
        out, lse = call(*qkv(jnp.bfloat16), mask=mask, return_residual=True)
    assert not out[0, 3].any()
    assert (lse[0, 3] == -jnp.inf).all()
    assert lse.dtype == jnp.float32


@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_named_implementations(name, monkeypatch):
    run = functools.partial(call, implementation=name)
    with jax_flash.install():
        assert is_ours(run)
    seen = []
    monkeypatch.setattr(drop_in, "of_jax_nn", lambda *_, **options: seen.append(options))
    with jax_flash.install(honour_implementation=True):
        assert is_ours(call)
        run()
    assert seen == [{"implementation": name}]


def test_honour_implementation_must_be_a_bool():
    with pytest.raises(TypeError, match="honour_implementation: got str; needs True or False"):
        jax_flash.install(honour_implementation="xla")


def test_signature_stays():
    with jax_flash.install():
        assert inspect.signature(jax.nn.dot_product_attention) == inspect.signature(ORIGINAL)


# --- what is installed, and undone --------------------------------------------------------------


def test_what_was_traced_is_traced_anew():
    jitted = jax.jit(lambda *arrays: call(*arrays, mask=jnp.zeros((T, S), bool)))
    means = jitted(QUERY, KEY, VALUE)
    assert means.any()
    with jax_flash.install():
        assert not jitted(QUERY, KEY, VALUE).any()
    chex.assert_trees_all_equal(jitted(QUERY, KEY, VALUE), means)


def test_both_names_of_jax_and_the_undoing():
    installed = jax_flash.install()
    assert functions.dot_product_attention is jax.nn.dot_product_attention is not ORIGINAL
    installed.undo()
    assert functions.dot_product_attention is jax.nn.dot_product_attention is ORIGINAL
    installed.undo()  # nothing


def test_is_undone_after_an_error():
    with pytest.raises(KeyError), jax_flash.install():
        raise KeyError
    assert not is_ours(call)


@pytest.mark.parametrize("in_order", [True, False])
def test_twice(in_order):
    """All stays until both are undone, and the last one's argument counts."""
    named = functools.partial(call, implementation="xla")
    outer = jax_flash.install()
    inner = jax_flash.install(honour_implementation=True)
    assert is_ours(call)
    assert not is_ours(named)
    first, last = (inner, outer) if in_order else (outer, inner)
    first.undo()
    assert is_ours(call)
    assert is_ours(named) == in_order
    last.undo()
    assert not is_ours(call)


def test_a_function_kept_after_the_undoing_runs_what_was_replaced():
    with jax_flash.install():
        kept = jax.nn.dot_product_attention
        assert is_ours(kept, QUERY, KEY, VALUE)
    assert not is_ours(kept, QUERY, KEY, VALUE)
    chex.assert_trees_all_equal(kept(QUERY, KEY, VALUE, implementation="xla"), call())


def test_attention_itself_calls_the_function_of_jax():
    with jax_flash.install():
        assert cudnn.dot_product_attention is ORIGINAL


def test_says_what_was_replaced(caplog):
    with caplog.at_level(logging.INFO, "jax_flash"), jax_flash.install():
        pass
    said = [record.getMessage() for record in caplog.records if record.name == "jax_flash"]
    assert said[0].startswith("install: attention in the place of jax.nn.dot_product_attention")
    assert said[1] == "undo: the functions that were replaced are back"


# --- Flax ---------------------------------------------------------------------------------------

WIDTH = 32
X = draw(5, (B, T, WIDTH))
MASKS = {
    "none": None,
    "bool": jnp.tril(jnp.ones((1, 1, T, T), bool)),
    "float32": jnp.tril(jnp.ones((B, 1, T, T))),
}


@pytest.fixture
def flax():
    return pytest.importorskip("flax", reason="needs the extra flax")


@pytest.fixture
def nnx(flax):
    return importlib.import_module("flax.nnx")


@pytest.fixture
def linen(flax):
    return importlib.import_module("flax.linen")


def test_imports_no_flax_and_reaches_it_where_it_was_imported_since(linen, monkeypatch):
    its_own = linen.dot_product_attention
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "flax.linen")
        outer = jax_flash.install()
        assert "flax.linen" not in sys.modules
    assert linen.dot_product_attention is its_own
    with jax_flash.install():
        assert linen.dot_product_attention is not its_own
        outer.undo()
    assert linen.dot_product_attention is its_own


def of_nnx(nnx, **options):
    return nnx.MultiHeadAttention(N, WIDTH, decode=False, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_nnx_modules_made_before_and_after(nnx, mask):
    made_before = of_nnx(nnx)
    parts = nnx.split(made_before)

    def results(x):
        def loss(weights, x):
            return (nnx.merge(parts[0], weights)(x, mask=mask) ** 2).sum()

        modules = made_before, of_nnx(nnx)
        outs = [module(x, mask=mask, is_causal=True) for module in modules]
        return outs, jax.grad(loss)(parts[1], x)

    assert_same(results, X, ours=True, tolerance=1e-4)
    with jax_flash.install():
        made_inside = of_nnx(nnx)
        assert is_ours(made_before, X)
        assert is_ours(made_inside, X)
    assert not is_ours(made_inside, X)
    assert made_inside.attention_fn is nnx.dot_product_attention


def test_nnx_drops_and_jits_with_ours(nnx):
    module = of_nnx(nnx, dropout_rate=0.5)
    run = nnx.jit(lambda module, x: module(x, deterministic=False, rngs=nnx.Rngs(1)))
    before = run(module, X)
    with jax_flash.install():
        assert is_ours(lambda x: module(x, deterministic=False, rngs=nnx.Rngs(1)), X)
        during = run(module, X)
    assert jnp.abs(before - during).max() > 0.01
    chex.assert_trees_all_equal(run(module, X), before)


def test_nnx_attention_with_rope(nnx):
    attention = importlib.import_module("flax.nnx.nn.attention")
    rope = attention.RoPE(WIDTH // N)
    with_rope = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    assert_same(of_nnx(nnx, attention_fn=with_rope), X, ours=True)


def of_linen(linen, name, **options):
    return getattr(linen, name)(num_heads=N, **options)


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["MultiHeadDotProductAttention", "SelfAttention"])
@pytest.mark.fast_cases(
    *(f"MultiHeadDotProductAttention-{mask}" for mask in MASKS), "SelfAttention-bool"
)
def test_linen_modules_made_before_and_after(linen, name, mask):
    made_before = of_linen(linen, name)
    weights = made_before.init(jax.random.key(2), X)

    def results(x):
        found = []
        for module in (made_before, of_linen(linen, name), made_before.clone()):
            run = functools.partial(module.apply, mask=mask)
            found.append((run(weights, x), jax.grad(lambda w, run=run: run(w, x).sum())(weights)))
        return found

    assert_same(results, X, ours=True, tolerance=1e-4)
    with jax_flash.install():
        made_inside = of_linen(linen, name), made_before.clone()
        for module in (made_before, *made_inside):
            assert is_ours(module.apply, weights, X)
    for module in made_inside:
        assert not is_ours(module.apply, weights, X)
        assert module.attention_fn is linen.dot_product_attention


def test_classes_of_linen_made_before_and_after(linen):
    class Before(linen.MultiHeadDotProductAttention):
        more: int = 0

    weights = Before(N).init(jax.random.key(2), X)
    with jax_flash.install():

        class Inside(linen.MultiHeadDotProductAttention):
            more: int = 0

        assert is_ours(Before(N).apply, weights, X)
        assert is_ours(Inside(N).apply, weights, X)
    assert not is_ours(Before(N).apply, weights, X)
    assert not is_ours(Inside(N).apply, weights, X)


def test_modules_keep_an_attention_fn_of_their_own(nnx, linen):
    own = lambda query, key, value, **_: value
    with jax_flash.install():
        assert of_nnx(nnx, attention_fn=own).attention_fn is own
        assert linen.MultiHeadAttention(N, attention_fn=own).attention_fn is own


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_weights(nnx, linen):
    module = of_linen(linen, "MultiHeadAttention")
    weights = module.init(jax.random.key(2), X)
    sow = lambda x: module.apply(weights, x, sow_weights=True, mutable=["intermediates"])
    assert_same(sow, X, ours=False)

    def sow_in_nnx(x):
        module = of_nnx(nnx)
        return module(x, sow_weights=True), nnx.pop(module, nnx.Intermediate)

    assert_same(sow_in_nnx, X, ours=False)


Q = draw(0, (B, T, N, H))
OF_LINEN = {
    "einsums": {
        "qk_attn_weights_einsum": jnp.einsum,
        "attn_weights_value_einsum": jnp.einsum,
    },
    "all dropped": {"dropout_rate": 1.0, "deterministic": True},
    "dot_general": {"einsum_dot_general": jax.lax.dot_general},
    "bias int32": {"bias": jnp.arange(T)},
    "bias of a batch": {"query": Q[:1], "key": Q[:1], "value": Q[:1], "bias": BIAS[..., :T]},
    "integers": {"query": Q.astype(int), "key": Q.astype(int), "value": Q.astype(int)},
}
OF_NNX = {
    "promote_dtype": {"promote_dtype": lambda arrays, dtype: [2 * x for x in arrays]},
    "integers": {"dropout_rate": 0.5, "deterministic": True} | OF_LINEN["integers"],
}


@pytest.mark.parametrize("options", OF_LINEN.values(), ids=OF_LINEN)
def test_what_linens_own_function_runs(linen, options):
    options = {"query": Q, "key": Q, "value": Q} | options
    assert_same(lambda: linen.dot_product_attention(**options), ours=False)


@pytest.mark.parametrize("options", OF_NNX.values(), ids=OF_NNX)
def test_what_nnxs_own_function_runs(nnx, options):
    """Without dropout it calls jax.nn's function, and that is ours."""
    options = {"query": Q, "key": Q, "value": Q} | options
    ours = "promote_dtype" in options
    assert_same(lambda: nnx.dot_product_attention(**options), ours=ours)
