"""A tiny random T5 with a tokenizer of words, rows of tasks, and what EleutherAI's lm-evaluation-harness says of them with
transformers in fp64. Answers are transformers' own: the harness adds the length of the context to the most tokens of an answer,
as for causal models.

    pip install torch transformers safetensors lm_eval accelerate
    python tests/golden/hf/make_t5_eval.py
"""

import json
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

OUT = Path(__file__).parent / "t5_eval"
SPECIAL = ["<pad>", "</s>", "<unk>"]
VOCABULARY = 64
# A document has windows of this length, and some contexts are longer.
MAX_LENGTH = 12


def tokenizer():
    words = SPECIAL + [f"w{id}" for id in range(len(SPECIAL), VOCABULARY)]
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def model():
    torch.manual_seed(11)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )
    made = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.1 * noise if "layer_norm" in name else 0.4 * noise)
    made.save_pretrained(OUT)
    return T5ForConditionalGeneration.from_pretrained(OUT, dtype=torch.float64).eval()


def words(generator, count):
    return " ".join(f"w{id}" for id in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def write(name, rows):
    (OUT / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    OUT.mkdir(exist_ok=True)
    tokens = tokenizer()
    tokens.save_pretrained(OUT)
    harness = HFLM(
        pretrained=model(), tokenizer=tokens, backend="seq2seq", batch_size=3, max_length=MAX_LENGTH, device="cpu"
    )
    generator = torch.Generator().manual_seed(5)

    def ask(kind, arguments):
        requests = [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]
        return getattr(harness, kind)(requests)

    def answer(context):
        ids = torch.tensor([tokens(context).input_ids[-MAX_LENGTH:]])
        written = harness.model.generate(ids, max_new_tokens=5, do_sample=False)
        return tokens.decode(written[0], skip_special_tokens=True)

    contexts = [words(generator, count) for count in [1, 4, 9, 11, 18]]
    answers = [answer(context) for context in contexts]
    print(answers)
    rows = [{"context": context, "target": answer, "max_new_tokens": 5} for context, answer in zip(contexts, answers)]
    rows[1]["target"] = "w3"
    first, second, *_ = answers[2].split()
    rows.append({"context": contexts[2], "target": first, "until": [second], "max_new_tokens": 5})
    write("write.jsonl", rows)

    pairs = [("", words(generator, 3)), (contexts[0] + " ", words(generator, 2))]
    pairs += [(context, " " + answer) for context, answer in zip(contexts[:2], answers)]
    pairs += [(context, " " + words(generator, count)) for context, count in zip(contexts, [1, 7, 3, 11, 2])]
    write("rest.jsonl", [{"context": context, "continuation": continuation} for context, continuation in pairs])

    choices = [[" " + words(generator, count) for count in [1, 2, 4]] for _ in contexts]
    rows = zip(contexts, choices)
    write("choice.jsonl", [{"context": c, "continuations": all, "answer": i % 3} for i, (c, all) in enumerate(rows)])
    text = words(generator, 29)
    (OUT / "book.txt").write_text(text)

    found = {
        "write": answers,
        "rest": ask("loglikelihood", pairs),
        "choice": [ask("loglikelihood", [(context, one) for one in all]) for context, all in zip(contexts, choices)],
        "book": ask("loglikelihood_rolling", [(text,)]),
    }
    (OUT / "harness.json").write_text(json.dumps(found, indent=1) + "\n")


main()
