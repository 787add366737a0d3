"""Tiny random LLaVAs with SigLIP's tower, and what transformers computes from them in fp64: one with a Llama, one with a
Qwen2 whose logits are its embedding's.

    pip install torch transformers safetensors
    python tests/golden/hf/make_llava_siglip.py
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config, SiglipVisionConfig

IMAGE = 95

SIZES = dict(
    vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.08,
)


def in_file(name):
    name = name.removeprefix("model.").replace("language_model.", "language_model.model.")
    return "language_model." + name if name.startswith("lm_head") else name


def make(name, text, seed):
    out = Path(__file__).parent / name
    torch.manual_seed(seed)
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
        vision_use_head=False,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1,
        vision_feature_select_strategy="full", image_seq_length=4, tie_word_embeddings=text.tie_word_embeddings, attn_implementation="eager",
    )
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.1 * noise)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    model = LlavaForConditionalGeneration.from_pretrained(out, dtype=torch.float64, attn_implementation="eager").eval()

    ids = torch.randint(3, IMAGE, (2, 20))
    ids[:, 2:6] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    result = model(input_ids=ids, labels=labels, pixel_values=pixels)
    result.loss.backward()
    save = {"input_ids": ids, "labels": labels, "pixel_values": pixels, "loss": result.loss.detach().reshape(1)}
    save["logits_last8"] = result.logits.detach()[:, -8:]
    stored = load_file(out / "model.safetensors")
    # Gradients under the names of files.
    memory = {in_file(name): weight for name, weight in model.named_parameters()}
    assert memory.keys() == stored.keys()
    save |= {"grad." + name: weight.grad.float() for name, weight in memory.items() if weight.grad is not None}
    save_file({n: t.contiguous() for n, t in save.items()}, out / "oracle.safetensors")
    print(len(stored), float(result.loss))


make("llava_siglip", LlamaConfig(**SIZES), 23)
make("llava_qwen2", Qwen2Config(tie_word_embeddings=True, **SIZES), 29)
