"""Tiny random SigLIPs, and what transformers computes from them in fp64: one that classifies images, and the image tower
with its pooling head.

    pip install torch transformers safetensors
    python tests/golden/hf/make_siglip.py
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import SiglipConfig, SiglipForImageClassification, SiglipVisionConfig, SiglipVisionModel

SIZES = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=8,
    initializer_range=0.02,
)


def make(name, kind, config, seed, forward):
    out = Path(__file__).parent / name
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if "norm" in parameter and parameter.endswith("weight") else 0.3 * noise)
    model.save_pretrained(out)
    # Scaled dot product attention does not round its softmax to fp32.
    model = kind.from_pretrained(out, dtype=torch.float64, attn_implementation="sdpa").eval()
    pixels = torch.randn(3, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    save = {"pixel_values": pixels.detach()} | forward(model, pixels)
    # Gradients under the names of files.
    stored = load_file(out / "model.safetensors")
    for parameter, weight in model.named_parameters():
        if weight.grad is not None:
            file_name = parameter if parameter in stored else "vision_model." + parameter
            save["grad." + file_name] = weight.grad
    save_file({n: t.detach().contiguous() for n, t in save.items()}, out / "oracle.safetensors")
    print(name, len(stored), len(save), sorted(stored)[:3])


def classify(model, pixels):
    labels = torch.tensor([4, 0, 6])
    result = model(pixel_values=pixels, labels=labels)
    result.loss.backward()
    return {"labels": labels, "loss": result.loss.reshape(1), "logits": result.logits}


def pool(model, pixels):
    result = model(pixel_values=pixels)
    weights = torch.randn_like(result.pooler_output)
    (result.pooler_output * weights).sum().backward()
    return {
        "last_hidden_state": result.last_hidden_state, "pooler_output": result.pooler_output, "weights": weights,
        "pixel_grad": pixels.grad,
    }


vision = SiglipVisionConfig(**SIZES)
text = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=16)
both = SiglipConfig(vision_config=vision, text_config=text, num_labels=7)
make("siglip", SiglipForImageClassification, both, 31, classify)
make("siglip_vision", SiglipVisionModel, vision, 37, pool)
