"""The oracle of quantised exports: make.py BASE FOLDERS, where FOLDERS has fp8, int8 and int4 as `burn-megatron export --quantize` wrote them."""

import sys

import torch
from safetensors.torch import load_file, save_file
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.compressors import BaseCompressor
from transformers import AutoModelForCausalLM

LAYER = "model.layers.1.mlp.down_proj"
weight = load_file(sys.argv[1] + "/model.safetensors")[LAYER + ".weight"]
ids = torch.tensor([[(i * i * 5 + 3 * i) % 160 for i in range(40)]])
out = {"input_ids": ids}
cases = {"fp8": ("naive-quantized", dict(num_bits=8, type="float", strategy="channel")),
         "int8": ("pack-quantized", dict(num_bits=8, type="int", strategy="channel")),
         "int4": ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=16))}
for name, (form, args) in cases.items():
    args = QuantizationArgs(symmetric=True, **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    stored = BaseCompressor.get_value_from_registry(form).compress({"weight": weight, "weight_scale": scale}, scheme)
    for key, value in stored.items():
        if value is not None: out[f"{name}.{key}"] = value.contiguous()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2] + "/" + name, dtype=torch.float32)
    with torch.no_grad(): out[f"{name}.logits"] = model(ids).logits
save_file(out, "oracle.safetensors")
