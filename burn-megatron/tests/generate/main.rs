//! `generate` from the command line: what it writes is what the whole forward pass says, from a folder of Hugging
//! Face's and from a checkpoint, in every layout; and what it refuses.

mod module;
mod rules;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use backend_dist::launch::Rank;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron::checkpoint::{Kind, RunState, Saver, SaverOptions, Slice};
use burn_megatron::hf::HfFolder;
use models::{CausalLm, ModelConfig, ParamBuilder, WeightSource, WithModel};
use safetensors::Dtype;
use serde_json::json;

const PROMPT: [i64; 20] = [7, 201, 45, 45, 9, 130, 66, 250, 3, 18, 92, 77, 5, 140, 231, 60, 11, 9, 88, 173];
const NEW: usize = 10;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf").join(name)
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_burn-megatron")).arg("generate").args(arguments).output().unwrap()
}

/// Standard output of a run that succeeds.
fn written(arguments: &[&str]) -> String {
    let output = run(arguments);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?}: {errors}");
    assert!(errors.contains("tokens/s"), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn list(tokens: &[i64]) -> String {
    tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Continues a prompt by the likeliest token of the whole forward pass each time, up to a stop token.
struct Likeliest<'a> {
    prompt: &'a [i64],
    weights: &'a dyn WeightSource,
    stop: Vec<i64>,
}

impl WithModel for Likeliest<'_> {
    type Output = Vec<i64>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Vec<i64> {
        let rank = Rank::single(Device::flex());
        let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(self.weights);
        let model = M::build(config, params.with_fp32_norms().without_autodiff()).unwrap();
        let (mut tokens, first) = (self.prompt.to_vec(), self.prompt.len());
        while tokens.len() < first + NEW && !tokens[first..].iter().any(|token| self.stop.contains(token)) {
            let data = TensorData::new(tokens.clone(), [1, tokens.len()]);
            let logits = model.logits(Tensor::<2, Int>::from_data(data, (&rank.device, DType::I64)));
            let best = logits.narrow(1, tokens.len() - 1, 1).argmax(2).into_data();
            tokens.push(best.iter::<i64>().next().unwrap());
        }
        tokens.split_off(first)
    }
}

/// Mistral's window of 16 tokens is shorter than the prompt; with TP 4, gpt2 has 2 heads to a rank. Qwen3-Next,
/// Mamba-2, Nemotron-H and Nemotron 3 keep states, the first of two key heads.
#[test]
fn greedy_is_the_argmax_of_the_whole_forward_pass_in_every_family_and_layout() {
    for name in ["llama2", "llama3", "mistral", "qwen3", "qwen3_next", "mamba2", "nemotron_h", "nemotron3", "gpt2"] {
        let folder = HfFolder::open(golden(name)).unwrap();
        let stop = folder.generation().eos_token_id.iter().map(|id| i64::from(*id)).collect();
        let vocab = folder.config().vocab_size() as i64;
        let prompt = PROMPT.map(|token| token % vocab);
        let expected = folder.config().visit(Likeliest { prompt: &prompt, weights: &folder, stop });
        let (dir, prompt, new) = (golden(name), list(&prompt), NEW.to_string());
        let flags = ["--hf", dir.to_str().unwrap(), "--tokens", &prompt, "--max-new-tokens", &new, "--dtype", "f64"];
        for tp in ["1", "2", "4"].into_iter().filter(|tp| name != "qwen3_next" || *tp != "4") {
            let found = written(&[&flags[..], &["--tensor-parallel", tp]].concat());
            assert_eq!(found, format!("{}\n", list(&expected)), "{name}, TP {tp}");
        }
    }
}

/// A folder with the weights of `name` and a tokenizer whose tokens are the 256 bytes.
fn with_tokenizer(name: &str, generation: &serde_json::Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden(name).join(file), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
    let (text, prefix) = (folder.path().join("text.txt"), folder.path().join("text"));
    std::fs::write(&text, "nothing").unwrap();
    let make = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args(["preprocess", "--tokenizer", "byte", "--input"])
        .arg(&text)
        .arg("--output-prefix")
        .arg(&prefix)
        .output()
        .unwrap();
    assert!(make.status.success(), "{}", String::from_utf8_lossy(&make.stderr));
    std::fs::rename(folder.path().join("text_tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    folder
}

#[test]
fn text_follows_the_prompt_and_draws_follow_the_seed() {
    let folder = with_tokenizer("llama3", &json!({"do_sample": true, "temperature": 0.7, "top_k": 20}));
    let dir = folder.path().to_str().unwrap();
    let flags = ["--hf", dir, "--prompt", "Schöne ", "--max-new-tokens", "24", "--dtype", "f64", "--seed"];
    let seed = |seed: &'static str| [&flags[..], &[seed]].concat();
    let first = written(&seed("3"));
    assert!(first.starts_with("Schöne ") && first.ends_with('\n') && first.len() > "Schöne \n".len(), "{first:?}");
    assert_eq!(written(&seed("3")), first);
    assert_eq!(written(&[&seed("3")[..], &["--tensor-parallel", "2"]].concat()), first);
    assert_ne!(written(&seed("4")), first);
    let greedy = written(&[&seed("3")[..], &["--greedy"]].concat());
    assert_ne!(greedy, first);
    assert_eq!(written(&[&seed("4")[..], &["--top-k", "1"]].concat()), greedy);

    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "Schöne ").unwrap();
    let from_file = ["--hf", dir, "--prompt-file", file.to_str().unwrap(), "--max-new-tokens", "24", "--dtype", "f64"];
    assert_eq!(written(&[&from_file[..], &["--seed", "3"]].concat()), first);
}

/// The tokens of the greedy text, and the same with its third token to stop at, from the folder's own list or a flag.
#[test]
fn stop_tokens_come_from_the_folder_or_a_flag() {
    let prompt = list(&PROMPT);
    let greedy = |folder: &tempfile::TempDir, more: &[&str]| -> Vec<i64> {
        let flags = ["--hf", folder.path().to_str().unwrap(), "--tokens", &prompt, "--max-new-tokens", "8", "--greedy"];
        let text = written(&[&flags[..], more].concat());
        text.trim_end().split(',').map(|id| id.parse().unwrap()).collect()
    };
    let all = greedy(&with_tokenizer("llama3", &json!({})), &[]);
    assert_eq!(all.len(), 8);
    let end = all.iter().position(|token| *token == all[2]).unwrap();
    let folder = with_tokenizer("llama3", &json!({"eos_token_id": [300, all[2]]}));
    assert_eq!(greedy(&folder, &[]), all[..=end]);
    assert_eq!(greedy(&folder, &["--stop-token", "300"]), all);
    assert_eq!(greedy(&folder, &["--stop-token", "300", "--stop-token", &all[0].to_string()]), all[..1]);
}

/// One writer, the whole of every tensor in f64.
fn save(folder: &HfFolder, root: &Path, tokenizer: Option<PathBuf>) {
    let options = SaverOptions { tokenizer, ..SaverOptions::default() };
    let saver = Saver::new(root, 1, options).unwrap();
    let names = folder.config().hf_names();
    let slices = names.iter().map(|(name, foreign)| {
        let shape = foreign.our_shape();
        let ranges: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        let values = folder.read(name, &shape, &ranges).unwrap();
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Slice {
            kind: Kind::Weight,
            name: name.into(),
            global_shape: shape,
            ranges,
            dtype: Dtype::F64,
            data: data.into(),
        }
    });
    let model = serde_json::to_value(folder.config()).unwrap();
    let state = RunState { step: 5, world_size: 1, model, ..RunState::default() };
    saver.submit(0, slices.collect(), &state).unwrap();
    saver.wait().unwrap();
}

#[test]
fn a_checkpoint_writes_what_its_folder_writes_unless_it_is_damaged() {
    let folder = with_tokenizer("gpt2", &json!({}));
    let hf = HfFolder::open(folder.path()).unwrap();
    let root = folder.path().join("checkpoints");
    save(&hf, &root, hf.tokenizer_path());
    let flags = ["--prompt", "One two", "--max-new-tokens", "12", "--temperature", "1.5", "--dtype", "f64"];
    let expected = written(&[&["--hf", folder.path().to_str().unwrap()], &flags[..]].concat());
    for tp in ["1", "4"] {
        let from = ["--checkpoint", root.to_str().unwrap(), "--tensor-parallel", tp];
        assert_eq!(written(&[&from[..], &flags[..]].concat()), expected, "TP {tp}");
    }

    // A tokenizer that was forgotten is put there.
    let bare = folder.path().join("bare");
    save(&hf, &bare, None);
    let from = ["--checkpoint", bare.to_str().unwrap()];
    let lacking = refused(&[&from[..], &flags[..]].concat());
    assert!(lacking.contains("--tokens 1,2,3, or copy its tokenizer.json into the folder"), "{lacking}");
    let exported = |name: &str| {
        let to = folder.path().join(name);
        let mut export = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        let output = export.arg("export").args(from).arg("--hf").arg(&to).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stderr).unwrap(), to.join("tokenizer.json").is_file())
    };
    let (said, has_one) = exported("without");
    assert!(said.contains("note: the checkpoint is without a tokenizer") && !has_one, "{said}");
    std::fs::copy(folder.path().join("tokenizer.json"), bare.join("step_00000005/tokenizer.json")).unwrap();
    assert_eq!(written(&[&from[..], &flags[..]].concat()), expected);
    assert_eq!(exported("with"), (String::new(), true));

    let file = root.join("step_00000005/rank_00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let message = refused(&[&["--checkpoint", root.to_str().unwrap()], &flags[..]].concat());
    assert!(message.contains("rank_00000.safetensors: has changed since it was written"), "{message}");
}

#[test]
fn what_cannot_work_is_refused_with_what_would() {
    let (llama, gpt) = (golden("llama3"), golden("gpt2"));
    let (llama, gpt) = (["--hf", llama.to_str().unwrap()], ["--hf", gpt.to_str().unwrap()]);
    let tokens = ["--tokens", "1,2,3"];
    for (model, more, words) in [
        (llama, &["--prompt", "Hello"][..], "--tokens 1,2,3"),
        (llama, &["--tokens", "1,256"], "the prompt has token 256, the model knows 0..256"),
        (llama, &["--tokens", "1", "--tensor-parallel", "3"], "nearest legal: 2, 4"),
        (llama, &["--tokens", "1", "--top-p", "1.5"], "top-p 1.5 is not above 0 and at most 1"),
        (llama, &["--tokens", "1", "--temperature=-1"], "temperature -1 is not 0"),
        (llama, &["--tokens", "1", "--min-p", "2"], "min-p 2 is not 0 to 1"),
        (llama, &["--tokens", "1", "--repetition-penalty", "0"], "repetition-penalty 0 is not 0.01 to 100"),
        (llama, &["--tokens", "1", "--stop-token", "<end>"], "--stop-token <end>"),
        (llama, &["--prompt-file", "no/such/file"], "no/such/file"),
        (gpt, &["--tokens", "1", "--max-new-tokens", "129"], "at most 128 new tokens"),
        (gpt, &["--tokens", "1", "--max-new-tokens", "18446744073709551615"], "at most 128 new tokens"),
        (llama, &["--tokens", "1", "--max-new-tokens", "18446744073709551615"], "or a window of at most"),
        (
            llama,
            &["--tokens", "1", "--max-new-tokens", "9999999999999"],
            "keys and values of 9999999999999 positions take",
        ),
        (gpt, &["--tokens", "1", "--window", "129"], "nearest legal: 128"),
        (["--hf", "no/such/folder"], &tokens, "no/such/folder"),
        (["--checkpoint", "no/such/folder"], &tokens, "no/such/folder"),
    ] {
        let message = refused(&[&model[..], more].concat());
        assert!(message.contains(words), "{more:?}: {message}");
    }
    // Without the flag a text ends where the positions do; with a window it continues.
    let most = written(&[&gpt[..], &["--tokens", "1,2", "--stop-token", "999"]].concat());
    assert_eq!(most.split(',').count(), 127);
    let window = ["--tokens", "1,2", "--stop-token", "999", "--max-new-tokens", "200", "--window", "64"];
    assert_eq!(written(&[&gpt[..], &window].concat()).split(',').count(), 200);
}
