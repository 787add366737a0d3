//! `config.json` of published models, as in `tests/golden/published`: read, with the published number of parameters, or
//! refused as its table says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use models::encoders::{Bert, T5};
use models::hf::{HfError, HfModule, parse_config};
use models::images::Llava;
use models::{FamilyConfig, ModelConfig};
use serde_json::Value;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/published");
const GUIDE: &str = include_str!("../../../docs/guide/hugging-face.md");

/// Presets and the models that they are.
const FILES: [(&str, &str); 56] = [
    ("gpt2", "openai-community/gpt2"),
    ("gpt2-medium", "openai-community/gpt2-medium"),
    ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
    ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
    ("llama3-1b", "meta-llama/Llama-3.2-1B-Instruct"),
    ("llama3-3b", "meta-llama/Llama-3.2-3B"),
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
    ("phi3-mini", "microsoft/Phi-3-mini-4k-instruct"),
    ("gpt-oss-20b", "openai/gpt-oss-20b"),
    ("gpt-oss-120b", "openai/gpt-oss-120b"),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    ("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("smollm3-3b", "HuggingFaceTB/SmolLM3-3B-Base"),
    ("olmo2-7b", "allenai/OLMo-2-1124-7B"),
    ("deepseek-v3", "deepseek-ai/DeepSeek-R1"),
    ("nemotron-nano-9b-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    ("nemotron-nano-12b-v2", "nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base"),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B"),
    ("qwen2.5-3b", "Qwen/Qwen2.5-3B"),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B"),
    ("qwen2.5-32b", "Qwen/Qwen2.5-32B"),
    ("qwen3-1.7b", "Qwen/Qwen3-1.7B"),
    ("qwen3-8b", "Qwen/Qwen3-8B"),
    ("qwen3-14b", "Qwen/Qwen3-14B"),
    ("qwen3-32b", "Qwen/Qwen3-32B"),
    ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"),
    ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
    ("llama3.1-70b", "meta-llama/Llama-3.1-70B-Instruct"),
    ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    ("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ("kimi-k2", "moonshotai/Kimi-K2-Instruct"),
    ("gemma2-2b", "google/gemma-2-2b-it"),
    ("gemma2-9b", "google/gemma-2-9b"),
    ("gemma2-27b", "google/gemma-2-27b-it"),
    ("gemma3-1b", "google/gemma-3-1b-it"),
    ("gemma3-4b", "google/gemma-3-4b-it"),
    ("gemma3-12b", "google/gemma-3-12b-it"),
    ("gemma3-27b", "google/gemma-3-27b-it"),
    ("phi4", "microsoft/phi-4"),
    ("phi4-mini", "microsoft/Phi-4-mini-instruct"),
    ("glm4-32b", "zai-org/GLM-4-32B-0414"),
    ("gemma-2b", "google/gemma-2b"),
    ("gemma-7b", "google/gemma-7b"),
    ("olmo3-7b", "allenai/Olmo-3-1025-7B"),
    ("olmo3-32b", "allenai/Olmo-3-1125-32B"),
    ("olmoe-1b-7b", "allenai/OLMoE-1B-7B-0924"),
    ("granite3-8b", "ibm-granite/granite-3.3-8b-instruct"),
    ("seed-oss-36b", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    ("ernie4.5-0.3b", "baidu/ERNIE-4.5-0.3B-PT"),
    ("deepseek-moe-16b", "deepseek-ai/deepseek-moe-16b-base"),
    ("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite"),
    ("deepseek-v2", "deepseek-ai/DeepSeek-V2"),
];

/// Parameters of the published weights of presets that have no file here, or an early or a wider one. Those of DeepSeek-V3 are
/// its main model's and a module of multi-token prediction's, without the copies of embedding and output layer of its files.
const SIZES: [(&str, usize); 24] = [
    ("gpt2-large", 774_030_080),
    ("gpt2-xl", 1_557_611_200),
    ("smollm2-360m", 361_821_120),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("qwen1.5-moe-a2.7b", 14_315_784_192),
    ("qwen2.5-72b", 72_706_203_648),
    ("llama3.1-405b", 405_853_388_800),
    ("mistral-7b", 7_241_732_096),
    ("mistral-nemo-12b", 12_247_782_400),
    ("mistral-small-24b", 23_572_403_200),
    ("qwen3-4b", 4_022_468_096),
    ("olmo2-1b", 1_484_916_736),
    ("olmo2-13b", 13_716_198_400),
    ("olmo2-32b", 32_234_279_936),
    ("gemma3-270m", 268_098_176),
    ("phi3-medium", 13_960_238_080),
    ("glm4-9b", 9_400_279_040),
    ("mixtral-8x22b", 140_620_634_112),
    ("glm-4.5-air", 106_852_251_264),
    ("glm-4.5", 352_797_829_024),
    ("deepseek-v3", 682_636_487_424),
    ("moonlight-16b", 15_960_110_208),
];

/// Model and result of each row.
fn table() -> Vec<[String; 2]> {
    let readme = fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_string()).collect::<Vec<_>>();
    let row = |cells: Vec<String>| match &cells[..] {
        [_, model, _, result, _] if model.contains('/') => Some([model.clone(), result.clone()]),
        _ => None,
    };
    readme.lines().filter(|line| line.starts_with('|')).map(cells).filter_map(row).collect()
}

pub fn file(model: &str) -> Value {
    let bytes = fs::read(Path::new(FOLDER).join(model.replace('/', "--")).join("config.json")).unwrap();
    parse_config(&bytes).unwrap()
}

/// A plain Burn module, or why not.
fn module(config: &Value) -> Result<String, HfError> {
    match config["model_type"].as_str() {
        Some("bert") => Bert::from_hf(config).map(drop),
        Some("t5") => T5::from_hf(config).map(drop),
        Some("llava") => Llava::from_hf(config).map(drop),
        other => panic!("{other:?} is no module"),
    }?;
    Ok("Burn module".into())
}

/// What the table would say of a file.
fn result(config: &Value) -> Result<String, HfError> {
    let read = match FamilyConfig::from_hf(config) {
        Err(HfError::Module { .. }) => return module(config),
        other => other?,
    };
    // Without modules of multi-token prediction, which some published counts include.
    let model = read.clone().hf_present(|_| false);
    assert_eq!(FamilyConfig::from_hf(&read.to_hf().unwrap()).unwrap(), read, "written and read again");
    let digits = model.parameter_count().to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    Ok(groups.join(","))
}

#[test]
fn published_files_are_read_or_refused_by_name() {
    let table = table();
    assert!(table.len() >= 30, "{} models", table.len());
    let mut wrong = Vec::new();
    for [model, expected] in &table {
        let found = result(&file(model));
        let right = match (&found, expected.strip_prefix("refused: ")) {
            (Ok(found), None) => found == expected,
            (Err(error), Some(reason)) => error.to_string().contains(reason),
            _ => false,
        };
        if !right {
            wrong.push(format!("{model}: {} instead of {expected}", found.unwrap_or_else(|error| error.to_string())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Presets are the published models, apart from a vocabulary that may be padded.
#[test]
fn presets_are_the_published_files() {
    let presets: BTreeMap<_, _> = FamilyConfig::presets().into_iter().collect();
    let mut wrong = Vec::new();
    for (name, model) in FILES {
        let mut unpadded = presets[name].clone();
        match &mut unpadded {
            FamilyConfig::Llama(preset) => preset.make_vocab_size_divisible_by = 1,
            FamilyConfig::Mixtral(preset) => preset.make_vocab_size_divisible_by = 1,
            FamilyConfig::DeepSeekV3(preset) => preset.make_vocab_size_divisible_by = 1,
            FamilyConfig::NemotronH(preset) => preset.make_vocab_size_divisible_by = 1,
            FamilyConfig::Gpt(preset) => {
                // What they were trained with.
                (preset.hidden_dropout, preset.attention_dropout) = (0.1, 0.1);
                preset.make_vocab_size_divisible_by = 1;
            }
            other => panic!("{other:?}"),
        }
        let read = FamilyConfig::from_hf(&file(model)).unwrap();
        if read != unpadded {
            wrong.push(format!("{name}: {read:?} instead of {unpadded:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_other_presets_have_the_published_sizes() {
    let presets: BTreeMap<_, _> = FamilyConfig::presets().into_iter().collect();
    for (name, parameters) in SIZES {
        assert_eq!(presets[name].parameter_count(), parameters, "{name}");
    }
    for (name, config) in presets {
        assert_eq!(config.check(), Ok(()), "{name}");
        let is_listed = FILES.iter().any(|(of, _)| *of == name) || SIZES.iter().any(|(of, _)| *of == name);
        assert!(is_listed || name == "tiny" || !matches!(config, FamilyConfig::Llama(_)), "{name} is in neither list");
    }
}

#[test]
fn every_folder_is_in_the_table() {
    let folders = fs::read_dir(FOLDER).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let folders: BTreeSet<String> = folders.filter(|name| name != "README.md").collect();
    assert_eq!(folders, table().iter().map(|[model, _]| model.replace('/', "--")).collect());
}

/// The guide lists what is refused, with the reason, and nothing else.
#[test]
fn the_guide_names_what_is_refused() {
    let table = table();
    let refused = table.iter().filter_map(|[model, result]| Some((model.as_str(), result.strip_prefix("refused: ")?)));
    let refused: Vec<String> = refused.map(|(model, reason)| format!("| {model} | {reason} |")).collect();
    let heading = "| refused | because |";
    let listed = GUIDE.lines().skip_while(|line| *line != heading).skip(2).take_while(|line| line.starts_with('|'));
    assert_eq!(listed.collect::<Vec<_>>(), refused);
}
