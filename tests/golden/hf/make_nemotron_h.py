"""Makes `nemotron_h`: python make_nemotron_h.py (transformers 5.24, torch 2.6, CPU)."""

import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, NemotronHConfig

HERE = pathlib.Path(__file__).parent
KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
CONFIG = NemotronHConfig(
    vocab_size=160, hidden_size=32, layers_block_type=[KINDS[kind] for kind in "M-M*-M"], num_attention_heads=4,
    num_key_value_heads=2, head_dim=12, intermediate_size=64, mamba_num_heads=8, mamba_head_dim=8, n_groups=2,
    ssm_state_size=16, chunk_size=8, max_position_embeddings=128, initializer_range=0.2,
    # The library takes it for the smallest step size, where Megatron-LM has none: below every step here.
    time_step_min=1e-9,
)
# Embeddings, a layer of each kind, the last norm and the output layer.
GRADIENTS = ("embeddings", "layers.0.", "layers.1.", "layers.3.", "norm_f", "lm_head")

torch.manual_seed(11)
model = AutoModelForCausalLM.from_config(CONFIG)
noise = torch.Generator().manual_seed(12)
for key, tensor in model.state_dict().items():
    if key.endswith(("norm.weight", "norm_f.weight", "conv1d.bias", ".D", "A_log")):
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=noise))
    if key.endswith("dt_bias"):
        tensor.copy_(torch.linspace(-4.0, -1.0, len(tensor)))
    if key.endswith("out_proj.weight"):
        tensor.mul_(5)
folder = HERE / "nemotron_h"
shutil.rmtree(folder, ignore_errors=True)
model.save_pretrained(folder)

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
ids = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
output = model(input_ids=ids, labels=ids, use_cache=False)
output.loss.backward()
tensors = {"input_ids": ids, "labels": ids.clone(), "loss": output.loss.detach(),
           "logits_last8": output.logits[:, -8:].detach().contiguous()}
for name, parameter in model.named_parameters():
    # Files have the prefix of NVIDIA's own code.
    name = name.replace("model.", "backbone.", 1)
    if name.removeprefix("backbone.").startswith(GRADIENTS):
        tensors[f"grad.{name}"] = parameter.grad.float().contiguous()
save_file(tensors, folder / "oracle.safetensors")
for file in folder.iterdir():
    file.chmod(0o644)
print(len(tensors), "tensors, loss", output.loss.item())
