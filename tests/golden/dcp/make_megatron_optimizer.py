"""The folders `megatron_reshardable`, `megatron_experts`, `megatron_model_space`, `megatron_plain`, `megatron_buckets` and
`megatron_expert_buckets`: runs of Megatron-Core that stopped after ten steps, with the states of AdamW, and in `losses.json` what the next twenty steps of that run report.

torch 2.6 on a CPU, gloo, in this folder: `python make_megatron_optimizer.py make NAME`, with megatron-core 0.16.1 for
`megatron_reshardable`, `megatron_experts` (distributed optimizer, `fully_reshardable`), `megatron_buckets` and `megatron_expert_buckets` (`dp_reshardable`,
smaller models on two ranks) and `megatron_plain` (no distributed optimizer), with 0.12.3 for `megatron_model_space` (`fully_sharded_model_space`, which 0.16.1 neither writes nor reads). `check FOLDER LOSSES.json` loads
a folder of `burn-megatron export --torch-dist --optimizer` with 0.16.1 and trains on for twenty steps; its losses must be those of
the run that the file's folder is of, which continues first, with the file's losses. With experts a third word is the number of expert-parallel ranks, 2 without it.
"""

import json
import os
import sys
from argparse import Namespace
from collections import OrderedDict
from contextlib import nullcontext
from enum import Enum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = (10, 30)
BACK = 20  # steps after those that ours has done
SIZES = dict(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, num_query_groups=2)
VOCAB, LENGTH, BATCH = 64, 16, 8
ADAM = dict(lr=1e-2, min_lr=1e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0)
EXPERTS = dict(
    num_layers=1, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="allgather", expert_model_parallel_size=2,
)
SMALL = dict(hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)
# tensor-parallel ranks, whether the optimizer is distributed, how it is sharded in files, more of the model
KINDS = {
    "megatron_reshardable": (2, True, "fully_reshardable", {}),
    "megatron_experts": (1, True, "fully_reshardable", EXPERTS),
    "megatron_model_space": (2, True, "fully_sharded_model_space", {}),
    "megatron_plain": (2, False, None, {}),
    "megatron_buckets": (2, True, "dp_reshardable", dict(num_layers=1, **SMALL)),
    "megatron_expert_buckets": (1, True, "dp_reshardable", {**EXPERTS, **SMALL, "num_layers": 2, "moe_ffn_hidden_size": 16}),
}


class Megatron(Enum):
    ADAM = 1


def on_cpu():
    """Megatron asks for CUDA in places; on a machine without one it is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    np.product = np.prod
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.", 1)

    def moved(make):
        def made(*args, **words):
            if str(words.get("device", "")).startswith("cuda"):
                words["device"] = "cpu"
            return make(*args, **words)

        return made

    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, moved(getattr(torch, name)))

    def reduce_scatter(output, source, op=dist.ReduceOp.SUM, group=None, async_op=False):
        # gloo has none.
        whole = source.clone()
        dist.all_reduce(whole, group=group)
        output.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    dist.reduce_scatter_tensor = dist._reduce_scatter_base = reduce_scatter


def gpt(tp, more, engine_names):
    """A Llama, or a Mixtral."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        **{**SIZES, **more}, use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, tensor_model_parallel_size=tp, pipeline_dtype=torch.float32,
        persist_layer_norm=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if "num_moe_experts" in more and engine_names:
        # With TransformerEngine, only a dense layer's norm is fused.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return config, model


def built(tp, distributed, more, engine_names=False, family=gpt):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    # Reductions that wait for each other, of which gloo knows nothing; random numbers of CUDA, for dropout, which there is
    # none of; FP8 and a step in the parameter groups, which need TransformerEngine.
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: nullcontext()
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    distrib_optimizer.quantize_param_shard = lambda *_: None
    distributed_optimizer = distrib_optimizer.DistributedOptimizer
    copy = distributed_optimizer._set_main_param_and_optimizer_states

    def with_step(self, param, tensors):
        group, order = self.model_param_group_index_map[param]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        own["step"] = own["step"].clone()  # One tensor of all parameters would count each of them.
        copy(self, param, {"step": own["step"], **tensors})

    distributed_optimizer._set_main_param_and_optimizer_states = with_step
    moe_utils.te_general_gemm = None
    ranks = dict(expert_model_parallel_size=more["expert_model_parallel_size"], expert_tensor_parallel_size=1) if "num_moe_experts" in more else {}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **ranks)
    torch.manual_seed(7)
    config, model = family(tp, more, engine_names)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp, model)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", use_distributed_optimizer=distributed, params_dtype=torch.float32, **ADAM), [model]
    )
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=ADAM["lr"], min_lr=ADAM["min_lr"], lr_warmup_steps=4 * BATCH,
        lr_decay_steps=40 * BATCH, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40 * BATCH,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=False,
    )
    return model, optimizer, scheduler


def tokens(seed=3):
    """Of steps up to the last one that is recorded. Each follows from the one before it, but for a fifth of them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (STEPS[1], BATCH, LENGTH + 1), generator=random)
    follows = torch.rand(ids.shape, generator=random) < 0.8
    for at in range(LENGTH):
        ids[..., at + 1] = torch.where(follows[..., at + 1], (5 * ids[..., at] + 3) % VOCAB, ids[..., at + 1])
    return ids


def train(model, optimizer, scheduler, steps):
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for batch in torch.cat([tokens(), tokens(seed=4)])[steps[0]:steps[1]]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        mine = batch.chunk(size)[rank]
        positions = torch.arange(LENGTH).expand(len(mine), -1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        loss = model(mine[:, :-1], positions, mask, labels=mine[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        scheduler.step(BATCH)
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        losses.append(loss.item() / size)
    return losses


def state(model, optimizer, scheduler, sharding, loading):
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True} if sharding else {}
    weights = model.module.sharded_state_dict()
    words = {"metadata": metadata} if sharding != "fully_sharded_model_space" else {"sharding_type": sharding}
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, **words),
        "opt_param_scheduler": scheduler.state_dict(),
    }


def make(name, family=gpt):
    from megatron.core import dist_checkpointing

    tp, distributed, sharding, of_model = KINDS[name]
    parts = built(tp, distributed, of_model, family=family)
    before = train(*parts, (0, STEPS[0]))
    if dist.get_rank() == 0:
        os.makedirs(name, exist_ok=True)
        for file in os.listdir(name):
            if file != "config.json":
                os.remove(os.path.join(name, file))
    dist.barrier()
    more = {"iteration": STEPS[0], "checkpoint_version": 3.0}
    if not distributed:
        # As Megatron-LM has it; two steps more than the scheduler has counted were skipped.
        seen = dict(consumed_train_samples=(STEPS[0] + 2) * BATCH, params_dtype=torch.float32, save=Path("runs"))
        more = {**more, "iteration": STEPS[0] + 2, "args": Namespace(**seen, optimizer=Megatron.ADAM, layers=OrderedDict(a=1))}
    dist_checkpointing.save({**state(*parts, sharding, False), **more}, name)
    losses = train(*parts, STEPS)
    if dist.get_rank() == 0:
        told = {"model": {**SIZES, **of_model, "vocab_size": VOCAB}, "before": before, "losses": losses,
                "tokens": tokens()[STEPS[0]:].tolist()}
        with open(os.path.join(name, "losses.json"), "w") as file:
            json.dump(told, file)


def loaded(folder, tp, more, sharding, engine_names=False, family=gpt):
    """The run of a folder, and its steps."""
    from megatron.core import dist_checkpointing

    parts = built(tp, True, more, engine_names, family)
    for optimizer in getattr(parts[1], "chained_optimizers", [parts[1]]):
        # Without TransformerEngine, a new optimizer has no step that it could tell.
        optimizer._init_optimizer_states_with_dummy_values()
    told = dist_checkpointing.load(state(*parts, sharding, True), folder)
    parts[0].module.load_state_dict(told["model"], strict=False)
    parts[1].load_state_dict(told["optimizer"])
    parts[2].load_state_dict(told["opt_param_scheduler"])
    return parts, told["iteration"]


def compare(folder, parts, done, expected):
    """Trains what was read from `folder`, and prints how far its losses are from the expected ones."""
    losses = train(*parts, (done, done + BACK))
    assert len(losses) == len(expected) == BACK
    worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, expected))
    if dist.get_rank() == 0:
        print(f"{folder}: {BACK} steps from step {done}, largest relative difference of losses {worst:.1e}")


def check(folder, file, ranks=2):
    from megatron.core import parallel_state

    with open(file) as opened:
        told = json.load(opened)
    experts = "num_moe_experts" in told["model"]
    tp, _, sharding, more = KINDS["megatron_experts" if experts else "megatron_reshardable"]
    parts, first = loaded(os.path.dirname(file), tp, more, sharding)
    expected = train(*parts, (first, STEPS[1] + BACK))
    again = max(abs(loss / recorded - 1) for loss, recorded in zip(expected, told["losses"]))
    parallel_state.destroy_model_parallel()

    # The folder is of one expert-parallel rank, or of several.
    more = {**EXPERTS, "expert_model_parallel_size": int(ranks)} if experts else {}
    parts, done = loaded(folder, tp, more, sharding, engine_names=True)
    compare(folder, parts, done, expected[done - first:][:BACK])
    if dist.get_rank() == 0:
        print(f"the run that it comes from, again: {again:.1e} from {file}")


def run(rank, size, job, *arguments):
    os.chdir(HERE)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29535", RANK=str(rank), WORLD_SIZE=str(size))
    on_cpu()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    job(*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    job, *arguments = sys.argv[1:]
    size = 2 if arguments[0].endswith("buckets") else 4
    mp.start_processes(run, (size, {"make": make, "check": check}[job], *map(str, arguments)), size, start_method="fork")
