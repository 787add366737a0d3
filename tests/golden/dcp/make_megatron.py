"""The folders `megatron_dense` and `megatron_moe`: weights of golden/megatron/{dense,moe} as Megatron-Core's torch_dist writes them.

megatron-core 0.16.1, torch 2.6 on a CPU, gloo: `python make_megatron.py` in this folder. One rank loads the recorded
weights and saves them; four ranks (TP2 PP2, with experts PP2 EP2) load that and save the folder. `load FOLDER DENSE_OR_MOE`
loads a folder of `burn-megatron export --torch-dist` into a model of one rank and compares it with the recorded weights.
"""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
# Megatron asks for the current device of CUDA in places; on a machine without one it is the CPU.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None


def model(kind, tp, pp, ep, transformer_engine=False):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    experts = {}
    if kind == "moe":
        experts = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64, moe_router_load_balancing_type="aux_loss")
    config = TransformerConfig(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
        use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, pipeline_dtype=torch.float32,
        persist_layer_norm=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False, **experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if transformer_engine and experts:
        # With TransformerEngine, only a dense layer's norm is fused.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return GPTModel(
        config, spec, vocab_size=128, max_sequence_length=16, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )


def recorded(kind):
    return load_file(os.path.join(HERE, "..", "megatron", kind, "init.safetensors"))


def save(built, folder):
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()
    dist_checkpointing.save({"model": built.sharded_state_dict(), "iteration": 0}, folder)


def load(built, folder):
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load({"model": built.sharded_state_dict()}, folder)
    built.load_state_dict(state["model"], strict=False)


def write_whole(kind, folder):
    built = model(kind, 1, 1, 1)
    expected = {name for name in built.state_dict() if not name.endswith("_extra_state")}
    weights = recorded(kind)
    assert expected == set(weights), sorted(expected ^ set(weights))
    built.load_state_dict(weights, strict=False)
    save(built, folder)


def write_sharded(kind, folder):
    built = model(kind, 1, 2, 2) if kind == "moe" else model(kind, 2, 2, 1)
    load(built, folder)
    save(built, f"megatron_{kind}")


def check(kind, folder):
    built = model(kind, 1, 1, 1, transformer_engine=True)
    load(built, folder)
    worst = max((built.state_dict()[name] - tensor).abs().max().item() for name, tensor in recorded(kind).items())
    print(f"{folder}: largest difference {worst}")


def run(rank, size, job, kind, folder):
    os.chdir(HERE)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    job(kind, folder)
    dist.destroy_process_group()


def start(size, job, kind, folder):
    mp.start_processes(run, (size, job, kind, folder), size, start_method="fork")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        start(1, check, sys.argv[3], os.path.abspath(sys.argv[2]))
        sys.exit(0)
    for kind in sys.argv[1:] or ("dense", "moe"):
        with tempfile.TemporaryDirectory() as whole:
            start(1, write_whole, kind, whole)
            start(4, write_sharded, kind, whole)
