"""Makes `gemma`, `olmo3`, `olmoe`, `seed_oss`, `ernie4_5`, `granite`, `deepseek`, `deepseek_v2` and `deepseek_v2_lite`, or those
named: python make_relatives.py [NAME ...] (transformers 5.24, torch 2.15, CPU).

The loss is the cross entropy of the logits in fp64; transformers rounds them to fp32 first.

DeepSeek's first model with experts is in no version of transformers: `deepseek` is its `LlamaForCausalLM` with the router and
the experts of its OLMoE, whose weights are no more brought to a sum of one, and its Llama's MLP as the shared expert.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers as hf
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from without_casts import without_casts

HERE = pathlib.Path(__file__).parent
PATHS = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
SIZES = dict(
    vocab_size=160, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    initializer_range=0.2, max_position_embeddings=128, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
ALL_HEADS = SIZES | {"num_key_value_heads": 4}
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=1)
LATENTS = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
MODELS = {
    "gemma": hf.GemmaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=16),
    "olmo3": hf.Olmo3Config(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=5,
        rope_parameters={
            "full_attention": YARN | {"rope_theta": 5e5, "attention_factor": 1.2079441541679836},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "olmoe": hf.OlmoeConfig(**SIZES | {"intermediate_size": 16}, num_experts=8, num_experts_per_tok=3),
    "seed_oss": hf.SeedOssConfig(**SIZES, head_dim=16),
    "ernie4_5": hf.Ernie4_5Config(**SIZES, head_dim=16),
    "granite": hf.GraniteConfig(
        **SIZES, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0625,
        tie_word_embeddings=True,
    ),
    "deepseek": hf.LlamaConfig(**ALL_HEADS),
    "deepseek_v2": hf.DeepseekV2Config(
        **ALL_HEADS, **EXPERTS, **LATENTS, q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=YARN | {"rope_theta": 1e4, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2_lite": hf.DeepseekV2Config(**ALL_HEADS, **EXPERTS, **LATENTS, q_lora_rank=None, n_group=1, topk_group=1),
}
# Of these transformers rounds more to fp32 than norms and probabilities.
UNROUNDED = ["ernie4_5", "granite", "deepseek_v2", "deepseek_v2_lite"]
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
# What DeepSeek calls the sizes of `deepseek`, with the keys of its published file.
DEEPSEEK = dict(
    architectures=["DeepseekForCausalLM"], model_type="deepseek", hidden_act="silu", attention_bias=False, attention_dropout=0.0,
    moe_layer_freq=1, norm_topk_prob=False, scoring_func="softmax", rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-6,
    tie_word_embeddings=False, dtype="float32",
)


class Experts(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        of = hf.OlmoeConfig(
            hidden_size=config.hidden_size, intermediate_size=EXPERTS["moe_intermediate_size"],
            num_experts=EXPERTS["n_routed_experts"], num_experts_per_tok=EXPERTS["num_experts_per_tok"],
        )
        of._experts_implementation = "eager"
        self.routed = OlmoeSparseMoeBlock(of)
        shared = hf.LlamaConfig(**config.to_dict() | {"intermediate_size": 2 * of.intermediate_size})
        self.shared_experts = LlamaMLP(shared)

    def forward(self, x):
        return self.routed(x) + self.shared_experts(x)


def built(name, config):
    if name != "deepseek":
        return hf.AutoModelForCausalLM.from_config(config, **PATHS)
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    for layer in model.model.layers[EXPERTS["first_k_dense_replace"]:]:
        layer.mlp = Experts(config)
        for parameter in layer.mlp.parameters():
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    return model


def in_files(tensors):
    """Under the names of files, where each expert has its own matrices."""
    for name, tensor in tensors:
        name = name.replace(".routed.", ".")
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, tensor
            continue
        for expert, of_expert in enumerate(tensor):
            for matrix, rows in zip(PARTS[part], of_expert.chunk(len(PARTS[part]))):
                yield f"{module}.{expert}.{matrix}.weight", rows


def outputs(model):
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    logits = model(input_ids=ids, use_cache=False).logits
    return ids, logits, torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run(model):
    ids, logits, loss = outputs(model)
    loss.backward()
    tensors = {"input_ids": ids, "labels": ids.clone(), "loss": loss.detach(), "logits_last8": logits[:, -8:].detach().contiguous()}
    last = model.config.num_hidden_layers - 1
    for name, gradient in in_files((name, parameter.grad) for name, parameter in model.named_parameters()):
        if not name.startswith("model.layers.") or name.startswith(("model.layers.0.", f"model.layers.{last}.")):
            tensors[f"grad.{name}"] = gradient.float().contiguous()
    return tensors


def unrounded(model):
    """Logits and loss without any cast to fp32 but that of the angles."""
    rounded = sys.modules[type(model).__module__]
    torch.set_default_dtype(torch.float64)
    changed = getattr(without_casts(rounded), type(model).__name__)._from_config(model.config, **PATHS, dtype=torch.float64)
    torch.set_default_dtype(torch.float32)
    changed.load_state_dict(model.state_dict())
    _, logits, loss = outputs(changed.eval())
    return {"logits_last8": logits[:, -8:].detach().contiguous(), "loss": loss.detach()}


for name in sys.argv[1:] or MODELS:
    config, folder = MODELS[name], HERE / name
    torch.manual_seed(11)
    model = built(name, config).eval()
    noise = torch.Generator().manual_seed(12)
    for key, tensor in model.state_dict().items():
        if key.endswith(("bias", "norm.weight", "layernorm.weight")):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
    shutil.rmtree(folder, ignore_errors=True)
    if name == "deepseek":
        folder.mkdir()
        sizes = {key: value for key, value in SIZES.items() if key != "pad_token_id"} | ALL_HEADS | EXPERTS | DEEPSEEK
        (folder / "config.json").write_text(json.dumps(dict(sorted(sizes.items())), indent=2) + "\n")
        hf.GenerationConfig.from_model_config(config).save_pretrained(folder)
        tensors = {key: tensor.contiguous() for key, tensor in in_files(model.state_dict().items())}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        model.save_pretrained(folder)
    model = model.double()
    tensors = run(model)
    save_file(tensors, folder / "oracle.safetensors")
    if name in UNROUNDED:
        exact = unrounded(model)
        save_file(exact, folder / "unrounded.safetensors")
        print(name, "rounding:", float((exact["logits_last8"] - tensors["logits_last8"]).abs().max() / exact["logits_last8"].abs().max()))
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)
    print(name, tensors["loss"].item(), sorted(tensors)[:2], {file.name: file.stat().st_size for file in folder.iterdir()})
