"""The folders `fsdp` and `mesh`: the weights of golden/hf/llama3 as PyTorch's DCP writes them.

torch 2.6 on a CPU, gloo: `python make_fsdp.py` in this folder.
"""

import os
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

HERE = os.path.dirname(os.path.abspath(__file__))
WEIGHTS = os.path.join(HERE, "..", "hf", "llama3", "model.safetensors")
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")


def save(name, state):
    if dist.get_rank() == 0:
        shutil.rmtree(name, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=name)


def half(weights):
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def fsdp(weights):
    """FSDP2 on three ranks: matrix rows of each tensor, unevenly. The optimizer's moments and the step come with them."""
    mesh = init_device_mesh("cpu", (3,))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in half(weights).items()}
    moments = {"model.norm.weight": {"exp_avg": sharded["model.norm.weight"].float(), "step": torch.tensor(3.0)}}
    save("fsdp", {"model": sharded, "optimizer": {"state": moments}, "train_state": {"step": 3}})


def two_dimensions(weights):
    """FSDP2 × TP2: column-parallel and row-parallel weights are cut in two dimensions; norms are replicated over TP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def place(name):
        if any(part in name for part in COLUMN):
            return [Shard(0), Shard(0)]
        return [Shard(0), Replicate()] if "norm" in name else [Shard(0), Shard(1)]

    save("mesh", {name: distribute_tensor(tensor, mesh, place(name)) for name, tensor in weights.items()})


def run(rank, size, job):
    os.chdir(HERE)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    job(load_file(WEIGHTS))
    dist.destroy_process_group()


if __name__ == "__main__":
    for size, job in ((3, fsdp), (4, two_dimensions)):
        mp.spawn(run, (size, job), size)
    sys.exit(0)
