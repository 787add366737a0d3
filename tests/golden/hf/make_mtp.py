"""Makes `qwen3_next/mtp.safetensors` and `glm4_moe/mtp.safetensors`: python make_mtp.py (transformers 5.24, torch 2.15, CPU).

A module of multi-token prediction of each, with random weights under the names of published files, and the losses of the tokens
after the next one at all positions but the last two. transformers leaves these modules out: its decoder layer, without casts
to fp32, is theirs, and the rest is vLLM's formula (`qwen3_next_mtp.py`, `glm4_moe_mtp.py`).
"""

import importlib.util
import pathlib
import re
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.qwen3_next import modeling_qwen3_next

HERE = pathlib.Path(__file__).parent
PATHS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
# The module, beginnings of its classes, names of its parts, of its block and of the layer that it is like.
MODELS = {
    "qwen3_next": (
        modeling_qwen3_next, "Qwen3Next", ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"], "mtp.layers.0", 3,
    ),
    "glm4_moe": (
        modeling_glm4_moe, "Glm4Moe",
        [f"model.layers.3.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")], "model.layers.3", 2,
    ),
}


def without_casts(module):
    """The module from its changed source: `make_unrounded.py` says how."""
    source = pathlib.Path(module.__file__).read_text()
    before, angles, after = re.split(r"(?ms)(^class \w+RotaryEmbedding.*?)(?=^(?:class|def) )", source)
    before, after = (re.sub(r"\btorch\.float(32)?\b", "torch.float64", part).replace(".float()", ".double()") for part in (before, after))
    spec = importlib.util.spec_from_loader(module.__name__ + "_fp64", loader=None)
    changed = importlib.util.module_from_spec(spec)
    changed.__package__, changed.__file__ = module.__package__, module.__file__
    sys.modules[spec.name] = changed
    exec(compile(before + angles + after, spec.name, "exec"), changed.__dict__)
    return changed


def of_files(layer, name):
    """The parameters of a layer under the names of files, where each expert has its own matrices."""
    for part, tensor in layer.state_dict().items():
        module, _, last = part.rpartition(".")
        if not module.endswith("experts"):
            yield f"{name}.{part}", tensor
            continue
        for expert, of_expert in enumerate(tensor):
            for matrix, rows in zip(PARTS[last], of_expert.chunk(len(PARTS[last]))):
                yield f"{name}.{module}.{expert}.{matrix}.weight", rows


def make(folder, module, begins, parts, block, like):
    ids = load_file(HERE / folder / "oracle.safetensors")["input_ids"]
    stored = AutoModelForCausalLM.from_pretrained(HERE / folder, dtype=torch.float64, **PATHS)
    changed = without_casts(module)
    model = getattr(changed, f"{begins}ForCausalLM")._from_config(stored.config, **PATHS, dtype=torch.float64)
    model.load_state_dict(stored.state_dict())
    config, hidden, random = model.config, model.config.hidden_size, torch.Generator().manual_seed(5)
    layer = getattr(changed, f"{begins}DecoderLayer")(config, like)
    enorm, hnorm, last = (getattr(changed, f"{begins}RMSNorm")(hidden, config.rms_norm_eps) for _ in range(3))
    projection = torch.nn.Linear(2 * hidden, hidden, bias=False)
    for of in (layer, enorm, hnorm, projection, last):
        of.double().load_state_dict({
            # fp32 numbers; norms around what a new model has.
            name: ((tensor if tensor.dim() == 1 else 0) + 0.2 * torch.randn(tensor.shape, generator=random, dtype=torch.float64)).float().double()
            for name, tensor in of.state_dict().items()
        })
    with torch.no_grad():
        x = model.model(input_ids=ids, use_cache=False).last_hidden_state
        embedded = model.model.embed_tokens(torch.nn.functional.pad(ids[:, 1:], (0, 1)))
        x = projection(torch.cat([enorm(embedded), hnorm(x)], -1))
        positions = torch.arange(ids.shape[1])[None]
        x = layer(x, position_embeddings=model.model.rotary_emb(x, positions), position_ids=positions, attention_mask=None)
        x = last(x[0] if isinstance(x, tuple) else x)
        losses = torch.nn.functional.cross_entropy(model.lm_head(x)[:, :-2].flatten(0, 1), ids[:, 2:].flatten(), reduction="none")
    tensors = {name: tensor.float().contiguous() for name, tensor in of_files(layer, block)}
    for name, of in zip(parts, (enorm, hnorm, projection, last)):
        tensors[f"{name}.weight"] = of.weight.detach().float().contiguous()
    save_file({**tensors, "mtp_losses": losses.view(len(ids), -1)}, HERE / folder / "mtp.safetensors")


torch.set_default_dtype(torch.float64)
for folder, told in MODELS.items():
    make(folder, *told)
