"""The folders `megatron_{qwen2,qwen3,gpt,qwen2_moe,glm4_moe,deepseek_v3,gpt_oss}`: runs of these families in Megatron-Core that
stopped after ten steps, as those of make_megatron_optimizer.py (`fully_reshardable`, two ranks), and in `losses.json` what their
next twenty steps report.

torch 2.6 on a CPU, gloo, megatron-core 0.16.1, in this folder: `python make_megatron_families.py make NAME` without `megatron_`;
`check NAME FOLDER [EXPERT_PARALLEL]` loads a folder of `burn-megatron export --torch-dist --optimizer` under the names that
TransformerEngine's layers have, and trains on for twenty steps; its losses must be those of the run that the family's folder
is of, which continues first.
"""

import json
import os
import sys

import make_megatron_optimizer as runs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from make_megatron_optimizer import BACK, LENGTH, STEPS, VOCAB, compare, loaded, on_cpu, tokens, train

HERE = os.path.dirname(os.path.abspath(__file__))
DENSE = dict(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, num_query_groups=2)
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_token_dispatcher_type="allgather",
    moe_router_load_balancing_type="none", expert_model_parallel_size=2,
)
SIGMOID = dict(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5,
    moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=1e-4, moe_layer_freq=[0, 1],
)
# What the layers are; `model` is what GPTModel is told, the rest TransformerConfig.
FAMILIES = {
    "qwen2": dict(**DENSE, add_qkv_bias=True),
    "qwen3": dict(**DENSE, qk_layernorm=True, kv_channels=8),
    "gpt": dict(
        **{**DENSE, "num_query_groups": 4}, normalization="LayerNorm", add_bias_linear=True, gated_linear_unit=False,
        activation_func="gelu", model=dict(position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True),
    ),
    "qwen2_moe": dict(
        **{**DENSE, **EXPERTS}, add_qkv_bias=True, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True,
        moe_router_pre_softmax=True,
    ),
    "glm4_moe": dict(
        **{**DENSE, **EXPERTS, **SIGMOID}, add_qkv_bias=True, qk_layernorm=True, moe_shared_expert_intermediate_size=16,
        model=dict(rotary_percent=0.5),
    ),
    "deepseek_v3": dict(
        **{**DENSE, **EXPERTS, **SIGMOID, "num_query_groups": 4}, multi_latent_attention=True, qk_layernorm=True, q_lora_rank=8,
        kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=4, kv_channels=4, rope_type="rope",
        rotary_scaling_factor=1.0, moe_shared_expert_intermediate_size=16, moe_router_num_groups=2, moe_router_group_topk=1,
        layernorm_epsilon=1e-6,
        # The mean over all but the last position, which a module does not predict; per token, as ours, it is 0.1.
        mtp_num_layers=1, mtp_loss_scaling_factor=0.1 * (LENGTH - 1) / LENGTH,
    ),
    "gpt_oss": dict(
        **{**DENSE, **EXPERTS}, add_bias_linear=True, softmax_type="learnable", window_size=(7, 0), window_attn_skip_freq=[1, 0],
        activation_func="quick_gelu", glu_linear_offset=1.0, activation_func_clamp_value=7.0, kv_channels=8,
    ),
}


def family(name):
    """What makes the model of a family."""

    def model(tp, more, engine_names):
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        without_sizes_of_latents()
        told = dict(more)
        of_model = dict(position_embedding_type="rope", share_embeddings_and_output_weights=False)
        of_model.update(told.pop("model", {}))
        functions = dict(quick_gelu=quick_gelu, silu=torch.nn.functional.silu,
                         gelu=lambda x: torch.nn.functional.gelu(x, approximate="tanh"))
        told["activation_func"] = functions[told.get("activation_func", "silu")]
        words = dict(add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm", layernorm_epsilon=1e-5)
        kind = MLATransformerConfig if told.get("multi_latent_attention") else TransformerConfig
        config = kind(
            **{**words, **told}, use_cpu_initialization=True, tensor_model_parallel_size=tp, pipeline_dtype=torch.float32,
            persist_layer_norm=False, bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        if engine_names:
            spec.layer_specs = [of_engine(layer) for layer in spec.layer_specs]
        predictors = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        return config, GPTModel(
            config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, mtp_block_spec=predictors, **of_model
        )

    return model


def without_sizes_of_latents():
    """Megatron-Core's own attention is not told how wide a head of latent attention is: its values are `kv_channels` wide."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # It asks whether a layer is one of TransformerEngine's.
    for engine in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, engine, None), type):
            setattr(multi_latent_attention, engine, type(engine, (), {}))
    start = DotProductAttention.__init__
    if start.__name__ != "started":

        def started(self, *words, k_channels=None, v_channels=None, **more):
            start(self, *words, **more)

        DotProductAttention.__init__ = started


def of_engine(layer):
    """A layer whose norms have the names of TransformerEngine's: fused with the linear layer behind, where there is one."""
    from copy import deepcopy

    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    layer, names = deepcopy(layer), {}
    if layer.submodules.self_attention.module is MLASelfAttention:
        for norm, linear in (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj")):
            names[f"self_attention.{norm}."] = f"self_attention.{linear}.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if layer.submodules.mlp.module is MLP:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.submodules.sharded_state_dict_keys_map = names
    return layer


def ranks(name):
    return 1 if "num_moe_experts" in FAMILIES[name] else 2


def make(name):
    folder = f"megatron_{name}"
    runs.KINDS[folder] = (ranks(name), True, "fully_reshardable", FAMILIES[name])
    runs.make(folder, family(name))


def check(name, folder, expert_parallel=2):
    from megatron.core import parallel_state

    with open(f"megatron_{name}/losses.json") as opened:
        told = json.load(opened)
    tp, sharding, more = ranks(name), "fully_reshardable", FAMILIES[name]
    parts, first = loaded(f"megatron_{name}", tp, more, sharding, family=family(name))
    expected = train(*parts, (first, STEPS[1] + BACK))
    again = max(abs(loss / recorded - 1) for loss, recorded in zip(expected, told["losses"]))
    parallel_state.destroy_model_parallel()
    if "num_moe_experts" in more:
        more = {**more, "expert_model_parallel_size": int(expert_parallel)}
    parts, done = loaded(folder, tp, more, sharding, engine_names=True, family=family(name))
    compare(folder, parts, done, expected[done - first:][:BACK])
    if dist.get_rank() == 0:
        print(f"the run that it comes from, again: {again:.1e}")


if __name__ == "__main__":
    job, *arguments = sys.argv[1:]
    mp.start_processes(runs.run, (2, {"make": make, "check": check}[job], *arguments), 2, start_method="fork")
