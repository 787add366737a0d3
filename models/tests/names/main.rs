//! Configurations and names of other systems, both ways; see `golden/README.md`, and `tests/golden/README.md` of the
//! workspace for Hugging Face's.

mod config_json;
mod layer_kinds;
mod published;
mod published_files;
mod relatives;
mod rope_json;
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
const QWEN2: &str = hf!("qwen2");
const QWEN3: &str = hf!("qwen3");
const SMOLLM3: &str = hf!("smollm3");
const OLMO2: &str = hf!("olmo2");
const OLMO3: &str = hf!("olmo3");
const OLMOE: &str = hf!("olmoe");
const GRANITE: &str = hf!("granite");
const SEED_OSS: &str = hf!("seed_oss");
const ERNIE: &str = hf!("ernie4_5");
const DEEPSEEK: &str = hf!("deepseek");
const DEEPSEEK_V2: &str = hf!("deepseek_v2");
const DEEPSEEK_V2_LITE: &str = hf!("deepseek_v2_lite");
const GEMMA: &str = hf!("gemma");
const GEMMA2: &str = hf!("gemma2");
const GEMMA3: &str = hf!("gemma3");
const GEMMA3_IMAGES: &str = hf!("gemma3_images");
const PHI3: &str = hf!("phi3");
const PHI3_LONGROPE: &str = hf!("phi3_longrope");
const GPT_OSS: &str = hf!("gpt_oss");
const GLM4: &str = hf!("glm4");
const GLM4_MOE: &str = hf!("glm4_moe");
const MIXTRAL: &str = hf!("mixtral");
const QWEN3_MOE: &str = hf!("qwen3_moe");
const QWEN3_NEXT: &str = hf!("qwen3_next");
const GPT2: &str = hf!("gpt2");
const MAMBA2: &str = hf!("mamba2");
const NEMOTRON_H: &str = hf!("nemotron_h");
const NEMOTRON_3: &str = hf!("nemotron3");

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}
