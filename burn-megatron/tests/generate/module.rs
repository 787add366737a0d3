//! `generate` with plain Burn modules: T5 answers, LLaVA continues what it reads and sees.

use std::path::Path;
use std::process::{Command, Output};

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron::data::images::{ImageProcessor, RgbImage};
use burn_megatron::element::Element;
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::images::Llava;
use models::{T5, T5Config};
use serde_json::{Value, json};

use crate::{PROMPT, golden, list};

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(["generate", "--hf"]).arg(folder).args(arguments).output().unwrap()
}

/// Standard output of a run that succeeds.
fn written(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A T5 of random weights whose answers are not always the same token.
fn lively(folder: &Path) {
    let config = T5Config { vocab_size: 64, d_model: 16, d_kv: 8, d_ff: 24, num_layers: 2, ..T5Config::small() };
    let config = T5Config { num_decoder_layers: 2, num_heads: 2, dropout_rate: 0.1, ..config };
    let config = T5Config { tie_word_embeddings: false, scale_decoder_outputs: false, ..config };
    let device = Device::flex();
    device.seed(5);
    let what = ModuleExport { element: Element::F64, ..ModuleExport::default() };
    what.write(folder, &T5::new(&config, &device), &config).unwrap();
}

/// transformers 5.24 writes the same for the golden folder, `T5ForConditionalGeneration.generate(input_ids, max_new_tokens=10,
/// do_sample=False)` in fp64: the start token again and again.
#[test]
fn t5_answers_as_transformers() {
    let flags = ["--tokens", &list(&PROMPT), "--max-new-tokens", "10", "--dtype", "f64"];
    assert_eq!(written(&golden("t5"), &flags), format!("{}\n", list(&[0; 10])));
}

#[test]
fn t5_answers_as_the_library_in_every_layout_and_draws_follow_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("t5");
    lively(&folder);
    let opened = ModuleFolder::open(&folder).unwrap();
    let config = T5Config { dropout_rate: 0.0, ..opened.config::<T5>().unwrap() };
    let model: T5 = opened.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let prompt = PROMPT.map(|token| token % 64);
    let ids = Tensor::<2, Int>::from_data(TensorData::new(prompt.to_vec(), [1, 20]), &Device::flex());
    let expected = model.generate(ids, None, 12, config.eos_token_id).remove(0);
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]), "{expected:?} would not tell a wrong cache");
    let flags = ["--tokens", &list(&prompt), "--max-new-tokens", "12", "--dtype", "f64"];
    let drawn = |more: &[&str]| written(&folder, &[&flags[..], &["--temperature", "2", "--seed"], more].concat());
    for tp in ["1", "2"] {
        let found = written(&folder, &[&flags[..], &["--tensor-parallel", tp]].concat());
        assert_eq!(found, format!("{}\n", list(&expected)), "TP {tp}");
    }
    assert_eq!(drawn(&["3"]), drawn(&["3", "--tensor-parallel", "2"]));
    assert_ne!(drawn(&["3"]), drawn(&["4"]));
    // It ends with the token that it is told to stop at.
    let stop = expected[2].to_string();
    let end = expected.iter().position(|token| *token == expected[2]).unwrap();
    let found = written(&folder, &[&flags[..], &["--stop-token", &stop]].concat());
    assert_eq!(found, format!("{}\n", list(&expected[..=end])));
}

/// Words `w0` to `w158` and `<image>`, in the folder of the golden LLaVA with a processor.
fn seeing(folder: &Path, images: &Path) -> Value {
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("llava").join(file), folder.join(file)).unwrap();
    }
    let processor = json!({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16}});
    std::fs::write(folder.join("preprocessor_config.json"), processor.to_string()).unwrap();
    let mut vocab: serde_json::Map<String, Value> = (0..159).map(|id| (format!("w{id}"), id.into())).collect();
    vocab.insert("<image>".into(), 159.into());
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 159, "content": "<image>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::copy(golden("../../../burn-megatron/host/tests/golden/images/small.png"), images).unwrap();
    processor
}

#[test]
fn llava_continues_text_and_image_as_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("cat.png");
    let processor = ImageProcessor::from_json(&seeing(folder.path(), &image)).unwrap();
    let pixels = processor.process(&RgbImage::decode(&std::fs::read(&image).unwrap()).unwrap());
    let pixels: Vec<f64> = pixels.into_iter().map(f64::from).collect();
    let opened = ModuleFolder::open(folder.path()).unwrap();
    let device = Device::flex();
    let model: Llava = opened.read(&opened.config::<Llava>().unwrap(), FloatDType::F64, &device).unwrap();
    let pixels = Tensor::<4>::from_data(TensorData::new(pixels, [1, 3, 16, 16]), (&device, burn::tensor::DType::F64));
    let tokens: Vec<i64> = [&[5][..], &[159; 4], &[7, 8]].concat();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(tokens.clone(), [1, 7]), &device);
    let expected: Vec<i64> = model.generate(ids, pixels, 6, 160).into_iter().map(|token| token as i64).collect();
    let image = image.to_str().unwrap();
    let flags = ["--image", image, "--max-new-tokens", "6", "--dtype", "f64", "--stop-token", "160"];
    for tp in ["1", "2"] {
        let flags = [&flags[..], &["--tensor-parallel", tp]].concat();
        let ids = written(folder.path(), &[&flags[..], &["--tokens", &list(&tokens)]].concat());
        assert_eq!(ids, format!("{}\n", list(&expected)), "TP {tp}");
        let text = written(folder.path(), &[&flags[..], &["--prompt", "w5 <image> w7 w8"]].concat());
        let words: Vec<String> = expected.iter().map(|token| format!("w{token}")).collect();
        assert_eq!(text.replace("<image> ", ""), format!("w5 w7 w8 {}\n", words.join(" ")), "TP {tp}");
    }
}

#[test]
fn what_a_module_cannot_write_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("cat.png");
    seeing(folder.path(), &image);
    let (llava, image) = (folder.path().to_path_buf(), image.to_str().unwrap());
    for (model, arguments, words) in [
        (golden("bert"), &["--tokens", "1"][..], "`model_type` bert writes no text; legal: llava, t5"),
        (golden("t5"), &["--tokens", "1,256"], "the prompt has token 256, the model knows 0..256"),
        (golden("t5"), &["--tokens", "1", "--image", image], "the model reads no images"),
        (golden("llama3"), &["--tokens", "1", "--image", image], "the model reads no images"),
        (golden("t5"), &["--tokens", "1", "--window", "8"], "--window 8 is for causal language models"),
        (golden("t5"), &["--prompt", "hello"], "--tokens 1,2,3"),
        (golden("t5"), &["--tokens", "1", "--tensor-parallel", "3"], "3"),
        (llava.clone(), &["--prompt", "w1", "--image", image], "the prompt has 0 <image>, and there are 1 images"),
        (llava.clone(), &["--tokens", "1,159", "--image", image], "the prompt has 1 image tokens (159); legal: 4"),
        (llava, &["--tokens", "1,159"], "the prompt has 1 image tokens (159); legal: 0"),
    ] {
        let output = run(&model, arguments);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
}
