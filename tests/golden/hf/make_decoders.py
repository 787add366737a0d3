"""Makes `glm4_moe`, `qwen2_moe`, `mixtral_window` and `qwen3_window`, or those named: python make_decoders.py [NAME ...].

The first two are of transformers 5.24 and torch 2.6 on a CPU, the others of torch 2.15.
"""

import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen2MoeConfig, Qwen3Config
from transformers.models.glm4_moe import modeling_glm4_moe

HERE = pathlib.Path(__file__).parent
SIZES = dict(
    vocab_size=160, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, initializer_range=0.2,
)
COMMON = dict(**SIZES, moe_intermediate_size=16, num_experts_per_tok=3, max_position_embeddings=128)
MODELS = {
    "glm4_moe": Glm4MoeConfig(
        **COMMON, head_dim=16, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
        attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON, num_experts=8, shared_expert_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=False,
    ),
    "mixtral_window": MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, max_position_embeddings=128,
    ),
    # Layers in an order that no number gives, and sequences beyond the context of dynamic NTK scaling.
    "qwen3_window": Qwen3Config(
        **SIZES | {"num_hidden_layers": 4}, head_dim=8, use_sliding_window=True, sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
}


def gradients(model):
    """Of embeddings, first and last layer and final norm, under their names in files."""
    is_mixtral = model.config.model_type == "mixtral"
    in_files = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
    if is_mixtral:
        in_files = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}
    layers = [f"model.layers.{index}." for index in (0, model.config.num_hidden_layers - 1)]
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.") and not name.startswith(tuple(layers)):
            continue
        gradient = parameter.grad.float()
        name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        module, _, part = name.rpartition(".")
        if module.endswith(".experts"):
            parts = in_files[part]
            for expert, of_expert in enumerate(gradient):
                for matrix, rows in zip(parts, of_expert.chunk(len(parts))):
                    yield f"grad.{module}.{expert}.{matrix}.weight", rows.contiguous()
        else:
            yield f"grad.{name}", gradient.contiguous()


def run(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    tensors = {"input_ids": ids, "labels": ids.clone(), "loss": output.loss.detach(),
               "logits_last8": output.logits[:, -8:].detach().contiguous()}
    return tensors | dict(gradients(model))


def fp64_router(self, hidden_states):
    """The router of GLM-4.5 (one group) without its two casts to fp32."""
    logits = torch.nn.functional.linear(hidden_states.view(-1, self.hidden_dim), self.weight.double())
    scores = logits.sigmoid()
    chosen = torch.topk(scores + self.e_score_correction_bias.double(), k=self.top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen)
    return logits, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, chosen


for name in sys.argv[1:] or MODELS:
    config = MODELS[name]
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    noise = torch.Generator().manual_seed(12)
    for key, tensor in model.state_dict().items():
        if key.endswith(("bias", "norm.weight", "layernorm.weight")):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    save_file(run(folder), folder / "oracle.safetensors")
    if name == "glm4_moe":
        modeling_glm4_moe.Glm4MoeTopkRouter.forward = fp64_router
        save_file({"logits_last8": run(folder)["logits_last8"]}, folder / "router_fp64.safetensors")
    print(name, len(load_file(folder / "model.safetensors")), "tensors")
