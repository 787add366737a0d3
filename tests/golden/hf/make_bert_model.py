"""A tiny random BERT without heads, and what transformers computes from it in fp64.

    pip install torch transformers safetensors
    python tests/golden/hf/make_bert_model.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

OUT = Path(__file__).parent / "bert_model"
torch.manual_seed(19)
config = BertConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertModel(config).eval()
with torch.no_grad():
    for parameter, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        weight.copy_(1 + 0.1 * noise if "LayerNorm.weight" in parameter else 0.3 * noise)
model.save_pretrained(OUT)
model = BertModel.from_pretrained(OUT, dtype=torch.float64, attn_implementation="sdpa").eval()
inputs = {
    "input_ids": torch.randint(64, (2, 12)),
    "token_type_ids": torch.arange(12).ge(7).long().repeat(2, 1),
    "attention_mask": torch.arange(12).lt(torch.tensor([[12], [9]])).long(),
}
with torch.no_grad():
    found = model(**inputs)
save = {**inputs, "last_hidden_state": found.last_hidden_state, "pooler_output": found.pooler_output}
save_file({name: tensor.contiguous() for name, tensor in save.items()}, OUT / "oracle.safetensors")
