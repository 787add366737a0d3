"""Makes the files of this folder with sentencepiece 0.2.3 and tiktoken 0.14: small tokenizers and what they make of texts."""
import sentencepiece as spm, json, os, base64, random, tiktoken
text = """The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.
Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, I thought I would sail about.
In the beginning there was nothing, which exploded. All happy families are alike; every unhappy family is unhappy in its own way.
fn main() { let mut total = 0; for i in 0..10 { total += i * 2; } println!("{}", total); }
def area(radius): return 3.14159 * radius ** 2
Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung aller staatlichen Gewalt.
Être ou ne pas être, telle est la question. Où est la bibliothèque? Ça va très bien, merci beaucoup.
Привет, мир! Как дела сегодня? Сегодня хорошая погода.
日本語の文章もあります。今日は天気がいいですね。
"""
lines = [l for l in text.split("\n") if l]*4
open("train.txt","w").write("\n".join(lines))
def train(name, **kw):
    spm.SentencePieceTrainer.train(input="train.txt", model_prefix=name, hard_vocab_limit=False, minloglevel=2, **kw)
# Llama 2 / Mistral: BPE, byte fallback, identity, digits split, no whitespace removal
train("llama2", model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity", split_digits=True, remove_extra_whitespaces=False, character_coverage=0.995, allow_whitespace_only_pieces=True)
# T5: unigram, nmt_nfkc, extra whitespace removed
train("t5", model_type="unigram", vocab_size=400, normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, character_coverage=0.99)
# unigram with byte fallback, Gemma-like: no dummy prefix
train("gemma", model_type="unigram", vocab_size=700, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False, character_coverage=0.99, split_digits=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=["<start_of_turn>"])
texts = ["", " ", "Hello world", "  two  spaces  and trailing ", "The quick brown fox\njumps\tover 12345 dogs.", "ﬁne ①② Ａｂｃ ½ ™", "naïve café Würde Ça", "emoji 😀🎉 and 漢字 日本語", "[INST] hi [/INST]", "<start_of_turn>user\n  hi", "\u0000\u0001 control \u200b zero", "a\u0301 e\u0301 combining", "Привет, мир!", "x"*50, "   ", "line\r\nline", "▁under▁score", "tab\t\ttab", "    indented\n        more", "ÀÉÎ ﷺ ㍿ Å Ω"]
rng = random.Random(7)
alphabet = "abcdefgh ABC 0129  .,;!?-_\n\t\"'(){}éüßñ日本語今天привет😀▁ﬁ①"
texts += ["".join(rng.choice(alphabet) for _ in range(rng.randint(1,60))) for _ in range(60)]
out = {}
for name in ["llama2","t5","gemma"]:
    sp = spm.SentencePieceProcessor(model_file=name+".model")
    out[name] = {"size": sp.get_piece_size(), "cases": [{"text": t, "ids": sp.encode(t), "decoded": sp.decode(sp.encode(t))} for t in texts]}
    print(name, sp.get_piece_size(), os.path.getsize(name+".model"))
from tiktoken._educational import bpe_train
pat = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
ranks = bpe_train(data=text, vocab_size=480, pat_str=pat, visualise=None)
open("letters.tiktoken","wb").write(b"".join(base64.b64encode(t)+b" "+str(r).encode()+b"\n" for t,r in sorted(ranks.items(), key=lambda x:x[1])))
special = {"<|begin|>": len(ranks), "<|end|>": len(ranks)+1}
json.dump({"added_tokens_decoder": {str(i): {"content": t, "special": True} for t,i in special.items()}}, open("tokenizer_config.json","w"), indent=1)
enc = tiktoken.Encoding("t", pat_str=pat, mergeable_ranks=ranks, special_tokens=special)
tt = texts + ["<|begin|>Hello<|end|>", "it's IT'S we'll"]
out["tiktoken"] = {"size": enc.n_vocab, "cases": [{"text": t, "ids": enc.encode(t, allowed_special="all"), "decoded": enc.decode(enc.encode(t, allowed_special="all"))} for t in tt]}
json.dump(out, open("ids.json","w"), ensure_ascii=False, indent=0)
