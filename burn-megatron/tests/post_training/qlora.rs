//! Adapters next to frozen weights in few bits.

use std::fs;
use std::path::Path;

use burn_megatron::config::RunConfig;
use burn_megatron::train::Plan;
use burn_megatron::verify::{LoraKind, Settings};
use models::layers::BalanceOver;
use models::lora::BaseFormat;
use models::{Llama, LlamaConfig, Mixtral, MixtralConfig};

use super::{VERIFIED, assert_verified, fail, last_loss, parse};

/// Blocks of 64 and of 128 elements divide what two and four ranks have of it.
fn llama() -> LlamaConfig {
    models::sized! { LlamaConfig::tiny();
        vocab_size: 96, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 4, head_dim: 128
    }
}

fn settings(base: BaseFormat, lora: LoraKind) -> Settings {
    Settings { steps: 2, global_batch: 4, seq: 8, seed: 77, lora: Some(lora), base: Some(base), ..VERIFIED }
}

#[test]
fn every_layout_trains_adapters_of_weights_in_few_bits_as_one_device() {
    let layouts = "TP2 SP, TP4, PP2 DP2 x2 uniform1, CP2 DP2 ZeRO3, TP2 DP2 ZeRO2 selective";
    for (base, lora) in
        [(BaseFormat::Nf4, LoraKind::Lora), (BaseFormat::Fp8Block, LoraKind::Lora), (BaseFormat::Nf4, LoraKind::Dora)]
    {
        // 512 columns are 4 blocks of 128: no more than 4 ranks.
        assert_verified::<Llama>(&llama(), &settings(base, lora), layouts);
    }
}

/// Of experts too: blocks of 64 and of 128 elements divide what two ranks have of one.
#[test]
fn every_layout_trains_adapters_of_experts_in_few_bits_as_one_device() {
    let mixtral = models::sized! { MixtralConfig::tiny();
        hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4,
        head_dim: 64, router_balance: BalanceOver::Sequence
    };
    let layouts = "DP2 EP2 ZeRO2, DP2 ETP2, TP2 SP DP2 EP2 ETP1, DP2 EP2 ZeRO3 x2, PP2 DP2 EP2 x2 uniform1";
    for (base, lora) in [(BaseFormat::Nf4, LoraKind::Dora), (BaseFormat::Fp8Block, LoraKind::Lora)] {
        let settings = settings(base, lora);
        assert_verified::<Mixtral>(&mixtral, &settings, layouts);
    }
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    fs::write(folder.join("book.txt"), "The quick brown fox jumps over the lazy dog.\n\n".repeat(60)).unwrap();
    let text = format!(
        "[model]\nfamily = \"llama\"\nvocab-size = 64\nhidden-size = 64\nintermediate-size = 128\nnum-hidden-layers = 2\n\
         num-attention-heads = 4\nnum-key-value-heads = 2\nhead-dim = 32\ninitializer-range = 0.1\n\
         [training]\nsteps = 10\nglobal-batch = 4\nseq-length = 16\n[lr]\nmax = 3e-2\n[lora]\nrank = 4\n\
         [data]\ntext = [{:?}]\ntokenizer = \"char\"\n[evaluation]\nbatches = 1\n[output]\ndirectory = {:?}\n",
        folder.join("book.txt"),
        folder.join(name)
    );
    parse(&text, overrides)
}

#[test]
fn a_run_learns_resumes_and_exports_as_with_whole_weights() {
    let folder = tempfile::tempdir().unwrap();
    let loss = |name: &str, overrides: &[(&str, &str)]| last_loss(&config(folder.path(), name, overrides));
    let still = [("training.steps", "1"), ("lr.max", "1e-12"), ("data.samples", "40")];
    let nf4 = ("lora.base", "nf4");
    let [whole, few] = [loss("whole", &still), loss("few", &[&still[..], &[nf4]].concat())];
    assert!((few - whole).abs() > 1e-6 && (few - whole).abs() < 0.1 * whole, "rounded, and not much: {few} {whole}");
    let learned = loss("run", &[nf4]);
    assert!(learned < 0.9 * few, "{learned} {few}");
    // Stopped after half of the steps and resumed in another layout.
    let half = [nf4, ("lr.decay", "10 steps"), ("data.samples", "40")];
    loss("half", &[&half[..], &[("training.steps", "5")]].concat());
    let resumed = loss("half", &[&half[..], &[("parallel.tp", "2"), ("parallel.dp", "2")]].concat());
    assert!((resumed - learned).abs() < 1e-4 * learned, "{resumed} {learned}");
    super::succeed(folder.path(), "export --checkpoint run/checkpoints --adapter adapter");
}

#[test]
fn weights_that_are_not_whole_blocks_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let refused =
        |overrides: &[(&str, &str)]| Plan::new(&config(folder.path(), "run", overrides), &[]).unwrap_err().to_string();
    for (overrides, words) in [
        (vec![("lora.base", "nf4"), ("parallel.tp", "4")], "lora.base: `layers.0.attention.o_proj`"),
        (vec![("lora.base", "nf4"), ("model.hidden-size", "96")], "its 96 inputs are not a multiple of 64"),
        (vec![("lora.base", "fp8-block"), ("parallel.tp", "2")], "nearest legal: 1"),
        (vec![("lora.base", "nf4"), ("fp8.format", "e4m3")], "nearest legal: fp8.format = none"),
    ] {
        says!(refused(&overrides), words);
    }
    says!(fail(folder.path(), "verify --lora --lora-base nf4 --layout TP2 --hidden 96"), "its 96 inputs");
}
