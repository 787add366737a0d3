"""The folders `adamw` and `adamw_flat`: a Llama of transformers after ten steps of torch's AdamW in fp64, as `get_state_dict` gives
weights and moments: nested and saved by two ranks, flat and in fp32; in `losses.json` what the next twenty steps of that run
report.

torch 2.6 and transformers 5.24 on a CPU, gloo: `python make_adamw.py make` in this folder. `check FOLDER LOSSES.json` loads a
folder of `burn-megatron export --dcp --optimizer` in both forms and trains on; its losses must be those of the file.
"""

import json
import os
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = (10, 30)
VOCAB, LENGTH, BATCH = 64, 16, 8
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, rms_norm_eps=1e-5, max_position_embeddings=LENGTH, tie_word_embeddings=False, dtype="float64",
)


def built():
    torch.manual_seed(7)
    model = LlamaForCausalLM(CONFIG).double()
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def tokens():
    """Each follows from the one before it, but for a fifth of them."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (STEPS[1], BATCH, LENGTH + 1), generator=random)
    follows = torch.rand(ids.shape, generator=random) < 0.8
    for at in range(LENGTH):
        ids[..., at + 1] = torch.where(follows[..., at + 1], (5 * ids[..., at] + 3) % VOCAB, ids[..., at + 1])
    return ids


def train(model, optimizer, steps):
    losses = []
    for batch in tokens()[steps[0]:steps[1]]:
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states(model, optimizer, flat, names, dtype=None):
    parts = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(value):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        return value.detach().to(dtype) if dtype else distribute_tensor(value.detach(), mesh, [Shard(0)])

    weights, moments = tree_map(shard, parts)
    # torchtitan has weights at the top.
    return {names[0]: weights, names[1]: moments} if names[0] else {**weights, names[1]: moments}


def make():
    model, optimizer = built()
    train(model, optimizer, (0, STEPS[0]))
    kinds = (("adamw", False, ("model", "optim"), None), ("adamw_flat", True, (None, "optimizer"), torch.float32))
    for name, flat, names, dtype in kinds:
        if dist.get_rank() == 0:
            shutil.rmtree(name, ignore_errors=True)
        dist.barrier()
        dcp.save(states(model, optimizer, flat, names, dtype), checkpoint_id=name)
    losses = train(model, optimizer, STEPS)
    if dist.get_rank() == 0:
        for name in ("adamw", "adamw_flat"):
            CONFIG.save_pretrained(name)
        with open(os.path.join("adamw", "losses.json"), "w") as file:
            json.dump({"losses": losses, "tokens": tokens()[STEPS[0]:].tolist()}, file)


def check(folder, file):
    with open(file) as file:
        expected = json.load(file)["losses"]
    for flat in (False, True):
        model, optimizer = built()
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.5  # The folder has other ones.
        state = states(model, optimizer, flat, (None, "optimizer"))
        dcp.load(state, checkpoint_id=folder)
        state = tree_map(lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value, state)
        moments = state.pop("optimizer")
        set_state_dict(
            model, optimizer, model_state_dict=state, optim_state_dict=moments,
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
        done = int(optimizer.state[next(model.parameters())]["step"].item())
        losses = train(model, optimizer, (done, STEPS[1]))
        theirs = expected[len(expected) - len(losses):]
        worst = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, theirs))
        if dist.get_rank() == 0:
            print(f"{folder}, flat {flat}: {len(losses)} steps from step {done}, largest relative difference of losses {worst:.1e}")


def run(rank, size, job, *arguments):
    os.chdir(HERE)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    job(*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    job, *arguments = sys.argv[1:]
    arguments = [os.path.abspath(argument) for argument in arguments]
    mp.start_processes(run, (2, {"make": make, "check": check}[job], *arguments), 2, start_method="fork")
