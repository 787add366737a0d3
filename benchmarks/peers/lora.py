"""LoRA throughput of peft: transformers' Llama with random weights, rank-16 adapters on all linear layers, torch.compile.

    python lora.py --sequence 4096 --micro-batch 2

One GPU, bf16, AdamW on the adapters in fp32. Tokens are random and packed: no padding. Prints one JSON object.
"""

import argparse
import json
import statistics
import time

import peft
import torch
import transformers

from llama import SHAPES

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=SHAPES, default="llama3-8b")
parser.add_argument("--sequence", type=int, default=4096)
parser.add_argument("--micro-batch", type=int, default=2)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--warmup", type=int, default=4)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--runs", type=int, default=3)
args = parser.parse_args()

shape = SHAPES[args.model]
config = transformers.LlamaConfig(
    hidden_size=shape.hidden,
    intermediate_size=shape.intermediate,
    num_hidden_layers=shape.layers,
    num_attention_heads=shape.heads,
    num_key_value_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    vocab_size=shape.vocab,
    rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    max_position_embeddings=args.sequence,
    tie_word_embeddings=shape.tied,
    use_cache=False,
)
torch.manual_seed(1234)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
torch.set_default_dtype(torch.float32)
linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = peft.get_peft_model(
    model, peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules=linears, task_type="CAUSAL_LM"), autocast_adapter_dtype=False
)
if args.recompute:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
for layer in model.base_model.model.model.layers:
    layer.compile()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)


@torch.compile
def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def step():
    tokens = torch.randint(shape.vocab, (args.micro_batch, args.sequence + 1), device="cuda")
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = cross_entropy(logits, tokens[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(args.warmup):
    loss = step()
rates = []
for _ in range(args.runs):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(args.steps):
        loss = step()
    torch.cuda.synchronize()
    rates.append(args.micro_batch * args.sequence * args.steps / (time.perf_counter() - start))
print(
    json.dumps(
        {
            "model": args.model,
            "method": f"LoRA r={args.rank}, all linear layers",
            "sequence": args.sequence,
            "precision": "bf16",
            "gpus": 1,
            "micro_batch": args.micro_batch,
            "recompute": args.recompute,
            "tokens_per_second_per_gpu": round(statistics.median(rates)),
            "runs": [round(r) for r in rates],
            "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "trained_parameters": sum(p.numel() for p in trained),
            "loss": round(loss.item(), 4),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "gpu": torch.cuda.get_device_name(),
        }
    ),
    flush=True,
)
