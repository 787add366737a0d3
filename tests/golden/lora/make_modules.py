"""Adapters of BERT, T5, ViT and LLaVA as peft writes them, and what transformers and peft compute with them in fp64.

    pip install torch transformers peft safetensors
    python tests/golden/lora/make_modules.py
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, BertForMaskedLM, LlavaForConditionalGeneration, T5ForConditionalGeneration

HERE = Path(__file__).parent
MODELS = {
    "bert": (BertForMaskedLM, dict(target_modules="all-linear"), None),
    "t5": (T5ForConditionalGeneration, dict(target_modules=["q", "v", "wo"], use_rslora=True), "SEQ_2_SEQ_LM"),
    "vit": (AutoModelForImageClassification, dict(target_modules="all-linear", use_dora=True), None),
    "llava": (LlavaForConditionalGeneration, dict(target_modules=["q_proj", "v_proj", "linear_2"]), "CAUSAL_LM"),
}


def make(name):
    family, settings, task = MODELS[name]
    base = HERE.parent / "hf" / name
    torch.manual_seed(7)
    model = family.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    config = LoraConfig(r=3, lora_alpha=5, task_type=task, **settings)
    model = get_peft_model(model, config, autocast_adapter_dtype=False).double().eval()
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
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}, indent=2) + "\n")

    oracle = load_file(base / "oracle.safetensors")
    inputs = {n: oracle[n] for n in ("input_ids", "labels", "pixel_values") if n in oracle}
    result = model(**{n: t.double() if t.is_floating_point() else t for n, t in inputs.items()})
    result.loss.backward()
    save = {**inputs, "loss": result.loss.detach().reshape(1), "logits": result.logits.detach()[..., -8:, :]}
    for n, p in trained.items():
        save["grad." + n.removeprefix("base_model.model.").replace(".default", "")] = p.grad.float()
    save_file({n: t.contiguous() for n, t in save.items()}, out / "oracle.safetensors")
    # Every fifth of the weights that are merged, under the names of files.
    with tempfile.TemporaryDirectory() as folder:
        model.merge_and_unload().save_pretrained(folder)
        merged = load_file(Path(folder) / "model.safetensors")
    before = load_file(base / "model.safetensors")
    changed = sorted(n for n in before if not torch.equal(before[n].double(), merged[n]))
    assert len(changed) == sum(n.endswith(("lora_A.weight",)) for n in saved), (name, len(changed))
    save_file({n: merged[n].float() for n in changed[::5]}, out / "merged.safetensors")
    print(name, float(result.loss), len(trained), sorted(saved)[0], changed[0])


for name in MODELS:
    make(name)
