"""Adapters of projections that files fuse or reorder (Phi-3, GLM-4), of experts that are one tensor (gpt-oss, `target_parameters`), and
adapters whose modules have other ranks and scales, as peft writes them, and what transformers and peft compute with them in fp64.

    pip install torch transformers peft safetensors
    python tests/golden/lora/make_fused.py [NAME]     # writes the folders
    python tests/golden/lora/make_fused.py check DIR BASE INPUT OUTPUT   # peft opens DIR and computes the logits of OUTPUT
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PATTERNS = dict(
    rank_pattern={"q_proj": 5, r"layers\.[01]\..*\.down_proj": 2, "model.layers.0.self_attn.qkv_proj": 4},
    alpha_pattern={"v_proj": 8, ".*up_proj": 1, "o_proj": 2},
)
ADAPTERS = {
    "phi3": ("phi3", dict(target_modules="all-linear")),
    "phi3_dora": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj"], use_dora=True)),
    "glm4": ("glm4", dict(target_modules="all-linear", use_rslora=True)),
    "patterns": ("llama3", dict(target_modules="all-linear", **PATTERNS)),
    "gpt_oss": ("gpt_oss", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "gpt_oss_down": ("gpt_oss", dict(target_modules=[], target_parameters=["3.mlp.experts.down_proj"], use_rslora=True)),
    "mixtral_experts": ("mixtral", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                                        rank_pattern={".*gate_up_proj": 5}, alpha_pattern={".*gate_up_proj": 3})),
    "qwen3_moe_experts": ("qwen3_moe", dict(target_modules=[], target_parameters=["1.mlp.experts.down_proj"], use_rslora=True)),
    "patterns_dora": ("phi3", dict(target_modules="all-linear", use_dora=True, **PATTERNS)),
}
PARTS = ("self_attn.q", "mlp.gate_up", "mlp.up", "mlp.experts.gate_up", "mlp.experts.down", "block_sparse_moe.experts.1.")


def base_of(folder):
    # gpt-oss has sinks, which sdpa does not compute; there is no grouped GEMM in fp64.
    how = dict(attn_implementation="eager", experts_implementation="eager") if any(name in str(folder) for name in ("gpt_oss", "mixtral", "qwen3_moe")) else dict(attn_implementation="sdpa")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)


def make(name):
    family, settings = ADAPTERS[name]
    base = HERE.parent / "hf" / family
    torch.manual_seed(7)
    config = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(base_of(base), config, autocast_adapter_dtype=False).double().eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for n, p in trained.items():
            p.mul_(1 + 0.1 * torch.randn_like(p)) if "magnitude" in n else p.copy_(0.2 * torch.randn_like(p))
            p.copy_(p.float())
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out / "adapter")
    saved = load_file(out / "adapter" / "adapter_model.safetensors")
    save_file({n: t.float().contiguous() for n, t in saved.items()}, out / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    config = out / "adapter" / "adapter_config.json"
    text = {**json.loads(config.read_text()), "base_model_name_or_path": None}
    config.write_text(json.dumps({**text, "target_modules": sorted(text["target_modules"])}, indent=2) + "\n")

    oracle = load_file(base / "oracle.safetensors")
    inputs = {n: oracle[n][:, :24] for n in ("input_ids", "labels")}
    result = model(**inputs)
    result.loss.backward()
    save = {**inputs, "loss": result.loss.detach().reshape(1), "logits_last4": result.logits.detach()[:, -4:]}
    for n, p in ((n, p) for n, p in trained.items() if ".layers.0." in n or ".layers.3." in n):
        save["grad." + n.removeprefix("base_model.model.").replace(".default", "")] = p.grad.float()
    save_file({n: t.contiguous() for n, t in save.items()}, out / "oracle.safetensors")
    # Of the first layer the weights that are merged and fused or reordered, under the names of files.
    with tempfile.TemporaryDirectory() as folder:
        model.merge_and_unload().save_pretrained(folder)
        merged = load_file(Path(folder) / "model.safetensors")
    before = load_file(base / "model.safetensors")
    changed = sorted(n for n in before if not torch.equal(before[n].double(), merged[n]))
    assert "_experts" in name or len(changed) == sum(n.endswith("lora_A.weight") for n in saved), (name, len(changed))
    save_file({n: merged[n].float() for n in changed if any(f".layers.0.{part}" in n for part in PARTS)}, out / "merged.safetensors")
    print(name, result.loss.item(), len(trained), text["target_modules"], changed[:4])


def check(adapter, base, given, found):
    model = PeftModel.from_pretrained(base_of(base), adapter, autocast_adapter_dtype=False).double().eval()
    with torch.no_grad():
        logits = model(input_ids=load_file(given)["input_ids"]).logits
    found = load_file(found)["logits"].double().reshape(logits.shape)
    print("largest difference of logits", float((logits - found).abs().max()), "of", float(logits.abs().max()))


if sys.argv[1:2] == ["check"]:
    check(*sys.argv[2:])
else:
    for name in sys.argv[1:] or ADAPTERS:
        make(name)
