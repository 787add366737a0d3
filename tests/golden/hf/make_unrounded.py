"""Makes `qwen3_next/unrounded.safetensors`: python make_unrounded.py (transformers 5.24, torch 2.15, CPU).

transformers' own module as `without_casts.py` changes it.
"""

import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as rounded

from without_casts import without_casts

FOLDER = pathlib.Path(__file__).parent / "qwen3_next"
PATHS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}


def gradients(model):
    """Under the names of files, where each expert has its own matrices."""
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts"):
            yield f"grad.{name}", parameter.grad
            continue
        for expert, of_expert in enumerate(parameter.grad):
            for matrix, rows in zip(PARTS[part], of_expert.chunk(len(PARTS[part]))):
                yield f"grad.{module}.{expert}.{matrix}.weight", rows


oracle = load_file(FOLDER / "oracle.safetensors")
stored = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64, **PATHS)
torch.set_default_dtype(torch.float64)
changed = without_casts(rounded)
model = changed.Qwen3NextForCausalLM._from_config(stored.config, **PATHS, dtype=torch.float64)
model.load_state_dict(stored.state_dict())
logits = model(input_ids=oracle["input_ids"], use_cache=False).logits
of_next = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), oracle["labels"][:, 1:].flatten())
of_next.backward()
tensors = {"logits_last8": logits[:, -8:].detach().contiguous(), "loss": of_next.detach().reshape(1)}
for name, gradient in gradients(model):
    if name in oracle:
        tensors[name] = gradient.float().contiguous()
assert set(oracle) - set(tensors) == {"input_ids", "labels"}
far = {name: float((tensors[name].double() - oracle[name].double()).abs().max() / oracle[name].double().abs().max()) for name in tensors}
print({dtype for dtype in [p.dtype for p in model.parameters()] + [b.dtype for b in model.buffers()]})
print(*sorted(((of, name) for name, of in far.items()), reverse=True)[:8], far["logits_last8"], far["loss"], sep="\n")
save_file(tensors, FOLDER / "unrounded.safetensors")
(FOLDER / "unrounded.safetensors").chmod(0o644)
