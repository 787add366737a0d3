"""Writes the pictures of this folder, and what Pillow and transformers make of them: transformers' processors without torch."""

import json

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

rng = np.random.default_rng(7)


def picture(height, width):
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 90 * np.sin(x / 3 + c) * np.cos(y / (4 + c)) for c in range(3)]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)


small = Image.fromarray(picture(17, 13))
wide = Image.fromarray(picture(40, 61))
pictures = {
    "small.png": small,
    "wide.png": wide,
    "grey.png": small.convert("L"),
    "alpha.png": Image.fromarray(np.dstack([picture(9, 11), np.full((9, 11), 40, np.uint8)]), "RGBA"),
    "palette.png": wide.quantize(16),
    "wide.jpg": wide,
}
tensors = {}
for name, image in pictures.items():
    image.save(name, **({"quality": 90} if name.endswith("jpg") else {}))
    tensors[f"decoded.{name}"] = np.array(Image.open(name).convert("RGB"))

side = {"height": 8, "width": 8}
cases = {
    "vit": (ViTImageProcessorPil, {"size": side}),
    "vit_up": (ViTImageProcessorPil, {"size": {"height": 21, "width": 30}, "resample": 1, "image_mean": [0.4, 0.5, 0.6]}),
    "clip": (CLIPImageProcessorPil, {"size": {"shortest_edge": 8}, "crop_size": side}),
    "clip_large_crop": (CLIPImageProcessorPil, {"size": {"shortest_edge": 7}, "crop_size": {"height": 12, "width": 10}}),
    "bytes": (CLIPImageProcessorPil, {"do_resize": False, "crop_size": {"height": 11, "width": 6}, "do_rescale": False, "do_normalize": False}),
}
files = {}
for case, (kind, keys) in cases.items():
    processor = kind(**keys)
    files[case] = processor.to_dict()
    for name in ["small.png", "wide.png"]:
        out = processor(Image.open(name), return_tensors="np")["pixel_values"][0]
        tensors[f"{case}.{name}"] = out.astype(np.float32)
with open("processors.json", "w") as out:
    json.dump(files, out, indent=1, default=int)
save_file(tensors, "expected.safetensors")
