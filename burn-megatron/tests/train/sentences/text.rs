//! From a text to a trained BERT and T5, and what other commands say of their files: no Python, no published file.

use std::fs;
use std::process::Command;

use burn_megatron::data::indexed::IndexedDataset;

use super::losses;
use crate::command::{fail, succeed};

/// A text of paragraphs, tokens of its sentences, and the files of two runs.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let paragraph = |i: usize| {
        format!(
            "The cat {} sat on the mat of Dr. Who.\nThen it saw {} mice! Did it eat {} of them? It did.\n\n",
            i % 7,
            i % 5,
            i % 3
        )
    };
    fs::write(folder.path().join("book.txt"), (0..48).map(paragraph).collect::<String>()).unwrap();
    let said = succeed(
        folder.path(),
        "preprocess --input book.txt --output-prefix book --train-wordpiece 120 --split-sentences",
    );
    assert!(said.contains("book_text_sentence.bin: 48 documents, 192 sentences,"), "{said}");
    let common = "[training]\nsteps = 20\nmicro-batch = 4\nglobal-batch = 4\nseq-length = 32\n[lr]\nmax = 0.01\n\
        [data]\nprefixes = [\"book_text_sentence\"]\ntokenizer = \"book_tokenizer.json\"\nsplit = \"3,1,0\"\n\
        [evaluation]\nevery = 10\nbatches = 1\n";
    let bert = "[model]\npreset = \"bert-base\"\nvocab-size = 120\nhidden-size = 32\nnum-hidden-layers = 2\n\
        num-attention-heads = 4\nintermediate-size = 64\nmax-position-embeddings = 32\n";
    fs::write(folder.path().join("bert.toml"), format!("{bert}{common}[output]\ndirectory = \"bert\"\n")).unwrap();
    folder
}

#[test]
fn a_text_becomes_a_bert() {
    let folder = folder();
    let at = folder.path();
    let sentences = IndexedDataset::open(at.join("book_text_sentence")).unwrap();
    assert_eq!((sentences.num_documents(), sentences.num_sequences()), (48, 192));
    succeed(at, "train bert.toml --device cpu");
    let [train, held_out] = losses(&at.join("bert"));
    assert!(train[19] < train[0] - 0.5 && held_out.len() == 2, "{train:?} {held_out:?}");
    succeed(at, "export --checkpoint bert/checkpoints --hf hf");
    // Its folder is where another run begins, and what `plan` and `import` are asked about.
    let said = succeed(at, "plan bert.toml --gpu h200");
    for words in ["model        bert, a plain Burn module", "parameters", "fits into"] {
        assert!(said.contains(words), "{said}");
    }
    let layout = "--training.micro-batch 2 --parallel.data-parallel 2 --parallel.zero 1 --training.dtype bf16";
    let said = succeed(at, &format!("plan bert.toml --lora.rank 4 {layout}"));
    assert!(said.contains("of them trained") && said.contains("DP2 ZeRO1 on 2 ranks"), "{said}");
    for (arguments, words) in [
        ("plan bert.toml --draw", "--draw has no meaning with bert, a plain Burn module"),
        ("plan bert.toml --training.dtype f64", "nearest legal: f32"),
        ("plan bert.toml --parallel.pipeline-parallel 2", "nearest legal: TP1"),
        ("import --hf hf --output checkpoint", "model.hf"),
        ("eval --hf hf --perplexity book.txt", "`model_type` bert is a plain Burn module here"),
        ("export --checkpoint bert/checkpoints --dcp dcp", "--hf DIR"),
        ("bench bert.toml", "model.preset = bert-base is a plain Burn module, which `train` and `plan` take"),
        ("train bert.toml --data.prefixes book_text_document", "book_text_document"),
    ] {
        let said = fail(at, arguments);
        assert!(said.contains(words), "{arguments}: {said}");
    }
}

#[test]
fn layouts_of_plain_modules_are_verified_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (model, layouts) in [
        ("bert", "TP2+SP+DP2+ZeRO1 PP2+x4+gpipe"),
        ("t5", "TP2 PP4+x4 DP2+ZeRO3"),
        ("vit", "TP4+SP TP2+PP2+DP2+ZeRO2+x4 DP2+ZeRO3"),
        ("llava", "TP2+SP+DP2+ZeRO3 PP2+VPP2+x4 TP2+PP4+x4"),
    ] {
        let all = layouts.split_whitespace();
        let flags =
            all.clone().map(|layout| vec!["--layout".to_string(), layout.replace('+', " ")]).collect::<Vec<_>>();
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        let output = command.args(["verify", "--model", model]).args(flags.concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let count = all.count();
        assert!(said.contains(&format!("{count} of {count} layouts equal one device within 1e-10")), "{said}");
    }
    for model in ["bert --lora dora", "vit --lora", "llava --lora rslora --kv-heads 2"] {
        let said = succeed(folder.path(), &format!("verify --model {model} --sample 4"));
        assert!(said.contains("4 of 4 layouts equal"), "{model}: {said}");
    }
    for (arguments, words) in [
        ("verify --model bert --dtype bf16", "--dtype has no meaning with --model bert"),
        ("verify --model t5 --layout CP2", "nearest legal"),
        ("verify --model t5 --heads 3", "--hidden 32 is no multiple of --heads 3; nearest legal: 33"),
        ("verify --model bert --layout DP2x4", "nearest legal"),
        ("verify --model vit --vocab 9", "--vocab has no meaning with --model vit"),
        ("verify --model vit --kv-heads 2", "--kv-heads has no meaning with --model vit"),
        ("verify --model llava --seq-length 5", "an image alone has 4 tokens; nearest legal: 6"),
        ("verify --model llava --kv-heads 3", "num_key_value_heads"),
        // Any device is taken: more GPUs than there are, or a program without them.
        ("verify --model t5 --device cuda --layout TP512", "--device cuda: "),
    ] {
        let said = fail(folder.path(), arguments);
        assert!(said.contains(words), "{arguments}: {said}");
    }
}
