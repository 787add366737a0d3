"""Makes `gemma3_images`: python make_gemma3_images.py (transformers 5.24, torch 2.15, CPU)."""

import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

FOLDER = pathlib.Path(__file__).parent / "gemma3_images"
IMAGE = 157
# What published files say of the language model: sizes, window and scaling; the rest are transformers' defaults.
TEXT = dict(
    vocab_size=160, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, sliding_window=8, rope_scaling={"factor": 8.0, "rope_type": "linear"},
)

torch.manual_seed(21)
vision = SiglipVisionConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8,
    vision_use_head=False,
)
config = Gemma3Config(
    text_config=Gemma3TextConfig(**TEXT), vision_config=vision, mm_tokens_per_image=1, image_token_index=IMAGE,
    boi_token_index=IMAGE + 1, eoi_token_index=IMAGE + 2,
)
model = Gemma3ForConditionalGeneration(config)
with torch.no_grad():
    for weight in model.parameters():
        weight.copy_(0.2 * torch.randn_like(weight))
shutil.rmtree(FOLDER, ignore_errors=True)
model.save_pretrained(FOLDER)
# As published: the older form of rotary parameters, and no key with its default.
file = json.loads((FOLDER / "config.json").read_text())
file["text_config"] = dict(sorted({**TEXT, "model_type": "gemma3_text"}.items()))
(FOLDER / "config.json").write_text(json.dumps(file, indent=2, sort_keys=True) + "\n")

model = Gemma3ForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float64, attn_implementation="sdpa").eval()
ids = torch.randint(0, IMAGE, (2, 24), generator=torch.Generator().manual_seed(5))
output = model(input_ids=ids, labels=ids, use_cache=False)
output.loss.backward()
tensors = {"input_ids": ids, "labels": ids.clone(), "loss": output.loss.detach(),
           "logits_last8": output.logits[:, -8:].detach().contiguous()}
for name, parameter in model.named_parameters():
    # Under the names of the language model alone: embeddings, first and last layer, final norm.
    name = name.replace("model.language_model.", "model.")
    if name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.5.", "model.norm")):
        tensors[f"grad.{name}"] = parameter.grad.float().contiguous()
save_file(tensors, FOLDER / "oracle.safetensors")
for path in FOLDER.iterdir():
    path.chmod(0o644)
print("\n".join(load_file(FOLDER / "model.safetensors")), len(tensors), "tensors, loss", output.loss.item())
