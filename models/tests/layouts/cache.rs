//! Reading tokens a few at a time, with a cache, gives the logits of reading them at once.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use models::layers::LayerPattern;
use models::layers::paged::{Chunk, Outputs, Step};
use models::{
    CausalLm, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, Mixtral, MixtralConfig, MixtralVariant, ModelConfig,
    PagedKvCache, ParamBuilder,
};

use crate::harness::{Batch, Noise, SEQ, host};
use crate::paged::assert_neighbours_change_nothing;
use crate::{gpt, llama, relatives};

pub fn assert_cache_changes_nothing<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    assert_cache_changes_nothing_in::<M>(config, layouts, |params| params);
}

/// The same for a model that is built in another way.
pub fn assert_cache_changes_nothing_in<M: CausalLm>(
    config: &M::Config,
    layouts: &[&str],
    how: impl Fn(ParamBuilder<'_>) -> ParamBuilder<'_> + Sync,
) {
    for layout in layouts {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        launch(&mesh, &[Device::flex()], |rank: Rank| {
            let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise).without_autodiff();
            let (model, vocab) = (M::build(config, how(params))?, config.vocab_size());
            let batch = Batch::synthetic(vocab);
            let full = host(model.logits(batch.ids(&batch.tokens, &rank.device)));
            assert_neighbours_change_nothing(layout, &model, &batch, &full, vocab);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{layout}: {error}"));
    }
}

/// TP4 and TP8 have more ranks than key-value heads; sequence parallelism cannot split one or five tokens evenly.
#[test]
fn llama_with_a_cache() {
    assert_cache_changes_nothing::<Llama>(&llama(), &["TP1", "TP2", "TP4", "TP8", "TP2 SP", "TP4 SP"]);
}

/// The window is shorter than the prompt; keys are normalised before they are cached.
#[test]
fn relatives_with_a_cache() {
    let mistral = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(4), ..llama() };
    assert_cache_changes_nothing::<Llama>(&mistral, &["TP1", "TP4 SP"]);
    let qwen3 = LlamaConfig { variant: LlamaVariant::Qwen3, ..llama() };
    assert_cache_changes_nothing::<Llama>(&qwen3, &["TP1", "TP4 SP"]);
    for config in relatives() {
        assert_cache_changes_nothing::<Llama>(&config, &["TP1", "TP4", "TP2 SP"]);
    }
}

/// Fewer new tokens than ranks: some have none to send to their experts.
#[test]
fn moe_with_a_cache() {
    let config = models::sized! { MixtralConfig::tiny();
        variant: MixtralVariant::Qwen3Moe, vocab_size: 99, hidden_size: 32, intermediate_size: 48,
        moe_intermediate_size: Some(24), num_hidden_layers: 3, mlp_only_layers: vec![1]
    };
    let gpt_oss = models::sized! { config.clone();
        variant: MixtralVariant::GptOss, moe_intermediate_size: None, mlp_only_layers: Vec::new(),
        sliding_window: Some(4), sliding_window_pattern: Some(LayerPattern::Every(2)), attention_bias: true
    };
    let olmoe = models::sized! { config.clone();
        variant: MixtralVariant::Olmoe, moe_intermediate_size: None, mlp_only_layers: Vec::new(), norm_topk_prob: false
    };
    for config in [config, gpt_oss, olmoe] {
        assert_cache_changes_nothing::<Mixtral>(&config, &["TP1", "TP2", "TP4 SP", "TP4 EP4 ETP1", "TP4 SP EP2 ETP2"]);
    }
}

/// The last step ends at the last learned position; under sequence parallelism its padding lies beyond.
#[test]
fn gpt_with_a_cache() {
    let config = GptConfig { max_position_embeddings: SEQ, ..gpt() };
    assert_cache_changes_nothing::<Gpt>(&config, &["TP1", "TP2", "TP4", "TP2 SP", "TP4 SP"]);
}

fn overflow<M: CausalLm>(config: &M::Config, capacity: usize) -> String {
    let mesh = Mesh::new("TP1".parse().unwrap()).unwrap();
    let error = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F64, 0).without_autodiff())?;
        let tokens = Batch::synthetic(config.vocab_size()).tokens[..SEQ].to_vec();
        let chunk = Chunk { tokens, positions: 0..SEQ, blocks: vec![0], outputs: Outputs::Last };
        model.extend(&Step::new(vec![chunk]), &mut PagedKvCache::new(1, capacity));
        Ok(())
    });
    error.unwrap_err().to_string()
}

#[test]
fn positions_that_do_not_exist_are_named() {
    let message = overflow::<Llama>(&llama(), SEQ - 1);
    assert!(message.contains("position 16 of a sequence with blocks for 15"), "{message}");
    let message = overflow::<Gpt>(&GptConfig { max_position_embeddings: 12, ..gpt() }, SEQ);
    assert!(message.contains("sequence position 16 exceeds 12 learned positions"), "{message}");
}
