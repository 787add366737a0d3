"""Makes `glm4_moe` and `qwen2_moe`: python make_moe.py (transformers 5.24, torch 2.6, CPU)."""

import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen2MoeConfig
from transformers.models.glm4_moe import modeling_glm4_moe

HERE = pathlib.Path(__file__).parent
COMMON = dict(
    vocab_size=160, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, moe_intermediate_size=16, num_experts_per_tok=3, max_position_embeddings=128,
    initializer_range=0.2,
)
MODELS = {
    "glm4_moe": Glm4MoeConfig(
        **COMMON, head_dim=16, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
        attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON, num_experts=8, shared_expert_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=False,
    ),
}


def gradients(model):
    """Of embeddings, first and last layer and final norm, those of experts under their names in files."""
    layers = [f"model.layers.{index}." for index in (0, model.config.num_hidden_layers - 1)]
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.") and not name.startswith(tuple(layers)):
            continue
        gradient = parameter.grad.float()
        module, _, part = name.rpartition(".")
        if module.endswith(".mlp.experts"):
            parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[part]
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


for name, config in MODELS.items():
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
