"""The kernel variants that tests compile: every one that the library may launch."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_flash
from pallas_kernels import defaults

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (1000, 0)},
    "narrow": {"is_causal": True, "local_window_size": (100, 0)},  # settings of width 64 alone
}

# Mask, axes of [B, N, T, S] that a dense mask and a bias have, dtype of the bias (None for that of
# the inputs), and whether gradients are deterministic.
ELEMENTS: dict[str, tuple[str, str | None, str | None, Any, bool]] = {
    "dense-mask": ("window", "bnts", None, None, False),
    "key-bias": ("lengths", None, "bs", jnp.float32, False),
    "dense-bias": ("causal", None, "nts", jnp.float32, True),
    "mask-bias": ("full", "bts", "nts", None, False),
    "bias": ("lengths", None, "nts", None, False),
}
# The widths that each is compiled at.
ELEMENT_WIDTHS = {
    "dense-mask": (64, 128, 256),
    "key-bias": (64, 128, 256),
    "dense-bias": (128, 160, 256),
    "mask-bias": (64, 128, 160, 256),
    "bias": (128,),
}
# Width, mask, axes of a dense mask and of a bias in float32, whether gradients are deterministic,
# and whether there is a soft cap. Above 192 columns `backward_key.py` spills with a dense one.
SEGMENTS: list[tuple[int, str, str | None, str | None, bool, bool]] = [
    (64, "causal", None, None, False, False),
    (96, "causal", None, None, False, False),
    (128, "causal", None, None, False, False),
    (128, "lengths", None, None, True, False),
    (160, "window", None, None, False, False),
    (256, "causal", None, None, False, False),
    (256, "lengths", None, None, False, False),
    (64, "causal", None, None, False, True),
    (128, "full", None, None, False, True),
    (128, "full", None, None, True, True),
    (128, "lengths", None, None, True, True),
    (160, "window", None, None, False, True),
    (64, "full", None, "nts", False, False),
    (64, "causal", "bnts", "bs", True, False),
    (128, "lengths", "bts", "nts", False, False),
    (256, "full", "bs", "bs", False, True),
]
# Query and value widths beside those of `defaults.WIDTHS`.
OTHER_WIDTHS = [
    (192, 128), (192, 192), (80, 80), (96, 96), (160, 160), (40, 72), (208, 208), (128, 96),
]  # fmt: skip

# With a soft cap, at the masks that take most registers, in tiles with tails: widths, mask or
# "lengths", axes of a dense mask and of a bias in float32, and whether gradients are deterministic.
SOFT_CAPS: list[tuple[int, int, str, str | None, str | None, bool]] = [
    (64, 64, "window", None, None, False),
    (64, 64, "lengths", None, None, True),
    (128, 128, "window", None, None, False),
    (128, 128, "lengths", None, None, True),
    (192, 128, "lengths", None, None, False),
    (256, 256, "window", None, None, False),
    (64, 64, "full", "bnts", None, False),
    (128, 128, "lengths", None, "bs", False),
]

# Width, mask, shape, whether gradients are deterministic, and whether there is a soft cap.
DROPOUT = [
    (64, "full", "even", False, False),
    *((width, mask, "even", False, False) for width in (64, 128) for mask in ("causal", "window")),
    *((width, "causal", "even", False, False) for width in (40, 96)),
    *((width, "lengths", "even", False, False) for width in (64, 128)),
    (64, "causal", "ragged", False, False),
    (64, "lengths", "ragged", False, False),
    (64, "window", "ragged", True, False),
    (128, "full", "even", False, False),
    (128, "causal", "ragged", False, False),
    (128, "lengths", "ragged", False, False),
    (128, "window", "ragged", True, False),
    (256, "full", "even", False, False),
    (256, "window", "ragged", False, False),
    (64, "window", "ragged", False, True),
    (128, "lengths", "ragged", True, True),
    (256, "lengths", "ragged", False, False),
]

# Dropout beside more, in tiles with tails: widths, mask or "lengths", axes of a dense mask and of a
# bias in float32, and whether there are segment ids and a soft cap.
CROWDED: list[tuple[int, int, str, str | None, str | None, bool, bool]] = [
    (64, 64, "full", "bs", None, False, False),
    (64, 64, "causal", None, "nts", False, False),
    (64, 64, "window", "bnts", None, False, True),
    (64, 64, "causal", None, None, True, True),
    (96, 96, "window", "bnts", None, False, False),
    (128, 128, "window", "bts", "nts", False, False),
    (128, 128, "lengths", None, "nts", False, True),
    (192, 128, "lengths", None, None, True, False),
    (192, 128, "causal", None, None, True, True),
    (256, 256, "window", "bnts", None, False, False),
    (256, 256, "lengths", None, "bs", False, False),
    (256, 256, "causal", None, "nts", False, False),
    (256, 256, "window", None, None, True, False),
    (64, 64, "window", "bnts", "nts", False, False),
    (128, 128, "causal", None, "bs", True, False),
    (256, 256, "lengths", None, None, True, True),
    (208, 208, "lengths", "bts", "nts", False, True),
]

# With a bias that TMA brings and a mask of keys, and with such a bias alone: width, batch, length,
# heads, whether the bias has a value a pair or a key, and whether there is a mask.
BESIDE_BIAS = [
    *((width, 64, 256, 8, "pairs", True) for width in (32, 48, 64, 128)),  # 256 rows a tile
    *((width, 64, 384, 8, "pairs", True) for width in (32, 64, 72)),  # 192
    (64, 16, 504, 12, "pairs", True),
    *((width, 64, 200, 8, "keys", True) for width in (32, 64, 128)),
    *((width, 64, 256, 8, "pairs", False) for width in (32, 64)),
    (64, 16, 512, 12, "pairs", False),
    (32, 64, 384, 8, "pairs", False),
]
# With a bias in tiles that TMA brings, of which keys are a multiple of 8, at each of these widths:
# mask or "lengths", and whether there are a dense mask, segment ids, a soft cap and dropout.
TILED_BIAS_WIDTHS = (64, 96, 128)
TILED_BIAS = [
    ("causal", False, False, False, False),
    ("window", True, False, False, False),
    ("lengths", False, False, False, False),
    ("causal", False, True, False, False),
    ("lengths", False, False, True, False),
    ("window", True, True, True, False),
    ("lengths", False, False, False, True),
    ("window", True, True, True, True),
]

# In FP8, at each of `defaults.WIDTHS`: mask, shape, and whether there are segment ids.
FP8 = [
    ("full", "even", False),
    ("causal", "ragged", False),
    ("window", "ragged", False),
    ("lengths", "ragged", False),
    ("causal", "ragged", True),
]

# With a mask_mod of that name (`_function`): width, shape, other options, and whether gradients are
# deterministic.
_CROWD = {"logits_soft_cap": 30.0, "dropout_rate": 0.1}
FUNCTIONS: list[tuple[str, int, str, dict[str, Any], bool]] = [
    ("image", 64, "even", {}, False),
    ("image", 64, "ragged", {}, True),
    ("image", 64, "few", {}, False),
    ("image", 128, "few", {}, False),
    ("image", 64, "ragged", {"logits_soft_cap": 30.0}, False),
    ("image", 64, "ragged", {"dropout_rate": 0.1}, False),
    ("image", 96, "ragged", {}, False),
    ("image", 128, "even", {}, False),
    ("image", 128, "ragged", {}, True),
    ("image", 128, "ragged", MASKS["window"], False),
    ("image", 128, "ragged", _CROWD, False),
    ("image", 256, "ragged", {}, False),
    ("image", 256, "ragged", {"logits_soft_cap": 30.0}, False),
    ("image", 256, "ragged", {"dropout_rate": 0.1}, False),
    ("documents", 64, "even", {}, False),
    ("documents", 64, "ragged", {}, False),
    ("documents", 64, "ragged", _CROWD, False),
    ("documents", 128, "even", {}, False),
    ("documents", 128, "ragged", {}, False),
    ("documents", 128, "ragged", _CROWD, False),
    ("pairs", 64, "ragged", {}, False),
    ("pairs", 128, "ragged", {}, False),
]

# With a score_mod of that name (`_score`): width, shape, mask, what it is beside, and whether
# gradients are deterministic.
SCORES: list[tuple[str, int, str, str, str, bool]] = [
    ("alibi", 64, "even", "causal", "", False),
    ("alibi", 64, "ragged", "full", "", False),
    ("alibi", 64, "few", "causal", "", False),
    ("relative", 128, "few", "full", "", False),
    ("alibi", 64, "ragged", "causal", "", True),
    ("alibi", 128, "even", "causal", "", False),
    ("alibi", 128, "ragged", "window", "", True),
    ("relative", 64, "even", "full", "", False),
    ("relative", 64, "ragged", "lengths", "", False),
    ("relative", 96, "ragged", "causal", "", False),
    ("relative", 128, "even", "full", "", False),
    ("relative", 128, "ragged", "lengths", "", True),
    ("cap", 64, "even", "causal", "", False),
    ("cap", 64, "ragged", "window", "", True),
    ("cap", 64, "ragged", "lengths", "", False),
    ("cap", 128, "even", "causal", "", False),
    ("cap", 128, "ragged", "window", "", True),
    ("cap", 128, "ragged", "lengths", "", False),
    ("gate", 128, "ragged", "causal", "", False),
    ("relative", 64, "ragged", "full", "dropout", False),
    ("relative", 64, "ragged", "full", "dense-mask", False),
    ("alibi", 64, "ragged", "full", "segments", False),
    ("relative", 64, "ragged", "full", "function", False),
    ("relative", 128, "ragged", "full", "dropout", False),
    ("alibi", 128, "ragged", "full", "dense-mask", False),
    ("relative", 128, "ragged", "full", "segments", False),
    ("relative", 128, "ragged", "full", "function", False),
]

# With gradients of what a score_mod captures (`_score_with_captured`): the same.
SCORE_READS: list[tuple[str, int, str, str, str]] = [
    ("slopes", 64, "even", "causal", ""),
    ("slopes", 128, "ragged", "window", ""),
    ("gates", 128, "even", "causal", ""),
    ("relative", 64, "ragged", "full", ""),
    ("relative", 128, "even", "full", ""),
    ("relative", 128, "ragged", "lengths", ""),
    ("relative", 128, "ragged", "full", "dropout"),
    ("relative", 64, "ragged", "full", "dense-mask"),
    ("differences", 128, "ragged", "causal", ""),
    ("differences", 80, "ragged", "full", ""),
    ("keys", 128, "ragged", "full", ""),
    ("queries", 64, "ragged", "lengths", ""),
    ("slopes", 128, "ragged", "full", "segments"),
    ("slopes", 128, "ragged", "full", "dropout"),
    ("slopes", 128, "ragged", "full", "dense-mask"),
    ("slopes", 128, "ragged", "full", "image"),
    ("slopes", 64, "ragged", "full", "documents"),
    ("relative", 128, "ragged", "full", "documents"),
]

BATCH = 2  # a batch of one takes fewer registers

# (T, S, N, K, dtype): tiles that fit, and tails at both ends with grouped heads. Of heads so many
# that tiles of some zero dQ of others.
SHAPES = {
    "even": (4096, 4096, 16, 16, jnp.bfloat16),
    "ragged": (1001, 1013, 256, 64, jnp.float16),
    "grouped": (4096, 4096, 32, 8, jnp.bfloat16),
    # One tile for each thread block, with groups dealt out in shares, of 64 rows of queries, which
    # one consumer has, and of 128; and the same rows in many.
    "few": (197, 205, 16, 4, jnp.bfloat16),
    "each": (197, 205, 20, 4, jnp.bfloat16),
    "short": (197, 205, 256, 64, jnp.bfloat16),
    # The queries of each head too: one share for each thread block; and more.
    "long": (3001, 205, 4, 2, jnp.bfloat16),
    "longer": (8889, 1184, 4, 1, jnp.bfloat16),
    # So few keys that steps of the forward are of 64; of three consumers at width 64, and of two.
    "keys": (1001, 157, 256, 64, jnp.float16),
    "fewer": (197, 157, 256, 64, jnp.float16),
    # One tile of keys, which makes dQ whole: of many tiles, and of one for each thread block.
    "one": (1001, 121, 256, 64, jnp.float16),
    "single": (1000, 128, 4, 4, jnp.bfloat16),
    # Of many even tiles, drawn; and tiles so short that they are not.
    "whole": (1000, 128, 256, 256, jnp.bfloat16),
    "many": (128, 128, 256, 256, jnp.bfloat16),
    "brief": (152, 152, 256, 256, jnp.bfloat16),
    "twos": (256, 256, 100, 100, jnp.bfloat16),
    # So few queries that the keys of the forward are dealt out in shares.
    "far": (197, 4099, 4, 2, jnp.bfloat16),
    "alone": (2997, 2997, 1, 1, jnp.bfloat16),
    # The same, where thread blocks have several shares each.
    "waves": (264, 12544, 55, 55, jnp.bfloat16),
    "thirds": (5336, 5336, 1, 1, jnp.bfloat16),
    "halves": (2477, 2477, 2, 2, jnp.bfloat16),
    # Of groups whose steps are dealt out amid a head: a share for each thread block, and drawn.
    "cut": (520, 205, 12, 4, jnp.bfloat16),
    # Some tiles more than whole rounds take, so that the last ones alone are in parts.
    "rest": (3033, 3033, 12, 4, jnp.bfloat16),
    "over": (2200, 2200, 32, 8, jnp.bfloat16),
    # Heads so long that dQ is made in tiles of 192 rows above width 128.
    "pair": (12288, 12288, 1, 1, jnp.bfloat16),
    # Where the forward has other settings at width 64.
    "s700": (700, 700, 12, 12, jnp.bfloat16),
    "s700-20": (700, 700, 20, 20, jnp.bfloat16),
    "s1000": (1000, 1000, 8, 8, jnp.bfloat16),
    "s1024": (1024, 1024, 32, 32, jnp.bfloat16),
    "s2048": (2048, 2048, 64, 64, jnp.bfloat16),
    "pieces": (1537, 1537, 14, 2, jnp.bfloat16),
}
# Width, mask, and shape of those.
SHORT = [
    *((width, mask, "few") for width in (64, 80, 128) for mask in ("full", "causal", "window")),
    (96, "full", "few"),
    (256, "full", "few"),
    (256, "causal", "few"),
    *((width, "lengths", "few") for width in (64, 72, 128, 256)),
    *((width, mask, "each") for width in (64, 80, 128, 256) for mask in ("full", "causal")),
    *((width, "window", "each") for width in (64, 72, 128)),
    *((width, "full", "pair") for width in (136, 192)),
    (64, "full", "short"),
    (64, "causal", "short"),
    (96, "causal", "short"),
    *((width, mask, "long") for width in (64, 128) for mask in ("full", "causal", "window")),
    *((width, mask, "longer") for width in (64, 128) for mask in ("full", "causal")),
    *((width, mask, "keys") for width in (64, 128) for mask in ("full", "causal", "lengths")),
    *((64, mask, "fewer") for mask in ("full", "causal", "lengths")),
    (40, "full", "fewer"),
    (128, "window", "keys"),
    (40, "causal", "keys"),
    (80, "full", "long"),
    (160, "full", "few"),
    (256, "full", "long"),
    (256, "causal", "long"),
    *((width, mask, "one") for width in (64, 72, 80, 128) for mask in ("full", "causal")),
    *((width, "full", "single") for width in (32, 64, 96, 128)),
    *((width, "full", "whole") for width in (64, 128)),
    *((width, mask, "many") for width in (64, 128) for mask in ("full", "causal")),
    (96, "causal", "many"),
    *((width, "causal", "brief") for width in (40, 64, 72, 128)),
    (64, "window", "brief"),
    (64, "causal", "twos"),
    *((width, "full", "far") for width in (64, 80, 128, 256)),
    *((width, mask, "alone") for width in (64, 128) for mask in ("causal", "window")),
    (72, "causal", "alone"),
    *((width, "full", "waves") for width in (64, 72, 80, 104, 128, 256)),
    *((width, "causal", "thirds") for width in (40, 72, 96, 128, 256)),
    (64, "causal", "halves"),
    (104, "causal", "halves"),
    (192, "causal", "alone"),
    (256, "window", "alone"),
    *((width, mask, "cut") for width in (64, 80, 128) for mask in ("full", "causal", "window")),
    *((width, mask, "pieces") for width in (64, 128) for mask in ("full", "causal", "window")),
    *((width, "causal", "pieces") for width in (40, 72, 96, 256)),
    (256, "causal", "cut"),
    *((width, "sides", "even") for width in (64, 72, 80, 96, 104, 128, 256)),
    (104, "full", "alone"),
    (112, "causal", "s1000"),
    (72, "window", "even"),
    *((256, mask, "long") for mask in ("window", "sides")),
    *((width, mask, "rest") for width in (40, 64, 72, 96, 128) for mask in ("full", "window")),
    (80, "window", "rest"),
    (120, "full", "rest"),
    (128, "causal", "over"),
    (128, "full", "grouped"),
]


# The same where keys of a batch entry end at a length, and what queries see is not in an array.
KEY_LENGTHS = [
    *((width, "causal", "ragged") for width in (40, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256)),
    *((width, "full", "ragged") for width in (64, 80, 128)),
    *((width, "full", "even") for width in (32, 64, 96, 128, 160, 256)),
    *((width, "full", shape) for width in (64, 128) for shape in ("few", "one", "whole", "keys")),
    *((width, "causal", shape) for width in (64, 128) for shape in ("few", "one", "brief")),
    (64, "full", "each"),
    *((64, "full", shape) for shape in ("s700", "s1000", "s2048")),
    *((64, "causal", shape) for shape in ("s700-20", "s1024", "even")),
    *((width, "full", "even") for width in (40, 72, 80, 104, 112)),
    *((width, "causal", "even") for width in (40, 72, 96, 112)),
    *((width, "full", "few") for width in (40, 72, 96, 112)),
]


# A bias of each pair and head, axes of a dense mask, and shapes.
BIAS_GRADIENTS: list[tuple[int, str | None, str]] = [
    *((width, None, shape) for width in (64, 128) for shape in ("even", "ragged", "few", "whole")),
    *((width, None, shape) for width in (24, 80, 96) for shape in ("even", "few")),
    *((width, "bts", shape) for width in (64, 128) for shape in ("even", "ragged")),
]

# The same beside one more.
SHORT_BESIDE = [
    *((64, "causal", "thirds", beside) for beside in ("cap", "dropout")),
    *((128, "causal", "thirds", beside) for beside in ("cap", "dropout")),
    *((width, "full", "thirds", "bias") for width in (64, 128)),
    (64, "full", "one", "cap"),
    (64, "causal", "one", "dropout"),
    (64, "full", "single", "bias"),
    (128, "causal", "one", "cap"),
    (128, "causal", "one", "dropout"),
    (128, "full", "one", "bias"),
    (64, "causal", "one", "bias-dropout"),
    (128, "full", "single", "dropout"),
    (64, "full", "few", "cap"),
    (64, "full", "few", "bias-cap"),
    (128, "causal", "few", "cap"),
    (64, "causal", "each", "cap"),
    (128, "full", "each", "cap"),
    *((width, "causal", "few", "dropout") for width in (64, 128, 256)),
    *((width, "full", "each", "dropout") for width in (64, 128)),
    *((width, "causal", "few", "bias") for width in (64, 128, 256)),
    (128, "full", "far", "bias"),
    (128, "full", "far", "dropout"),
    (256, "causal", "alone", "cap"),
]


def kernel_cases() -> list[tuple[str, Callable, Any]]:
    """`(id, fn, args)`: fn calls kernels, args are pytrees of `jax.ShapeDtypeStruct`."""
    cases = []
    for width, mask, shape in itertools.product(defaults.WIDTHS, MASKS, ("even", "ragged")):
        if mask == "narrow" and width != 64:
            continue
        T, S, N, K, dtype = SHAPES[shape]
        query = jax.ShapeDtypeStruct((BATCH, T, N, width), dtype)
        key = jax.ShapeDtypeStruct((BATCH, S, K, width), dtype)
        lse = jax.ShapeDtypeStruct((BATCH, T, N), jnp.float32)
        name = f"H{width}-{mask}-{shape}"
        args = (query, key, key, query, lse)
        # All masks that are known at run time alone have one code, but for lengths of keys alone.
        lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "full" else None
        # Deterministic gradients with tails, which take most registers.
        for deterministic in (False, True) if shape == "ragged" else (False,):
            fn = _forward_and_backward(MASKS[mask], deterministic)
            cases.append((f"{name}-deterministic" if deterministic else name, fn, args))
            if lengths is not None:
                case_name = f"H{width}-lengths-{shape}{'-deterministic' * deterministic}"
                cases.append((case_name, fn, (*args, lengths)))
        if shape == "ragged":
            sinks = jax.ShapeDtypeStruct((N,), jnp.float32)
            fn = _forward_with_sinks(MASKS[mask])
            cases.append((f"{name}-sinks", fn, (*args[:3], sinks)))
            if lengths is not None:
                case_name = f"H{width}-lengths-{shape}-sinks"
                cases.append((case_name, fn, (*args[:3], sinks, lengths)))
    cases += _cases_of_other_widths() + _cases_of_elements() + _cases_of_short()
    cases += (
        _cases_of_key_lengths()
        + _cases_of_key_masks()
        + _cases_of_bias_gradients()
        + _cases_of_soft_caps()
        + _cases_of_segments()
        + _cases_of_dropout()
    )
    cases += _cases_of_crowded() + _cases_of_tiled_bias() + _cases_of_functions()
    cases += _cases_beside_bias()
    cases += _cases_of_scores() + _cases_of_score_reads()
    return cases + _cases_of_fp8()


def has_fewer_masks(name: str) -> bool:
    """Whether a variant is one that another stands for, with more masks or tails."""
    patterns = [
        r"H\d+-(window|narrow|lengths)-even",
        r"H\d+-full-ragged(-deterministic|-sinks)?",
        r"H\d+-(causal|narrow)-ragged-(deterministic|sinks)",
        r"H\d+-(full-even|causal-ragged)-dropout",
        r"fp8-H64-(full-even|window-ragged)",
        r"fp8-H128-(causal|window)-ragged",
        r"fp8-H256-(full-even|causal-ragged)",
    ]
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _cases_of_other_widths() -> list[tuple[str, Callable, Any]]:
    """Deterministic gradients without tails, and with tails the masks that take most registers."""
    cases = []
    for width, value_width in OTHER_WIDTHS:
        for mask, shape in (("full", "even"), ("window", "ragged"), ("lengths", "ragged")):
            T, S, N, K, dtype = SHAPES[shape]
            shapes = (T, N, width), (S, K, width), (S, K, value_width), (T, N, value_width)
            args = [jax.ShapeDtypeStruct((BATCH, *s), dtype) for s in shapes]
            args.append(jax.ShapeDtypeStruct((BATCH, T, N), jnp.float32))
            if mask == "lengths":
                args.append(jax.ShapeDtypeStruct((BATCH,), jnp.int32))
            deterministic = shape == "even"
            fn = _forward_and_backward(MASKS.get(mask, {}), deterministic)
            name = f"H{width}-h{value_width}-{mask}-{shape}{'-deterministic' * deterministic}"
            cases.append((name, fn, tuple(args)))
    return cases


def _cases_of_short() -> list[tuple[str, Callable, Any]]:
    cases = []
    for width, mask, shape in SHORT:
        windows = {"window": (100, 0), "sides": (90, 40)}
        options = MASKS.get(mask, {})
        if mask in windows:
            options = options | {"local_window_size": windows[mask]}
        args = _args_of(width, width, mask, None, None, None, shape=shape)
        name = f"H{width}-{mask}-{shape}"
        cases.append((name, _forward_and_backward(options, deterministic=False), args))
    for width, mask, shape, beside in SHORT_BESIDE:
        dropout = {"dropout_rate": 0.1}
        cap = {"logits_soft_cap": 30.0}
        more = {"cap": cap, "dropout": dropout, "bias-cap": cap, "bias-dropout": dropout}
        fn = _forward_and_backward(MASKS[mask] | more.get(beside, {}), deterministic=False)
        bias_axes = "nts" if beside.startswith("bias") else None
        args = _args_of(width, width, mask, None, bias_axes, jnp.float32, shape=shape)
        cases.append((f"H{width}-{mask}-{shape}-{beside}", fn, args))
    return cases


def _cases_of_key_lengths() -> list[tuple[str, Callable, Any]]:
    """Lengths of keys alone."""
    cases = []
    for width, mask, shape in KEY_LENGTHS:
        args = _args_of(width, width, "lengths", None, None, None, shape=shape)
        fn = _forward_and_backward(MASKS[mask] | {"query_seq_lengths": None}, deterministic=False)
        cases.append((f"H{width}-key-lengths-{mask}-{shape}", fn, args))
    for width in (64, 128, 256):
        query, key, value, *_, lengths, _, _ = _args_of(width, width, "lengths", None, None, None)
        sinks = jax.ShapeDtypeStruct(query.shape[2:3], jnp.float32)
        fn = _forward_with_sinks({"query_seq_lengths": None})
        args = query, key, value, sinks, lengths
        cases.append((f"H{width}-key-lengths-full-ragged-sinks", fn, args))
    return cases


def _cases_of_key_masks() -> list[tuple[str, Callable, Any]]:
    """A mask of keys alone."""
    cases = []
    fn = _forward_and_backward({}, deterministic=False)
    for width, mask, shape in KEY_LENGTHS:
        if mask == "full" and width <= 128:
            args = _args_of(width, width, mask, "bs", None, None, shape=shape)
            cases.append((f"H{width}-key-mask-{shape}", fn, args))
    return cases


def _cases_of_bias_gradients() -> list[tuple[str, Callable, Any]]:
    """Of a bias of each pair and head, which the main kernel gives."""
    cases = []
    for width, mask_axes, shape in BIAS_GRADIENTS:
        args = _args_of(width, width, "full", mask_axes, "bnts", None, shape=shape)
        fn = _forward_and_backward({}, deterministic=False)
        name = f"H{width}-full-{shape}-own-bias{'-dense-mask' * bool(mask_axes)}"
        cases.append((name, fn, args))
    return cases


def _cases_of_elements() -> list[tuple[str, Callable, Any]]:
    """With tails, which take most registers."""
    cases = []
    for kind, width in ((k, width) for k, widths in ELEMENT_WIDTHS.items() for width in widths):
        mask, mask_axes, bias_axes, bias_dtype, deterministic = ELEMENTS[kind]
        fn = _forward_and_backward(MASKS.get(mask, {}), deterministic)
        args = _args_of(width, width, mask, mask_axes, bias_axes, bias_dtype)
        cases.append((f"H{width}-{mask}-{kind}", fn, args))
    return cases


def _cases_of_soft_caps() -> list[tuple[str, Callable, Any]]:
    cases = []
    for width, value_width, mask, mask_axes, bias_axes, deterministic in SOFT_CAPS:
        options = MASKS.get(mask, {}) | {"logits_soft_cap": 30.0}
        fn = _forward_and_backward(options, deterministic)
        args = _args_of(width, value_width, mask, mask_axes, bias_axes, jnp.float32)
        elements = "-dense-mask" * bool(mask_axes) + "-bias" * bool(bias_axes)
        name = f"H{width}-h{value_width}-{mask}{elements}-cap{'-deterministic' * deterministic}"
        cases.append((name, fn, args))
    # In bfloat16, with which the reference is known.
    for width, deterministic in itertools.product(defaults.WIDTHS, (False, True)):
        fn = _forward_and_backward(MASKS["causal"] | {"logits_soft_cap": 30.0}, deterministic)
        args = _args_of(width, width, "causal", None, None, None, shape="even")
        name = f"H{width}-causal-even-cap{'-deterministic' * deterministic}"
        cases.append((name, fn, args))
    return cases


def _args_of(
    width, value_width, mask, mask_axes, bias_axes, bias_dtype, *, shape="ragged"
) -> tuple:
    """Of `_forward_and_backward`; mask may be "lengths"."""
    T, S, N, K, dtype = SHAPES[shape]
    sizes = dict(b=BATCH, n=N, t=T, s=S)

    def array(axes: str | None, dtype):
        shape = tuple(size if axis in axes else 1 for axis, size in sizes.items()) if axes else ()
        return jax.ShapeDtypeStruct(shape, dtype) if axes else None

    shapes = (T, N, width), (S, K, width), (S, K, value_width), (T, N, value_width)
    arrays = [jax.ShapeDtypeStruct((BATCH, *shape), dtype) for shape in shapes]
    lse = jax.ShapeDtypeStruct((BATCH, T, N), jnp.float32)
    lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "lengths" else None
    return *arrays, lse, lengths, array(mask_axes, bool), array(bias_axes, bias_dtype or dtype)


def _cases_of_segments() -> list[tuple[str, Callable, Any]]:
    """With tails, which take most registers."""
    cases = []
    T, S, *_ = SHAPES["ragged"]
    ids = tuple(jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for length in (T, S))
    for width, mask, mask_axes, bias_axes, deterministic, has_cap in SEGMENTS:
        options = MASKS.get(mask, {}) | ({"logits_soft_cap": 30.0} if has_cap else {})
        fn = _forward_and_backward(options, deterministic)
        args = *_args_of(width, width, mask, mask_axes, bias_axes, jnp.float32), ids
        elements = "-dense-mask" * bool(mask_axes) + "-bias" * bool(bias_axes)
        extras = f"{elements}-segments{'-cap' * has_cap}{'-deterministic' * deterministic}"
        cases.append((f"H{width}-{mask}{extras}", fn, args))
    return cases


def _cases_of_dropout() -> list[tuple[str, Callable, Any]]:
    """Without tails and grouped heads, and with them."""
    cases = []
    for width, mask, shape, deterministic, has_cap in DROPOUT:
        options = MASKS.get(mask, {}) | ({"logits_soft_cap": 30.0} if has_cap else {})
        fn = _forward_and_backward(options | {"dropout_rate": 0.1}, deterministic)
        T, S, N, K, dtype = SHAPES[shape]
        shapes = (T, N, width), (S, K, width), (S, K, width), (T, N, width)
        arrays = [jax.ShapeDtypeStruct((BATCH, *s), dtype) for s in shapes]
        lse = jax.ShapeDtypeStruct((BATCH, T, N), jnp.float32)
        lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "lengths" else None
        extras = f"{'-cap' * has_cap}{'-deterministic' * deterministic}"
        name = f"H{width}-{mask}-{shape}-dropout{extras}"
        cases.append((name, fn, (*arrays, lse, lengths)))
    return cases


def _cases_of_crowded() -> list[tuple[str, Callable, Any]]:
    cases = []
    T, S, *_ = SHAPES["ragged"]
    both_ids = tuple(jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for length in (T, S))
    for width, value_width, mask, mask_axes, bias_axes, has_ids, has_cap in CROWDED:
        options = MASKS.get(mask, {}) | ({"logits_soft_cap": 30.0} if has_cap else {})
        fn = _forward_and_backward(options | {"dropout_rate": 0.1}, deterministic=False)
        args = _args_of(width, value_width, mask, mask_axes, bias_axes, jnp.float32)
        if has_ids:
            args = *args, both_ids
        elements = "-dense-mask" * bool(mask_axes) + "-bias" * bool(bias_axes)
        extras = f"{elements}{'-segments' * has_ids}{'-cap' * has_cap}"
        cases.append((f"H{width}-h{value_width}-{mask}{extras}-dropout", fn, args))
    return cases


def _cases_of_tiled_bias() -> list[tuple[str, Callable, Any]]:
    cases = []
    T, _, N, K, dtype = SHAPES["ragged"]
    S = 1016
    ids = tuple(jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for length in (T, S))
    for width, case in itertools.product(TILED_BIAS_WIDTHS, TILED_BIAS):
        mask, has_mask, has_ids, has_cap, has_dropout = case
        options = MASKS.get(mask, {}) | ({"logits_soft_cap": 30.0} if has_cap else {})
        fn = _forward(options | ({"dropout_rate": 0.1} if has_dropout else {}))
        query, key = (
            jax.ShapeDtypeStruct((BATCH, *shape, width), dtype) for shape in ((T, N), (S, K))
        )
        bias = jax.ShapeDtypeStruct((1, N, T, S), dtype)
        dense_mask = jax.ShapeDtypeStruct((BATCH, 1, T, S), bool) if has_mask else None
        lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "lengths" else None
        extras = f"{'-dense-mask' * has_mask}{'-segments' * has_ids}{'-cap' * has_cap}"
        name = f"H{width}-{mask}-tiled-bias{extras}{'-dropout' * has_dropout}"
        args = query, key, key, bias, dense_mask, lengths, ids if has_ids else (None, None)
        cases.append((name, fn, args))
    return cases


def _cases_beside_bias() -> list[tuple[str, Callable, Any]]:
    cases = []
    for width, batch, length, heads, of, has_mask in BESIDE_BIAS:
        array = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.bfloat16)
        axes = {"pairs": (1, heads, length, length), "keys": (batch, 1, 1, length)}[of]
        bias = jax.ShapeDtypeStruct(axes, jnp.bfloat16)
        mask = jax.ShapeDtypeStruct((batch, 1, 1, length), bool) if has_mask else None
        name = f"H{width}-s{length}-{of}-bias{'-key-mask' * has_mask}"
        cases.append((name, _forward({}), (array, array, array, bias, mask, None, (None, None))))
    return cases


def _function(name: str, shape: str) -> Callable:
    """One of positions, of pixels in rows of 64; of ids; or of each pair and head."""
    T, S, *_ = SHAPES[shape]
    ids = jnp.zeros((BATCH, max(T, S)), jnp.int32)
    shown = jnp.ones((T, S), bool)

    def image(b, h, q_idx, kv_idx):
        near = lambda x, y: jnp.abs(x - y) <= 6
        return near(q_idx // 64, kv_idx // 64) & near(q_idx % 64, kv_idx % 64)

    def documents(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)

    def pairs(b, h, q_idx, kv_idx):
        return shown[q_idx, kv_idx] & ((q_idx - kv_idx) % (h + 1) == 0)

    return {"image": image, "documents": documents, "pairs": pairs}[name]


def _cases_of_functions() -> list[tuple[str, Callable, Any]]:
    cases = []
    for function, width, shape, options, deterministic in FUNCTIONS:
        mask_mod = {"mask_mod": _function(function, shape)}
        fn = _forward_and_backward(options | mask_mod, deterministic)
        args = _args_of(width, width, "full", None, None, None, shape=shape)
        extras = "-window" * ("is_causal" in options) + "-cap" * ("logits_soft_cap" in options)
        extras += "-dropout" * ("dropout_rate" in options) + "-deterministic" * deterministic
        cases.append((f"H{width}-{function}-function-{shape}{extras}", fn, args))
    return cases


def _score(name: str, shape: str) -> Callable:
    """One that adds, by positions or by a table; one with a slope; one that reads arrays too."""
    T, S, N, *_ = SHAPES[shape]
    slopes, table = jnp.ones(N), jnp.zeros((N, 64))
    rows, keys = jnp.ones((BATCH, T)), jnp.ones((BATCH, S))

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * jnp.abs(q_idx - kv_idx)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, jnp.clip(kv_idx - q_idx + 32, 0, 63)]

    def cap(score, b, h, q_idx, kv_idx):
        return 30.0 * jnp.tanh(score / 30.0)

    def gate(score, b, h, q_idx, kv_idx):
        return score * jax.nn.sigmoid(keys[b, kv_idx]) + rows[b, q_idx]

    return {"alibi": alibi, "relative": relative, "cap": cap, "gate": gate}[name]


def _score_with_captured(name: str, shape: str) -> tuple[Callable, jax.ShapeDtypeStruct]:
    """One whose array is an argument, and that: of heads, differences, keys, or queries."""
    T, S, N, *_ = SHAPES[shape]
    functions = {
        "slopes": (lambda x, s, b, h, q, k: s - x[h] * jnp.abs(q - k), (N,)),
        "gates": (lambda x, s, b, h, q, k: s * jax.nn.sigmoid(x[h]), (N,)),
        "relative": (lambda x, s, b, h, q, k: s + x[h, jnp.clip(k - q + 32, 0, 63)], (N, 64)),
        "differences": (lambda x, s, b, h, q, k: s * x[h, k - q + T], (N, T + S)),
        "keys": (lambda x, s, b, h, q, k: s * jax.nn.sigmoid(x[b, k]), (BATCH, S)),
        "queries": (lambda x, s, b, h, q, k: s + x[b, q], (BATCH, T)),
    }
    function, array = functions[name]
    return function, jax.ShapeDtypeStruct(array, jnp.float32)


def _cases_of_score_reads() -> list[tuple[str, Callable, Any]]:
    """With gradients of what a score_mod captures."""
    cases = []
    for function, width, shape, mask, beside in SCORE_READS:
        score_mod, captured = _score_with_captured(function, shape)
        options = MASKS.get(mask, {}) | ({"dropout_rate": 0.1} if beside == "dropout" else {})
        if beside in ("image", "documents"):
            options |= {"mask_mod": _function(beside, shape)}

        def run(captured, *args, options=options, score_mod=score_mod):
            lengths, mask, bias, *ids = args[5:]

            def one(captured, *qkv):
                own = {"score_mod": functools.partial(score_mod, captured)}
                forward = _forward(options | own | {"return_residual": True})
                return forward(*qkv, bias, mask, lengths, *(ids or [(None, None)]))

            results, backward = jax.vjp(one, captured, *args[:3])
            return results, backward(args[3:5])

        mask_axes = "bnts" if beside == "dense-mask" else None
        args = _args_of(width, width, mask, mask_axes, None, None, shape=shape)
        if beside == "segments":
            T, S, *_ = SHAPES[shape]
            args = *args, tuple(jax.ShapeDtypeStruct((BATCH, n), jnp.int32) for n in (T, S))
        extras = f"-{beside}" * bool(beside)
        name = f"H{width}-{mask}-{function}-reads-{shape}{extras}"
        cases.append((name, run, (captured, *args)))
    return cases


def _cases_of_scores() -> list[tuple[str, Callable, Any]]:
    cases = []
    for function, width, shape, mask, beside, deterministic in SCORES:
        options = MASKS.get(mask, {}) | {"score_mod": _score(function, shape)}
        if beside == "dropout":
            options |= {"dropout_rate": 0.1}
        if beside == "function":
            options |= {"mask_mod": _function("image", shape)}
        mask_axes = "bnts" if beside == "dense-mask" else None
        args = _args_of(width, width, mask, mask_axes, None, None, shape=shape)
        if beside == "segments":
            T, S, *_ = SHAPES[shape]
            args = *args, tuple(jax.ShapeDtypeStruct((BATCH, n), jnp.int32) for n in (T, S))
        extras = f"-{beside}" * bool(beside) + "-deterministic" * deterministic
        fn = _forward_and_backward(options, deterministic)
        cases.append((f"H{width}-{mask}-{function}-score-{shape}{extras}", fn, args))
    return cases


def _cases_of_fp8() -> list[tuple[str, Callable, Any]]:
    """The forward of Quantized arrays, without tails and grouped heads, and with them."""
    cases = []
    for width, (mask, shape, segmented) in itertools.product(defaults.WIDTHS, FP8):
        T, S, N, K, _ = SHAPES[shape]
        rows = jax.ShapeDtypeStruct((BATCH, T, N, width), jnp.bfloat16)
        keys = jax.ShapeDtypeStruct((BATCH, S, K, width), jnp.bfloat16)
        arrays = jax.eval_shape(jax_flash.quantize_fp8, rows, keys, keys)
        lengths = jax.ShapeDtypeStruct((BATCH,), jnp.int32) if mask == "lengths" else None
        ids = [jax.ShapeDtypeStruct((BATCH, length), jnp.int32) for length in (T, S)]
        name = f"fp8-H{width}-{mask}-{shape}{'-segments' * segmented}"
        args = *arrays, lengths, ids if segmented else [None, None]
        cases.append((name, _forward_fp8(MASKS.get(mask, {})), args))
        if (mask, shape) == ("lengths", "ragged") and width in defaults.FORWARD_FP8_PROMOTING:
            own = defaults.FORWARD_FP8_PROMOTING[width]
            settings = dataclasses.replace(defaults.default(width), forward_fp8=own)
            cases.append((f"{name}-promoting", _forward_fp8({"config": settings}), args))
        if (width, mask, shape, segmented) == (256, "causal", "ragged", False):
            quantize = functools.partial(jax_flash.quantize_fp8, block_size=64)
            args = *jax.eval_shape(quantize, rows, keys, keys), *args[3:]
            cases.append((f"{name}-blocks-of-64", _forward_fp8(MASKS[mask]), args))
    return cases


# Tokens, page size, splits and options of decode_attention, from nothing to everything at once.
_OPTIONS = {"local_window_size": 1000, "logits_soft_cap": 30.0}
DECODE: dict[str, tuple[int, int | None, int, dict[str, Any]]] = {
    "one": (1, None, 1, {}),
    "splits": (1, None, 16, {}),
    "paged": (8, 64, 2, {}),
    "all": (30, 16, 1, _OPTIONS),
    "odd-all": (30, None, 1, _OPTIONS),  # a cache whose length is no multiple of 8
    "float8": (1, None, 1, {}),
    "float8-all": (30, 16, 1, _OPTIONS),
    "float8-odd-all": (30, None, 1, _OPTIONS),
}


def decode_cases() -> list[tuple[str, Callable, Any]]:
    """The same for decode_attention."""
    cases = []
    for width, kind in itertools.product(defaults.WIDTHS, DECODE):
        tokens, page_size, splits, options = DECODE[kind]
        dtype = jnp.float16 if kind in ("all", "odd-all") else jnp.bfloat16
        cache_dtype = jnp.float8_e4m3fn if "float8" in kind else dtype
        shape = jax.ShapeDtypeStruct
        cache = shape((BATCH, 8191 if "odd" in kind else 8192, 4, width), cache_dtype)
        args: dict[str, Any] = {}
        if page_size is not None:
            cache = shape((300, page_size, 4, width), cache_dtype)
            args["page_table"] = shape((BATCH, 8192 // page_size), jnp.int32)
        if kind.endswith("all"):
            args["sinks"] = shape((12,), jnp.float32)
        if "float8" in kind:
            args["key_scale"] = args["value_scale"] = shape((4,), jnp.float32)
        args |= {
            "query": shape((BATCH, tokens, 12, width), dtype),
            "key_cache": cache,
            "value_cache": cache,
            "lengths": shape((BATCH,), jnp.int32),
        }
        cases.append((f"decode-H{width}-{kind}", _decode(splits, options), (args,)))
    return cases


def _decode(splits: int, options: dict[str, Any]) -> Callable:
    def run(args):
        return jax_flash.decode_attention(
            **args, num_splits=splits, **options, implementation="mosaic_gpu"
        )

    return run


def _forward_with_sinks(mask: dict[str, Any]) -> Callable:
    def run(query, key, value, sinks, lengths=None):
        return jax_flash.attention(
            query,
            key,
            value,
            sinks=sinks,
            **{"query_seq_lengths": lengths, "key_value_seq_lengths": lengths} | mask,
            implementation="mosaic_gpu",
        )

    return run


def _forward(options: dict[str, Any]) -> Callable:
    def run(query, key, value, bias, dense_mask, lengths, ids):
        query_ids, key_ids = ids
        return jax_flash.attention(
            query,
            key,
            value,
            bias,
            dense_mask,
            **{"query_seq_lengths": lengths, "key_value_seq_lengths": lengths} | options,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            dropout_key=jax.random.key(0),
            implementation="mosaic_gpu",
        )

    return run


def _forward_fp8(mask: dict[str, Any]) -> Callable:
    def run(query, key, value, lengths, ids):
        query_ids, key_ids = ids
        return jax_flash.attention(
            query,
            key,
            value,
            **mask,
            key_value_seq_lengths=lengths,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            return_residual=True,
            implementation="mosaic_gpu",
        )

    return run


def _forward_and_backward(mask: dict[str, Any], deterministic: bool) -> Callable:
    forward = _forward(mask | {"return_residual": True, "deterministic": deterministic})

    def run(
        query, key, value, dout, dlse, lengths=None, dense_mask=None, bias=None, ids=(None, None)
    ):
        function = lambda *x: forward(*x, dense_mask, lengths, ids)
        results, backward = jax.vjp(function, query, key, value, bias)
        return results, backward((dout, dlse))

    return run
