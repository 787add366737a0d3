"""Pre-training throughput of PyTorch: FSDP2, torch.compile, bf16, or FP8 linear layers of torchao.

    torchrun --standalone --nproc-per-node 2 pretrain.py --model llama3-8b --sequence 8192 --micro-batch 1
    torchrun --standalone --nproc-per-node 2 pretrain.py --model llama3-8b --sequence 8192 --fp8
    python pretrain.py --model llama3.2-1b --sequence 4096 --micro-batch 4

Weights, gradients and AdamW's moments are fp32 and sharded, arithmetic is bf16 (`MixedPrecisionPolicy`), gradients are
reduced in fp32. FP8 is tensorwise dynamic scaling with weights gathered in FP8 and one reduction for all scales, for
every linear layer but the output layer. Tokens are random. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llama import SHAPES, Llama, rotary


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences per GPU and forward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="full activation checkpointing of every block")
    parser.add_argument("--keep-weights", action="store_true", help="do not free gathered weights after the forward pass")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3, help="the median of so many groups of steps is reported")
    return parser.parse_args()


def build(args, device, world):
    shape = SHAPES[args.model]
    with torch.device("meta"):
        model = Llama(shape)
    if args.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=world > 1)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")
    for layer in model.layers:
        if args.recompute:
            from torch.utils.checkpoint import checkpoint

            inner = layer.forward
            layer.forward = lambda x, angles, inner=inner: checkpoint(inner, x, angles, use_reentrant=False)
        layer.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding = dict(mp_policy=policy, reshard_after_forward=not args.keep_weights)
    for layer in model.layers:
        fully_shard(layer, **sharding)
    fully_shard(model, **sharding)
    model.to_empty(device=device)
    torch.manual_seed(1234)
    model.init_weights()
    return shape, model


@torch.compile
def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    dist.init_process_group("nccl", device_id=device)

    shape, model = build(args, device, world)
    angles = rotary(args.sequence, shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator(device=device).manual_seed(rank)

    def step():
        for micro in range(args.accumulate):
            model.set_requires_gradient_sync(micro + 1 == args.accumulate)
            tokens = torch.randint(shape.vocab, (args.micro_batch, args.sequence + 1), device=device, generator=generator)
            loss = cross_entropy(model(tokens[:, :-1], angles), tokens[:, 1:]) / args.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if args.fp8 and world > 1:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        return loss

    for _ in range(args.warmup):
        loss = step()
    rates = []
    for _ in range(args.runs):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(args.steps):
            loss = step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / args.steps
        rates.append(args.micro_batch * args.accumulate * args.sequence / seconds)
    if rank == 0:
        rate = statistics.median(rates)
        print(
            json.dumps(
                {
                    "model": args.model,
                    "sequence": args.sequence,
                    "precision": "fp8" if args.fp8 else "bf16",
                    "gpus": world,
                    "micro_batch": args.micro_batch,
                    "accumulate": args.accumulate,
                    "recompute": args.recompute,
                    "tokens_per_second_per_gpu": round(rate),
                    "runs": [round(r) for r in rates],
                    "teraflops": round(rate * shape.flops_per_token(args.sequence) / 1e12, 1),
                    "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                    "loss": round(loss.item() * args.accumulate, 4),
                    "torch": torch.__version__,
                    "gpu": torch.cuda.get_device_name(),
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
