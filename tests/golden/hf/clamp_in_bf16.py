"""How far gradients of transformers' gpt-oss in bf16 are from fp64, in the shape of `verify --model gpt-oss --size kernels`.

A clamp's derivative jumps at the limit: an element that rounding moves across it has a gradient on one side and none on
the other. Tokens use the experts that they use in fp64, in one run elements also the side of the clamp that they have
there; two runs have a bug.

    pip install torch transformers
    python tests/golden/hf/clamp_in_bf16.py 0.96
"""

import sys

import torch
import torch.nn.functional as F
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

LIMIT = float(sys.argv[1])
RUNS = [("as it is", None), ("sides of fp64", "sides"), ("bug: no clamp of up", "up"), ("bug: no clamp of the gate", "gate")]

# What fp64 chose, in the order of the layers and experts: read again in every other run.
experts, sides = [], []
state = dict(record=True, how=None, expert=0, side=0, moved=0, all=0, clamped=[0, 0])


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, high, free):
        ctx.save_for_backward(free)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].to(grad.dtype), None, None, None


def router(self, x):
    logits = F.linear(x, self.weight, self.bias)
    if state["record"]:
        experts.append(logits.topk(self.top_k, dim=-1).indices)
    chosen = experts[state["expert"]]
    state["expert"] += 1
    top = logits.gather(1, chosen)
    return logits, top.softmax(1), chosen


def activation(self, x):
    gate, up = x[..., ::2], x[..., 1::2]
    free = [gate <= self.limit, up.abs() <= self.limit]
    if state["record"]:
        sides.append(free)
    before = sides[state["side"]]
    state["side"] += 1
    state["moved"] += sum((a != b).sum().item() for a, b in zip(free, before))
    state["all"] += 2 * gate.numel()
    state["clamped"] = [n + (~f).sum().item() for n, f in zip(state["clamped"], free)]
    how, limits = state["how"], [self.limit, self.limit]
    if how == "sides":
        free = before
    for index, part in enumerate(["gate", "up"]):
        if how == part:
            free[index], limits[index] = torch.ones_like(free[index]), 1e9
    gate = Clamp.apply(gate, None, limits[0], free[0])
    up = Clamp.apply(up, -limits[1], limits[1], free[1])
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


GptOssTopKRouter.forward, GptOssExperts._apply_gate = router, activation
config = GptOssConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=64, swiglu_limit=LIMIT, attention_dropout=0.0,
    max_position_embeddings=512, rope_theta=10000.0, rope_scaling=None,
)
config._attn_implementation = config._experts_implementation = "eager"
torch.manual_seed(0)
start = GptOssForCausalLM(config)
with torch.no_grad():
    for name, weight in start.named_parameters():
        zero = name.endswith("bias") or "sinks" in name
        weight.zero_() if zero else weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02)
weights = {name: weight.bfloat16() for name, weight in start.state_dict().items()}
tokens, labels = torch.randint(0, 512, (2, 8, 256))


def gradients(dtype, record, how):
    state.update(record=record, how=how, expert=0, side=0, moved=0, all=0, clamped=[0, 0])
    model = GptOssForCausalLM(config).to(dtype).train()
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
    logits = model(input_ids=tokens).logits
    wide = logits if dtype == torch.float64 else logits.float()
    F.cross_entropy(wide.view(-1, 512), labels.view(-1)).backward()
    found = {}
    for name, weight in model.named_parameters():
        if "gate_up" in name:
            for expert, grad in enumerate(weight.grad.double()):
                found[f"{name}.{expert}.gate"], found[f"{name}.{expert}.up"] = grad[..., ::2], grad[..., 1::2]
        # In exact arithmetic the gradient of a key's bias is zero.
        elif "sinks" not in name and "k_proj.bias" not in name:
            found[name] = weight.grad.double()
    return found


exact = gradients(torch.float64, True, None)
for title, how in RUNS:
    found = gradients(torch.bfloat16, False, how)
    gaps = {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
    moved, clamped = state["moved"] / state["all"], [2 * n / state["all"] for n in state["clamped"]]
    print(f"{title}: {moved:.1e} across the limit; clamped: gate {clamped[0]:.2%}, up {clamped[1]:.2%}")
    for name, gap in sorted(gaps.items(), key=lambda item: -item[1])[:4]:
        print(f"    {gap:.1e} {name}")
