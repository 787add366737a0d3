"""Loads a folder of `burn-megatron export --dcp` with PyTorch and compares it with the safetensors file of golden/hf.

`python check_torch.py FOLDER MODEL`: `load` over two ranks of FSDP2, and `dcp_to_torch_save`.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

HERE = os.path.dirname(os.path.abspath(__file__))


def run(rank, folder, weights):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29534")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, tensor in weights.items()}
    dcp.load(state, checkpoint_id=folder)
    assert all(torch.equal(state[name].full_tensor(), tensor) for name, tensor in weights.items())
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, model = sys.argv[1:]
    weights = load_file(os.path.join(HERE, "..", "hf", model, "model.safetensors"))
    with tempfile.TemporaryDirectory() as there:
        path = os.path.join(there, "model.pt")
        dcp_to_torch_save(folder, path)
        saved = torch.load(path, weights_only=True)
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    mp.start_processes(run, (folder, weights), 2, start_method="fork")
    print(f"{folder}: {len(weights)} tensors are equal")
