"""A tiny random ViT without a head, and what transformers computes from it in fp64.

    pip install torch transformers safetensors
    python tests/golden/hf/make_vit_model.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import ViTConfig, ViTModel

OUT = Path(__file__).parent / "vit_model"
torch.manual_seed(17)
config = ViTConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_output_size=12,
)
model = ViTModel(config).eval()
with torch.no_grad():
    for parameter, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        weight.copy_(1 + 0.1 * noise if "norm" in parameter and parameter.endswith("weight") else 0.3 * noise)
model.save_pretrained(OUT)
model = ViTModel.from_pretrained(OUT, dtype=torch.float64, attn_implementation="sdpa").eval()
pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64)
with torch.no_grad():
    found = model(pixel_values=pixels)
save = {"pixel_values": pixels, "last_hidden_state": found.last_hidden_state, "pooler_output": found.pooler_output}
save_file({name: tensor.contiguous() for name, tensor in save.items()}, OUT / "oracle.safetensors")
