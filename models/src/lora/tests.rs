//! Which layers have adapters, of which rank and scale.

use super::*;
use crate::names::StackPart;
use crate::{
    DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, MixtralConfig, MixtralVariant, ModelConfig,
};

fn of(targets: &[&str], names: &NameMap) -> Result<LoraPlan, LoraError> {
    let target_modules = targets.iter().map(|target| target.to_string()).collect();
    LoraConfig { target_modules, ..LoraConfig::default() }.plan(names)
}

#[test]
fn layers_are_chosen_by_pefts_names() {
    let llama = LlamaConfig::tiny();
    let layers = llama.num_hidden_layers;
    assert_eq!(of(&[ALL_LINEAR], &llama.hf_names()).unwrap().len(), 7 * layers);
    assert_eq!(of(&["model.layers.1.self_attn.q_proj"], &llama.hf_names()).unwrap().len(), 1);
    let plan = of(&["down_proj"], &llama.hf_names()).unwrap();
    assert!(plan.has("layers.0.mlp.down_proj") && !plan.has("layers.0.mlp.up_proj"));
    let file = plan.names("base_model.model.");
    let a = file.get("layers.0.mlp.down_proj.lora_A.weight").unwrap();
    assert_eq!(a.name, "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight");
    assert_eq!(a.shape, [8, llama.intermediate_size]);
    // Experts are not among all linear layers, but have names.
    let (mixtral, names) = (MixtralConfig::tiny(), MixtralConfig::tiny().hf_names());
    assert!(of(&[ALL_LINEAR], &names).unwrap().targets().all(|(ours, ..)| ours.contains(".attention.")));
    let (layers, experts) = (mixtral.num_hidden_layers, mixtral.num_experts);
    assert_eq!(of(&["w2", "w3"], &names).unwrap().len(), 2 * layers * experts);
    assert_eq!(of(&["layers.0.*.experts.*"], &names).unwrap().len(), 3 * experts);
    let theirs = of(&["experts.*.w1"], &names).unwrap().names("base_model.model.");
    let a = theirs.get("layers.1.mlp.experts.2.gate_proj.lora_A.weight").unwrap();
    assert_eq!(a.name, "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_A.weight");
}

#[test]
fn layers_that_a_file_fuses_have_one_a_and_their_rows_of_b() {
    let config = LlamaConfig { variant: LlamaVariant::Phi3, ..LlamaConfig::tiny() };
    let plan = of(&[ALL_LINEAR], &config.hf_names()).unwrap();
    assert_eq!(plan.len(), 4 * config.num_hidden_layers);
    assert!(plan.modules().contains_key("model.layers.0.self_attn.qkv_proj"));
    let names = plan.names("base_model.model.");
    let (queries, keys) = (config.hidden_size, config.num_key_value_heads * config.head_dim);
    let b = names.get("layers.0.attention.k_proj.lora_B.weight").unwrap();
    assert_eq!(b.name, "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight");
    assert_eq!((&b.rows, &b.shape), (&Some(vec![queries..queries + keys]), &vec![queries + 2 * keys, 8]));
    assert!(names.get("layers.0.attention.k_proj.lora_A.weight").is_none());
    let a = names.get("layers.0.attention.qkv_proj.lora_A.weight").unwrap();
    assert_eq!((&a.rows, &a.shape), (&None, &vec![8, config.hidden_size]));
    // The matrix rows of a whole module in another order.
    let glm = LlamaConfig { variant: LlamaVariant::Glm4, ..LlamaConfig::tiny() };
    let names = of(&["q_proj", "gate_up_proj"], &glm.hf_names()).unwrap().names("");
    assert!(names.get("layers.0.attention.q_proj.lora_A.weight").unwrap().rows.is_none());
    let b = names.get("layers.0.attention.q_proj.lora_B.weight").unwrap();
    assert_eq!(b.rows.as_ref().map(|rows| rows[1].start), Some(2));
}

#[test]
fn what_cannot_have_an_adapter_is_refused() {
    let names = LlamaConfig::tiny().hf_names();
    let refused = |targets: &[&str], names: &NameMap| of(targets, names).unwrap_err().to_string();
    let said = refused(&["q_prj"], &names);
    assert!(said.contains("no linear layer `q_prj`") && said.contains("q_proj"), "{said}");
    assert!(refused(&["lm_head"], &names).contains("the output layer"));
    let gpt = FamilyConfig::Gpt(GptConfig::tiny()).hf_names();
    assert!(refused(&[ALL_LINEAR], &gpt).contains("adapters of `transformer.h.0.attn.c_attn` are not supported"));
    let said = refused(&[ALL_LINEAR], &DeepSeekV3Config::tiny().hf_names());
    assert!(said.contains("; name those that can: down_proj, gate_proj, kv_b_proj, o_proj, q_b_proj"), "{said}");
    let experts = MixtralConfig::tiny().hf_names();
    let said = refused(&["experts.0.w1"], &experts);
    assert!(
        said.contains("experts.1.w1` are not supported: the experts of a layer have adapters all or none"),
        "{said}"
    );
    let stacked = MixtralConfig { variant: MixtralVariant::GptOss, ..MixtralConfig::tiny() }.hf_names();
    let dora = LoraConfig { target_modules: vec!["down_proj".into()], dora: true, ..LoraConfig::default() };
    let said = dora.plan(&stacked).unwrap_err().to_string();
    assert!(
        said.contains("experts.down_proj` are not supported: DoRA is not for experts that are one tensor"),
        "{said}"
    );
    assert!(of(&[ALL_LINEAR], &stacked).unwrap().targets().all(|(ours, ..)| ours.contains(".attention.")));
    // In which order peft wraps such a module is not known.
    let mut unknown = NameMap::default();
    let part = StackPart { index: 0, first: 0, every: 1 };
    unknown.stacked("layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.w1", part, &[1, 64, 64]);
    let said = refused(&["w1"], &unknown);
    assert!(said.contains("experts that are one tensor have adapters of gate_up_proj and down_proj alone"), "{said}");
    let none = LoraConfig { rank: 0, ..LoraConfig::default() }.plan(&names).unwrap_err();
    assert_eq!(none.to_string(), "r = 0 is not at least 1");
    assert_eq!(refused(&[], &names), "target_modules is empty; nearest legal: all-linear");
    let wide = LoraConfig { rank: 65, target_modules: vec!["k_proj".into()], ..LoraConfig::default() };
    let said = wide.plan(&names).unwrap_err().to_string();
    assert!(
        said.starts_with("r = 65 is more than the features of `model.layers.0.self_attn.k_proj`, 64 and"),
        "{said}"
    );
    assert!(said.ends_with("nearest legal: 64"), "{said}");
}

#[test]
fn modules_have_ranks_and_scales_of_their_own() {
    let (rank, alpha) = (|pattern: &str, rank| (pattern.to_string(), rank), |pattern: &str| (pattern.into(), 3.0));
    let config = |rank_pattern: Vec<(String, usize)>, alpha_pattern: Vec<(String, f64)>| {
        let (rank_pattern, alpha_pattern) = (rank_pattern.into_iter().collect(), alpha_pattern.into_iter().collect());
        let target_modules = vec!["q_proj".into(), "o_proj".into()];
        LoraConfig { target_modules, rank_pattern, alpha_pattern, ..LoraConfig::default() }
    };
    let names = LlamaConfig::tiny().hf_names();
    let plan = config(vec![rank("layers.1.*.q_proj", 4)], vec![alpha("o_proj")]).plan(&names).unwrap();
    let of = |module: &str| plan.modules()[format!("model.layers.{module}").as_str()];
    assert_eq!(of("0.self_attn.q_proj"), (8, 16.0));
    assert_eq!((of("1.self_attn.q_proj"), of("1.self_attn.o_proj")), ((4, 16.0), (8, 3.0)));
    assert_eq!(plan.of_layer("layers.1.attention.q_proj").unwrap().scale, 4.0);
    assert_eq!(plan.names("").get("layers.1.attention.q_proj.lora_B.weight").unwrap().shape[1], 4);
    let refused = |ranks| config(ranks, vec![]).plan(&names).unwrap_err().to_string();
    let said = refused(vec![rank("v_proj", 4)]);
    assert_eq!(said, "rank_pattern: no module with an adapter is called `v_proj`; these are o_proj, q_proj");
    let said = refused(vec![rank("q_proj", 4), rank("layers.0.*", 2)]);
    assert!(said.contains("`layers.0.*` and `q_proj` both fit `model.layers.0.self_attn.q_proj`"), "{said}");
    assert_eq!(refused(vec![rank("q_proj", 0)]), "rank_pattern = 0 is not at least 1");
    let one_of = [("experts.0.w1".to_string(), 4)].into();
    let experts =
        LoraConfig { target_modules: vec!["experts.*".into()], rank_pattern: one_of, ..LoraConfig::default() };
    let said = experts.plan(&MixtralConfig::tiny().hf_names()).unwrap_err().to_string();
    let expected =
        "rank_pattern: gate and up of a layer's experts have adapters of one rank and scale, and so have all down, but";
    assert!(said.starts_with(expected), "{said}");
    let of_down = [("experts.*.w2".to_string(), 4)].into();
    let plan = LoraConfig { rank_pattern: of_down, ..experts }.plan(&MixtralConfig::tiny().hf_names()).unwrap();
    let rank = |layer: &str| plan.of_layer(layer).unwrap().rank;
    assert_eq!(["gate", "up", "down"].map(|part| rank(&format!("layers.0.mlp.experts.1.{part}_proj"))), [8, 8, 4]);
}

#[test]
fn scales_are_those_of_the_papers() {
    let (plain, rs) = (LoraConfig::default(), LoraConfig { rslora: true, ..LoraConfig::default() });
    assert_eq!((plain.scale(16, 8.0), rs.scale(16, 8.0)), (0.5, 2.0));
}
