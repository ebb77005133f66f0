"""install() under models of other libraries as they are: outputs and gradients, before and after.

Not reached is attention that a library writes out itself:
  equimo's, unless its model is switched to "cudnn", which is jax.nn.dot_product_attention,
  attnax's, but for AttentionType.FLASH on a GPU, which is that function too,
  jimm's DINOv3, whose attention with RoPE is jimm's own.
"""

import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import pytest

import jax_flash
from tests.support.cases import slow

pytestmark = pytest.mark.extras

AUTO = (jax.sharding.AxisType.Auto,) * 2

BATCH, LAYERS, HEADS, WIDTH = 2, 2, 4, 32


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


IMAGES = draw(0, BATCH, 32, 32, 3)
LATENTS = draw(1, BATCH, 16, 16, 4)
TIMES = jnp.array([0.1, 0.7])
TEXT = draw(2, BATCH, 5, 24)
TOKENS = jnp.arange(2 * 9).reshape(2, 9) * 7 % 50


def library(name):
    return pytest.importorskip(name, reason="needs the extra models")


def reached(run, weights) -> int:
    """How often it runs jax_flash.attention, whose output has a name."""
    return str(jax.make_jaxpr(run)(weights)).count(jax_flash.CHECKPOINT_NAMES[0])


def noisy(weights):
    """Everything has to count: gates and last layers begin as zeros."""
    leaves, tree = jax.tree.flatten(weights)
    return tree.unflatten([x + 0.1 * draw(i, *x.shape) for i, x in enumerate(leaves)])


# --- models: weights, and functions of them -----------------------------------------------------


def of_nnx(model, *args, take=lambda out: out, **options):
    nnx = importlib.import_module("flax.nnx")
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def run(weights):
        return take(nnx.merge(graph, weights, rest, copy=True)(*args, **options))

    return noisy(weights), run


def of_linen(model, *args):
    weights = jax.jit(model.init)(jax.random.key(0), *args)
    return noisy(weights), lambda weights: model.apply(weights, *args)


def equimo_vit(implementation=None):
    models = library("equimo.vision.models.vit")
    attention = importlib.import_module("equimo.core.layers.attention")
    eqx = importlib.import_module("equinox")
    sizes = dict(img_size=32, in_channels=3, patch_size=8, num_classes=10)
    model = models.VisionTransformer(
        **sizes, dim=WIDTH, num_heads=HEADS, depths=[LAYERS], key=jax.random.key(0)
    )
    if implementation:
        model = attention.with_attention_implementation(model, implementation)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    weights, tree = jax.tree.flatten(arrays)
    images = IMAGES.swapaxes(1, 3).astype(jnp.float16)  # its "cudnn" takes no float32

    def run(weights):
        model = eqx.combine(tree.unflatten([x.astype(jnp.float16) for x in weights]), rest)
        return jax.vmap(functools.partial(model, inference=True))(images).astype(jnp.float32)

    return noisy(weights), run


def canvit():
    """Attention to patches in each layer, and to a canvas: read after the first, then written."""
    models, config = library("canvit_nnx"), importlib.import_module("canvit_core.backbone")
    nnx = importlib.import_module("flax.nnx")
    spec = config.ViTSpec(WIDTH, HEADS, LAYERS, patch_size=8, layerscale_init=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.BACKBONES, "vits16", spec)
        sizes = models.CanViTConfig("vits16", canvas_num_heads=2, canvas_head_dim=16, rw_stride=1)
        model = models.CanViT(sizes, rngs=nnx.Rngs(0))
        state = model.init_state(batch_size=BATCH, canvas_grid_size=4)
        viewpoint = models.Viewpoint.full_scene(batch_size=BATCH)
        weights, run = of_nnx(
            model,
            glimpse=IMAGES,
            state=state,
            viewpoint=viewpoint,
            take=lambda out: (out.glimpse_patches, out.state.canvas),
        )

    def in_sizes(weights):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(config.BACKBONES, "vits16", spec)
            return run(weights)

    return weights, in_sizes


def jimm_vit():
    sizes = dict(num_layers=LAYERS, num_heads=HEADS, hidden_size=WIDTH, mlp_dim=2 * WIDTH)
    sizes |= dict(img_size=32, patch_size=8, num_classes=10, dropout_rate=0.0)
    return of_nnx(library("jimm").VisionTransformer(**sizes), IMAGES)


def jimm_text():
    """The encoder of CLIP, causal."""
    sizes = dict(num_text_layers=LAYERS, num_text_heads=HEADS, text_hidden_size=WIDTH)
    model = library("jimm").CLIPTextModel(context_length=9, vocab_size=50, **sizes)
    return of_nnx(model, TOKENS)


def flaxdiff(module, name):
    models = library(f"flaxdiff.models.{module}")
    sizes = dict(output_channels=4, patch_size=2, emb_features=WIDTH)
    model = getattr(models, name)(**sizes, num_layers=LAYERS, num_heads=HEADS)
    return of_linen(model, LATENTS, TIMES, TEXT)


# And how often attention is called.
CASES = {
    "canvit_nnx CanViT": (canvit, LAYERS + 2),
    "flaxdiff DiT": (functools.partial(flaxdiff, "simple_dit", "SimpleDiT"), LAYERS),
    "flaxdiff MMDiT": (functools.partial(flaxdiff, "simple_mmdit", "SimpleMMDiT"), LAYERS),
    "flaxdiff UViT": (functools.partial(flaxdiff, "simple_vit", "UViT"), LAYERS + 1),
}


def results(run, weights):
    """Output, and gradients of the weights."""

    def loss(weights):
        out = run(weights)
        return sum((x**2).mean() for x in jax.tree.leaves(out)), out

    return jax.jit(jax.grad(loss, has_aux=True))(weights)


def assert_close(found, expected, tolerance):
    """Of what is largest in each array."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(x - y).max() <= tolerance * max(1e-3, jnp.abs(y).max())


def check(weights, run, calls):
    expected = results(run, weights)
    assert reached(run, weights) == 0
    with jax_flash.install():
        assert reached(run, weights) == calls
        found = results(run, weights)
    assert_close(found, expected, 1e-4)
    assert reached(run, weights) == 0


@pytest.mark.parametrize(("make", "calls"), CASES.values(), ids=CASES)
@pytest.mark.fast_cases("canvit_nnx CanViT", "flaxdiff MMDiT", "flaxdiff UViT")
def test_before_and_after(make, calls):
    check(*make(), calls)


@pytest.mark.parametrize("make", [slow(jimm_vit), jimm_text])
def test_jimm_before_and_after(make):
    """Its layers are one scan, and need a mesh with axes of these names."""
    library("jimm")
    with jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=AUTO)):
        check(*make(), calls=1)


def test_equimo_before_and_after():
    """Its own attention, then what its users choose for cuDNN, on any device."""
    weights, own = equimo_vit()
    _, switched = equimo_vit("cudnn")
    expected = results(own, weights)
    with jax_flash.install():
        assert reached(own, weights) == 0
        assert reached(switched, weights) == LAYERS
        found = results(switched, weights)
    assert_close(found, expected, 1e-2)


def test_attnax_is_not_reached():
    models, nnx = library("attnax"), importlib.import_module("flax.nnx")
    layer = models.MultiHeadAttention(nnx.Rngs(0), num_heads=HEADS, in_features=WIDTH)
    weights, run = of_nnx(layer, draw(3, BATCH, 8, WIDTH))
    with jax_flash.install():
        assert reached(run, weights) == 0
