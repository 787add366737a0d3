"""A tiny random LLaVA with SigLIP's tower, and what transformers computes from it in fp64.

    pip install torch transformers safetensors
    python tests/golden/hf/make_llava_siglip.py
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

OUT = Path(__file__).parent / "llava_siglip"
IMAGE = 95

torch.manual_seed(23)
vision = SiglipVisionConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
    vision_use_head=False,
)
text = LlamaConfig(
    vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.08,
)
config = LlavaConfig(
    vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1,
    vision_feature_select_strategy="full", image_seq_length=4, tie_word_embeddings=False, attn_implementation="eager",
)
model = LlavaForConditionalGeneration(config).eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        weight.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.1 * noise)
model.save_pretrained(OUT)
(OUT / "generation_config.json").unlink(missing_ok=True)
model = LlavaForConditionalGeneration.from_pretrained(OUT, dtype=torch.float64, attn_implementation="eager").eval()

ids = torch.randint(3, IMAGE, (2, 20))
ids[:, 2:6] = IMAGE
labels = ids.masked_fill(ids == IMAGE, -100)
pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
result = model(input_ids=ids, labels=labels, pixel_values=pixels)
result.loss.backward()
save = {"input_ids": ids, "labels": labels, "pixel_values": pixels, "loss": result.loss.detach().reshape(1)}
save["logits_last8"] = result.logits.detach()[:, -8:]
# Gradients under the names of files.
stored = load_file(OUT / "model.safetensors")


def in_file(name):
    name = name.removeprefix("model.").replace("language_model.", "language_model.model.")
    return "language_model." + name if name.startswith("lm_head") else name


memory = {in_file(name): weight for name, weight in model.named_parameters()}
assert memory.keys() == stored.keys()
save |= {"grad." + name: weight.grad.float() for name, weight in memory.items() if weight.grad is not None}
save_file({n: t.contiguous() for n, t in save.items()}, OUT / "oracle.safetensors")
print(len(stored), float(result.loss))
