"""Attention of published models, one row a layer: `python -m benchmarks.attention --suite models`.

Heads, widths, windows, caps and token counts are those that a model's authors published, where the
source says. A batch is ours, such that a row is as large as a step or a request may be. Where a
layer has more than attention has here, `part` says what is left out.
"""

import dataclasses

from benchmarks.rows import Row

KINDS = (
    "language",
    "vision",
    "speech",
    "diffusion",
    "video",
    "biology",
    "recommendation",
    "drawn",  # of no model
)
USES = ("training", "prefill")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
      kind: one of KINDS.
      use: one of USES; prefill is any forward pass over many tokens, of serving or sampling.
      model: its name and size; "" for shapes that were drawn at random and are kept.
      source: where its numbers were published.
      row: the shape. Windows of models count a query's own key, those of rows do not.
      part: which of its layers, or on how many devices, or "".
    """

    kind: str
    use: str
    model: str
    source: str
    row: Row
    part: str = ""

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.model, self.part, f"{self.kind} {self.use}")))


def rows() -> list[Row]:
    """The rows of LAYERS, titled by what they are."""
    return [dataclasses.replace(layer.row, title=layer.title) for layer in LAYERS]


def _drawn(row: Row, part: str) -> Layer:
    """A shape of no model, and what of it asks for something of its own."""
    return Layer("drawn", "training", "", "drawn at random, 2026", row, part)


# fmt: off
LAYERS = [
    # Language: decoders.
    Layer("language", "training", "GPT-2", "paper, config.json, 2019",
          Row(16, 1024, 12, 12, 64, True)),
    Layer("language", "training", "GPT-2 XL", "paper, config.json, 2019",
          Row(8, 1024, 25, 25, 64, True)),
    Layer("language", "training", "GPT-3 175B", "paper, 2020",
          Row(4, 2048, 12, 12, 128, True), "at tensor parallel 8"),
    Layer("language", "training", "GPT-J 6B", "config.json, 2021", Row(4, 2048, 16, 16, 256, True)),
    Layer("language", "training", "GPT-NeoX 20B", "paper, 2022",
          Row(4, 2048, 16, 16, 96, True), "at tensor parallel 4"),
    Layer("language", "training", "PaLM 540B", "paper, 2022",
          Row(4, 2048, 6, 1, 256, True), "at tensor parallel 8"),
    Layer("language", "training", "Falcon 7B", "config.json, 2023", Row(2, 2048, 71, 1, 64, True)),
    Layer("language", "training", "StarCoder", "paper, config.json, 2023",
          Row(1, 8192, 48, 1, 128, True)),
    Layer("language", "training", "Llama 2 7B", "paper, config.json, 2023",
          Row(2, 4096, 32, 32, 128, True)),
    Layer("language", "training", "TinyLlama 1.1B", "config.json, 2023",
          Row(8, 2048, 32, 4, 64, True)),
    Layer("language", "training", "Llama 3 8B", "paper, config.json, 2024",
          Row(1, 8192, 32, 8, 128, True)),
    Layer("language", "training", "Llama 3 70B", "paper, config.json, 2024",
          Row(1, 8192, 64, 8, 128, True)),
    Layer("language", "training", "Llama 3 70B", "paper, config.json, 2024",
          Row(1, 8192, 8, 1, 128, True), "at tensor parallel 8"),
    Layer("language", "training", "Llama 3.1 405B", "paper, config.json, 2024",
          Row(1, 8192, 16, 1, 128, True), "at tensor parallel 8"),
    Layer("language", "training", "Llama 3.2 1B", "config.json, 2024",
          Row(2, 8192, 32, 8, 64, True)),
    Layer("language", "training", "Mistral 7B", "paper, config.json, 2023",
          Row(1, 8192, 32, 8, 128, True, window=4095)),
    Layer("language", "prefill", "Mixtral 8x7B", "paper, config.json, 2024",
          Row(1, 32768, 32, 8, 128, True)),
    Layer("language", "training", "Grok-1", "published code and weights, 2024",
          Row(1, 8192, 48, 8, 128, True, soft_cap=30.0)),
    Layer("language", "training", "Qwen2.5 0.5B", "paper, config.json, 2024",
          Row(4, 4096, 14, 2, 64, True)),
    Layer("language", "training", "Qwen2.5 7B", "paper, config.json, 2024",
          Row(2, 4096, 28, 4, 128, True)),
    Layer("language", "training", "Qwen3 0.6B", "paper, config.json, 2025",
          Row(4, 4096, 16, 8, 128, True)),
    Layer("language", "training", "Qwen3 30B-A3B", "paper, config.json, 2025",
          Row(2, 4096, 32, 4, 128, True)),
    Layer("language", "training", "Qwen3 235B-A22B", "paper, config.json, 2025",
          Row(1, 4096, 64, 4, 128, True)),
    Layer("language", "training", "Gemma 7B", "paper, config.json, 2024",
          Row(1, 8192, 16, 16, 256, True)),
    Layer("language", "training", "Gemma 2 9B", "paper, config.json, 2024",
          Row(1, 8192, 16, 8, 256, True, soft_cap=50.0)),
    Layer("language", "training", "Gemma 2 9B", "paper, config.json, 2024",
          Row(1, 8192, 16, 8, 256, True, window=4095, soft_cap=50.0), "local"),
    Layer("language", "training", "Gemma 2 27B", "paper, config.json, 2024",
          Row(1, 8192, 32, 16, 128, True, soft_cap=50.0)),
    Layer("language", "training", "Gemma 3 1B", "paper, config.json, 2025",
          Row(2, 8192, 4, 1, 256, True, window=511), "local"),
    Layer("language", "training", "Gemma 3 4B", "paper, config.json, 2025",
          Row(1, 32768, 8, 4, 256, True, window=1023), "local"),
    Layer("language", "prefill", "Gemma 3 27B", "paper, config.json, 2025",
          Row(1, 16384, 32, 16, 128, True)),
    Layer("language", "training", "Gemma 3 27B", "paper, config.json, 2025",
          Row(1, 32768, 32, 16, 128, True, window=1023), "local"),
    Layer("language", "training", "Phi-2", "config.json, 2023", Row(4, 2048, 32, 32, 80, True)),
    Layer("language", "training", "Phi-3 mini 4k", "paper, config.json, 2024",
          Row(2, 4096, 32, 32, 96, True, window=2046)),
    Layer("language", "training", "Phi-4", "paper, config.json, 2024",
          Row(2, 4096, 40, 10, 128, True)),
    Layer("language", "training", "SmolLM2 135M", "config.json, 2024",
          Row(16, 2048, 9, 3, 64, True)),
    Layer("language", "training", "DeepSeek-V2-Lite", "paper, config.json, 2024",
          Row(4, 4096, 16, 16, 192, True, value_width=128), "latent attention"),
    Layer("language", "training", "DeepSeek-V3", "paper, config.json, 2024",
          Row(1, 4096, 128, 128, 192, True, value_width=128), "latent attention"),
    Layer("language", "training", "Kimi K2", "paper, config.json, 2025",
          Row(1, 4096, 64, 64, 192, True, value_width=128), "latent attention"),
    Layer("language", "prefill", "gpt-oss 20B", "model card, config.json, 2025",
          Row(1, 8192, 64, 8, 64, True, window=127), "local, without its sinks"),
    # Language: encoders.
    Layer("language", "training", "BERT base", "paper, 2018",
          Row(32, 512, 12, 12, 64, False, padding="lengths")),
    Layer("language", "training", "BERT large", "paper, 2018",
          Row(32, 512, 16, 16, 64, False, padding="lengths")),
    Layer("language", "training", "BERT large", "paper, 2018",
          Row(32, 512, 16, 16, 64, False, padding="mask")),
    Layer("language", "training", "ModernBERT base", "paper, config.json, 2024",
          Row(2, 8192, 12, 12, 64, False)),
    Layer("language", "training", "ModernBERT base", "paper, config.json, 2024",
          Row(2, 8192, 12, 12, 64, False, window=64), "local"),
    Layer("language", "training", "T5 base", "paper, 2019",
          Row(16, 512, 12, 12, 64, False, biased=True), "encoder"),
    Layer("language", "training", "T5 v1.1 XXL", "config.json, 2020",
          Row(4, 512, 64, 64, 64, False), "encoder, without its bias"),
    # Vision.
    Layer("vision", "training", "ViT-B/16", "paper, 2020", Row(128, 197, 12, 12, 64, False)),
    Layer("vision", "training", "ViT-L/16", "paper, 2020", Row(64, 197, 16, 16, 64, False)),
    Layer("vision", "training", "ViT-L/16", "paper, 2020",
          Row(32, 577, 16, 16, 64, False), "at 384 pixels"),
    Layer("vision", "training", "ViT-H/14", "paper, 2020", Row(32, 257, 16, 16, 80, False)),
    Layer("vision", "training", "DeiT-S", "paper, 2020", Row(256, 197, 6, 6, 64, False)),
    Layer("vision", "training", "MAE ViT-L", "paper, 2021",
          Row(256, 50, 16, 16, 64, False), "encoder"),
    Layer("vision", "training", "MAE ViT-L", "paper, 2021",
          Row(128, 197, 16, 16, 32, False), "decoder"),
    Layer("vision", "prefill", "DINOv2 ViT-L/14", "paper, 2023",
          Row(8, 1370, 16, 16, 64, False), "at 518 pixels"),
    Layer("vision", "training", "DINOv2 ViT-g/14", "paper, 2023", Row(64, 257, 24, 24, 64, False)),
    Layer("vision", "training", "SigLIP So400m/14", "config.json, 2023",
          Row(32, 729, 16, 16, 72, False), "at 384 pixels"),
    Layer("vision", "prefill", "CLIP ViT-L/14", "paper, config.json, 2021",
          Row(32, 577, 16, 16, 64, False), "at 336 pixels"),
    Layer("language", "training", "CLIP ViT-L/14", "paper, config.json, 2021",
          Row(256, 77, 12, 12, 64, True), "text"),
    Layer("vision", "training", "BLIP-2 Q-Former", "paper, 2023",
          Row(64, 32, 12, 12, 64, False, key_length=257), "queries to an image"),
    Layer("vision", "training", "SAM ViT-H", "paper and code, 2023",
          Row(50, 196, 16, 16, 80, False), "windows, without relative positions"),
    Layer("vision", "training", "SAM ViT-H", "paper and code, 2023",
          Row(2, 4096, 16, 16, 80, False), "global, without relative positions"),
    Layer("vision", "training", "Swin-T", "paper, 2021",
          Row(4096, 49, 3, 3, 32, False, biased=True), "stage 1, not shifted"),
    Layer("vision", "training", "Swin-B", "paper, 2021",
          Row(256, 49, 16, 16, 32, False, biased=True), "stage 3, not shifted"),
    Layer("vision", "training", "DETR", "paper, 2020",
          Row(4, 850, 8, 8, 32, False), "encoder, 800 x 1066 pixels"),
    Layer("vision", "training", "DETR", "paper, 2020",
          Row(4, 100, 8, 8, 32, False, key_length=850), "decoder to an image"),
    Layer("vision", "training", "Perceiver", "paper, 2021",
          Row(2, 512, 8, 8, 64, False, key_length=50176), "to pixels, in 8 heads of 64"),
    # Speech and sound.
    Layer("speech", "training", "Whisper large-v3", "paper, config.json, 2023",
          Row(8, 1500, 20, 20, 64, False), "encoder"),
    Layer("speech", "training", "Whisper large-v3", "paper, config.json, 2023",
          Row(8, 448, 20, 20, 64, True), "decoder"),
    Layer("speech", "training", "Whisper large-v3", "paper, config.json, 2023",
          Row(8, 448, 20, 20, 64, False, key_length=1500), "decoder to sound"),
    Layer("speech", "prefill", "Whisper tiny", "paper, config.json, 2022",
          Row(8, 1500, 6, 6, 64, False), "encoder"),
    Layer("speech", "training", "wav2vec 2.0 base", "paper, 2020",
          Row(8, 781, 12, 12, 64, False, padding="lengths"), "15.6 s"),
    Layer("speech", "training", "wav2vec 2.0 large", "paper, 2020",
          Row(4, 999, 16, 16, 64, False, padding="lengths"), "20 s"),
    Layer("speech", "training", "AST", "paper, 2021", Row(12, 1214, 12, 12, 64, False)),
    Layer("speech", "training", "MusicGen large", "paper, 2023",
          Row(4, 1500, 32, 32, 64, True), "30 s"),
    # Images by diffusion; a batch of 2 is guidance without a classifier.
    Layer("diffusion", "prefill", "Stable Diffusion 1.5", "model card, config.json, 2022",
          Row(2, 4096, 8, 8, 40, False), "64 x 64"),
    Layer("diffusion", "prefill", "Stable Diffusion 1.5", "model card, config.json, 2022",
          Row(2, 1024, 8, 8, 80, False), "32 x 32"),
    Layer("diffusion", "prefill", "Stable Diffusion 1.5", "model card, config.json, 2022",
          Row(2, 256, 8, 8, 160, False), "16 x 16"),
    Layer("diffusion", "prefill", "Stable Diffusion 1.5", "model card, config.json, 2022",
          Row(2, 4096, 8, 8, 40, False, key_length=77), "64 x 64 to text"),
    Layer("diffusion", "prefill", "SDXL", "paper, config.json, 2023",
          Row(2, 4096, 10, 10, 64, False), "64 x 64"),
    Layer("diffusion", "prefill", "SDXL", "paper, config.json, 2023",
          Row(2, 1024, 20, 20, 64, False), "32 x 32"),
    Layer("diffusion", "prefill", "SDXL", "paper, config.json, 2023",
          Row(2, 4096, 10, 10, 64, False, key_length=77), "64 x 64 to text"),
    Layer("diffusion", "training", "SD3 medium", "paper, config.json, 2024",
          Row(4, 4250, 24, 24, 64, False), "1024 pixels, 154 of text"),
    Layer("diffusion", "prefill", "FLUX.1 dev", "config.json, 2024",
          Row(1, 4608, 24, 24, 128, False), "1024 pixels, 512 of text"),
    Layer("diffusion", "training", "DiT-XL/2", "paper, 2022",
          Row(32, 256, 16, 16, 72, False), "256 pixels"),
    Layer("diffusion", "training", "DiT-XL/2", "paper, 2022",
          Row(8, 1024, 16, 16, 72, False), "512 pixels"),
    Layer("diffusion", "prefill", "PixArt-alpha", "paper, config.json, 2023",
          Row(2, 4096, 16, 16, 72, False), "1024 pixels"),
    Layer("diffusion", "prefill", "PixArt-alpha", "paper, config.json, 2023",
          Row(2, 4096, 16, 16, 72, False, key_length=120, padding="mask"), "1024 pixels to text"),
    Layer("diffusion", "prefill", "Hunyuan-DiT", "paper, config.json, 2024",
          Row(2, 4096, 16, 16, 88, False), "1024 pixels"),
    # Video.
    Layer("video", "prefill", "HunyuanVideo", "paper and model card, 2024",
          Row(1, 119056, 3, 3, 128, False), "720p, 129 frames, on 8 devices by heads"),
    Layer("video", "prefill", "Wan 2.1 14B", "paper, config.json, 2025",
          Row(1, 32760, 40, 40, 128, False), "480p, 81 frames"),
    Layer("video", "prefill", "Wan 2.1 14B", "paper, config.json, 2025",
          Row(1, 32760, 40, 40, 128, False, key_length=512), "480p, 81 frames, to text"),
    Layer("video", "training", "Wan 2.1 1.3B", "paper, config.json, 2025",
          Row(1, 32760, 12, 12, 128, False), "480p, 81 frames"),
    Layer("video", "prefill", "CogVideoX 2B", "paper, config.json, 2024",
          Row(1, 17776, 30, 30, 64, False), "49 frames, 226 of text"),
    Layer("video", "prefill", "CogVideoX 5B", "paper, config.json, 2024",
          Row(1, 17776, 48, 48, 64, False), "49 frames, 226 of text"),
    Layer("video", "training", "Latte XL/2", "paper, 2024",
          Row(512, 16, 16, 16, 72, False), "over frames"),
    Layer("video", "training", "VideoMAE ViT-B", "paper, 2022",
          Row(8, 1568, 12, 12, 64, False), "fine-tuning"),
    # Biology.
    Layer("biology", "training", "AlphaFold 2", "paper, 2021",
          Row(256, 256, 4, 4, 32, False, padding="mask", biased=True), "triangle attention"),
    Layer("biology", "training", "AlphaFold 2", "paper, 2021",
          Row(128, 256, 8, 8, 32, False, padding="mask", biased=True), "MSA rows"),
    Layer("biology", "training", "AlphaFold 3", "paper, 2024",
          Row(384, 384, 4, 4, 32, False, padding="mask", biased=True), "triangle attention"),
    Layer("biology", "training", "AlphaFold 3", "paper, 2024",
          Row(1, 768, 16, 16, 24, False, biased=True), "pairformer"),
    Layer("biology", "training", "AlphaFold 3", "paper, 2024",
          Row(48, 384, 16, 16, 48, False, biased=True), "diffusion, 48 samples"),
    Layer("biology", "training", "ESM-2 650M", "paper, config.json, 2022",
          Row(4, 1024, 20, 20, 64, False, padding="lengths")),
    Layer("biology", "training", "ESM-2 15B", "paper, config.json, 2022",
          Row(4, 1024, 40, 40, 128, False, padding="lengths")),
    Layer("biology", "prefill", "ProtT5 XL", "paper, config.json, 2020",
          Row(4, 512, 32, 32, 128, False, padding="lengths"), "encoder, without its bias"),
    Layer("biology", "training", "Enformer", "paper, 2021",
          Row(2, 1536, 8, 8, 64, False, value_width=192), "without relative positions"),
    Layer("biology", "training", "Geneformer", "paper, config.json, 2023",
          Row(12, 2048, 4, 4, 64, False, padding="lengths")),
    Layer("biology", "training", "scGPT", "paper, 2024", Row(32, 1200, 8, 8, 64, False)),
    # Recommendation.
    Layer("recommendation", "training", "BERT4Rec", "paper, 2019",
          Row(256, 200, 2, 2, 32, False, padding="lengths")),
    Layer("recommendation", "training", "TIGER", "paper, 2023",
          Row(256, 80, 6, 6, 64, False, padding="lengths"), "encoder, without its bias"),
    Layer("recommendation", "training", "HSTU", "paper, 2024",
          Row(2, 8192, 8, 8, 64, True), "with a softmax"),
    # Of no model: drawn at random, and kept, as each asks for something of its own.
    _drawn(Row(1, 656, 16, 2, 64, False), "8 heads a key head, one sequence"),
    _drawn(Row(2, 8889, 4, 1, 64, False, key_length=1184), "many queries, one key head"),
    _drawn(Row(2, 2688, 4, 1, 64, False, key_length=856), "some queries, one key head"),
    _drawn(Row(1, 1086, 4, 1, 80, False), "one key head, one sequence"),
    _drawn(Row(1, 512, 64, 8, 64, True), "64 heads, one sequence"),
    _drawn(Row(4, 2136, 16, 2, 128, False), "two key heads"),
    _drawn(Row(16, 6784, 4, 1, 64, False, key_length=1037), "many queries, one key head, batch 16"),
    _drawn(Row(8, 83, 64, 8, 128, False), "short and odd, 64 heads"),
    _drawn(Row(1, 297, 16, 16, 96, False), "one short and odd sequence"),
    _drawn(Row(16, 640, 32, 16, 128, False, key_length=9097), "many and odd keys"),
    _drawn(Row(4, 184, 16, 8, 64, False, key_length=8226), "few queries"),
    _drawn(Row(2, 15838, 1, 1, 128, True), "one head, long"),
    _drawn(Row(8, 256, 8, 1, 40, True), "one key head of 40, short"),
    _drawn(Row(8, 128, 8, 8, 128, False), "short, 128 columns"),
    _drawn(Row(1, 128, 12, 12, 64, True), "one short sequence"),
    _drawn(Row(32, 4864, 16, 16, 40, False, key_length=165), "few and odd keys of 40"),
    _drawn(Row(2, 4648, 8, 4, 192, True), "192 columns"),
    _drawn(Row(3, 120, 1, 1, 256, False, key_length=994), "three tiles of queries"),
    _drawn(Row(1, 4828, 35, 7, 256, False), "sections of seven key heads"),
    _drawn(Row(2, 6656, 6, 2, 192, True), "two key heads of 192"),
    _drawn(Row(2, 152, 37, 37, 64, True), "37 short heads"),
    _drawn(Row(3, 264, 32, 4, 24, False, key_length=200), "key heads of 24, short"),
    _drawn(Row(3, 3922, 42, 6, 192, True), "seven query heads a key head of 192"),
    _drawn(Row(2, 128, 2, 2, 256, True), "two short heads of 256"),
    _drawn(Row(4, 12288, 2, 2, 192, False), "two long heads of 192"),
    _drawn(Row(41, 256, 52, 13, 64, False), "13 short key heads"),
    _drawn(Row(1, 8656, 10, 2, 192, False), "two long key heads of 192"),
]
# fmt: on
