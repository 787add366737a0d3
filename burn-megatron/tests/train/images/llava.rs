//! LLaVA.

use super::*;
use crate::command::succeed;

/// A small LLaVA of transformers with a tokenizer of words, whose image token is `<image>`.
fn model(folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/llava");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), folder.join(name)).unwrap();
    }
    let words =
        ["USER:", "ASSISTANT:", "What", "is", "this", "?", "a", "wave", "small", "wide", "grey", "flat", "drawn"];
    let special = ["<unk>", "<s>", "</s>"].into_iter().map(String::from);
    let names = special.chain(words.map(String::from)).chain((0..).map(|word| format!("word{word}"))).take(159);
    let mut vocab: serde_json::Map<String, Value> = names.zip(0..).map(|(name, id)| (name, id.into())).collect();
    vocab.insert("<image>".into(), 159.into());
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "TemplateProcessing", "single": [begin, sequence("A")],
            "pair": [begin, sequence("A"), sequence("B")],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "added_tokens": [added(1, "<s>"), added(2, "</s>"), added(159, "<image>")],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}});
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"});
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    // As that of llava-hf/llava-1.5-7b-hf.
    let template = "{% for message in messages %}{{ message['role'].upper() + ': ' }}\
        {% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image> ' }}{% endfor %}\
        {% for part in message['content'] | selectattr('type', 'equalto', 'text') %}\
        {% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}\
        {% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}";
    fs::write(folder.join("chat_template.jinja"), template).unwrap();
}

const SAID: [&str; 4] = ["a small wave", "a wide wave", "a grey wave", "a drawn wave"];

fn run_of(said: impl Fn(usize) -> Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("model");
    fs::create_dir(&hf).unwrap();
    model(&hf);
    list(&folder.path().join("train.jsonl"), 4, said);
    write_run(folder.path(), &format!("hf = \"{}\"\n", hf.display()), "");
    let file = folder.path().join("run.toml");
    let text = fs::read_to_string(&file).unwrap().replace("[lr]", "seq-length = 20\n[lr]");
    fs::write(file, text).unwrap();
    folder
}

fn caption(number: usize) -> Value {
    json!({"text": SAID[CLASSES[number]]})
}

fn conversation(number: usize) -> Value {
    json!({"messages": [{"role": "user", "content": "What is this ?"}, {"role": "assistant", "content": SAID[CLASSES[number]]}]})
}

/// As transformers' processors take it.
fn parts(number: usize) -> Value {
    let text = |text: &str| json!({"type": "text", "text": text});
    json!({"messages": [
        {"role": "user", "content": [{"type": "image"}, text("What is this ?")]},
        {"role": "assistant", "content": [text(SAID[CLASSES[number]])]},
    ]})
}

#[test]
fn llava_learns_the_same_in_every_layout() {
    let folder = run_of(conversation);
    let layouts: [&[&str]; 3] =
        [&[TP, "2", SP, "true", DP, "2", ZERO, "1"], &[PP, "2", DP, "2", ZERO, "2"], &[DP, "4", ZERO, "3"]];
    let [losses, held_out] = layouts_agree(folder.path(), &[], &layouts);
    assert_eq!((losses.len(), held_out.len()), (6, 3));
    assert!(losses[5] < losses[0] - 1.0, "{losses:?}");
}

/// The tower as in LLaVA's own training, also on a stage of its own.
#[test]
fn a_frozen_tower_stays_as_it_is_in_every_layout() {
    let folder = run_of(caption);
    let frozen: &[&str] = &["--param-groups.frozen", "vision_tower.*"];
    let layouts: [&[&str]; 3] = [&[PP, "3"], &[TP, "2", DP, "2", ZERO, "2"], &[DP, "2", ZERO, "3"]];
    layouts_agree(folder.path(), frozen, &layouts);
    let weights = export(&folder.path().join("run"), &folder.path().join("hf"));
    let bytes = fs::read(folder.path().join("model/model.safetensors")).unwrap();
    let before = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut towers = 0;
    for (name, tensor) in before.iter() {
        let ours =
            weights.iter().find(|(ours, _)| ours.trim_start_matches("model.") == name.trim_start_matches("model."));
        let Some((_, found)) = ours else { continue };
        let values = tensor.data().as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
        let same = found.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).eq(values);
        assert_eq!(same, name.contains("vision_tower"), "{name}");
        towers += usize::from(same);
    }
    assert!(towers > 20, "{towers}");
}

#[test]
fn llava_resumes_bit_for_bit() {
    resumes(run_of(conversation).path(), &[TP, "2", DP, "2", ZERO, "1"]);
}

/// A conversation says the same in texts, in parts, and with the image in a text.
#[test]
fn conversations_have_their_image_in_every_form() {
    let in_text = |number: usize| {
        let mut said = conversation(number);
        said["messages"][0]["content"] = "<image>\nWhat is this ?".into();
        said
    };
    let losses = |folder: tempfile::TempDir| {
        trained(folder.path(), &["--training.steps", "2", "--checkpoint.directory", "none"]);
        logged(&folder.path().join("run"), "loss")
    };
    let plain = losses(run_of(conversation));
    assert_eq!(losses(run_of(parts)), plain);
    assert_eq!(losses(run_of(in_text)), plain);
}

/// Trained on captions, it writes them.
#[test]
fn real_images_are_described_by_the_exported_model() {
    let folder = run_of(caption);
    let (run, hf) = (folder.path().join("run"), folder.path().join("hf"));
    let flags = ["--training.steps", "60", "--evaluation.every", "30", "--training.dtype", "f32", "--lr.max", "0.005"];
    trained(folder.path(), &flags);
    let [_, accuracy] = logged(&run, "accuracy");
    assert!(accuracy.last().is_some_and(|share| *share > 0.95), "{accuracy:?}");
    export(&run, &hf);
    for (name, said) in PICTURES.iter().zip(CLASSES.map(|class| SAID[class])) {
        let image = picture(name).display().to_string();
        let flags = "--device cpu --dtype f32 --greedy --max-new-tokens 8 --prompt <image>";
        let text = succeed(folder.path(), &format!("generate --hf hf {flags} --image {image}"));
        assert!(text.contains(said), "{name}: {text}");
    }
}

/// Of the projections that peft's name means, in the tower and in the decoder, also in mixed precision.
#[test]
fn adapters_of_a_llava_are_trained_and_exported() {
    let folder = run_of(conversation);
    let adapters = ["--lora.rank", "2", "--lora.target-modules", "[\"q_proj\"]", "--training.dtype", "bf16"];
    trained(folder.path(), &[&adapters[..], &[TP, "2", DP, "2"]].concat());
    let [losses, _] = logged(&folder.path().join("run"), "loss");
    assert!(losses[5] < losses[0], "{losses:?}");
    succeed(folder.path(), "export --checkpoint run/checkpoints --adapter adapter");
    let bytes = fs::read(folder.path().join("adapter/adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let [towers, decoders] = ["vision_tower", "language_model"]
        .map(|part| file.names().iter().filter(|name| name.contains(part) && name.contains("q_proj")).count());
    // Two blocks and four, an A and a B each.
    assert_eq!((towers, decoders, file.len()), (4, 8, 12));
}

#[test]
fn texts_that_cannot_be_used_are_named() {
    let folder = run_of(caption);
    let list = folder.path().join("train.jsonl");
    let good = fs::read_to_string(&list).unwrap();
    for (said, words) in [
        (json!({"label": 1}), "has a `label`; legal: `text` or `messages`"),
        (json!({"text": "a wave <image>"}), "has 2 <image>; legal: 1"),
        (json!({"text": "a wave ".repeat(10)}), "has 26 tokens with its image; legal: up to 20 (training.seq-length)"),
        (json!({"messages": [{"role": "user", "content": "What"}]}), "none has the role `assistant`"),
        (json!({"messages": [{"role": "assistant", "content": "a wave"}]}), "has 0 <image>; legal: 1"),
    ] {
        let mut line = said.clone();
        line["image"] = "small.png".into();
        fs::write(&list, format!("{good}{line}\n")).unwrap();
        let message = refused(folder.path(), &[]);
        let place = "1 of 25 samples cannot be used; the first: ";
        assert!(message.contains(words) && message.contains(place), "{said}: {message}");
        assert!(message.contains("train.jsonl:25: image small.png: "), "{message}");
    }
    let said = trained(folder.path(), &["--images.skip-bad-rows", "true", "--training.steps", "2"]);
    assert!(said.contains("1 bad rows left out"), "{said}");
    fs::remove_dir_all(folder.path().join("run")).unwrap();
    fs::write(&list, good).unwrap();
    for (flags, words) in [
        (&["--training.seq-length", "4"][..], "training.seq-length = 4: an image alone has 4 tokens; nearest legal: 5"),
        (
            &["--training.seq-length", "129"],
            "training.seq-length = 129: the model has 128 positions; nearest legal: 128",
        ),
        (&["--data.tokenizer", "bpe"], "data.tokenizer = bpe: llava needs the file of the tokenizer of the model"),
        (&["--data.tokenizer", "none"], "data.tokenizer = none: llava needs"),
        (&["--data.tokenizer", "gone.json"], "gone.json"),
        (&["--images.template", "gone.jinja"], "gone.jinja"),
        (&["--model.image-token-index", "200"], "image_token_index"),
        (&["--model.text-config", "{ num-hidden-layer = 2 }"], "num_hidden_layer"),
        (&["--masked.mask-prob", "0.2"], "masked.mask-prob = 0.2 has no meaning with llava"),
    ] {
        let message = refused(folder.path(), flags);
        assert!(message.contains(words), "{flags:?}: {message}");
    }
}
