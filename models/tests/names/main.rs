//! Configurations and names of other systems, both ways; see `golden/README.md`, and `tests/golden/README.md` of the
//! workspace for Hugging Face's.

mod config_json;
mod published;
mod tensors;

use serde_json::Value;

macro_rules! hf {
    ($folder:literal) => {
        include_str!(concat!("../../../tests/golden/hf/", $folder, "/config.json"))
    };
}

const LLAMA2: &str = hf!("llama2");
const LLAMA3: &str = hf!("llama3");
const MISTRAL: &str = hf!("mistral");
const QWEN3: &str = hf!("qwen3");
const MIXTRAL: &str = hf!("mixtral");
const QWEN3_MOE: &str = hf!("qwen3_moe");
const GPT2: &str = hf!("gpt2");

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}
