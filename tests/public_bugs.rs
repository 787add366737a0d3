//! Bugs of others that users have reported and that we claim not to have, each named after its report.

use backend_dist::launch::Rank;
use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::engine::LossMean;
use burn_megatron::optim::{MuonConfig, OptimizerConfig};
use burn_megatron::verify::{Candidate, RankTrace, trace};
use models::layers::BalanceOver;
use models::{
    CausalLm, DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, Mixtral, MixtralConfig,
    ModelConfig, ParamBuilder,
};
use tests::{SETTINGS, assert_equals_one_device, gpt, gradients, llama, moe, train, train_on, weights};

/// Latent attention with heads for eight ranks, experts, and a module of multi-token prediction.
fn deepseek() -> DeepSeekV3Config {
    DeepSeekV3Config { vocab_size: 101, hidden_size: 32, mtp_loss_scaling_factor: 0.5, ..DeepSeekV3Config::tiny() }
}

/// Every rank's norm of each step is that of the gradients of all ranks, each element once.
fn assert_norm_counts_everything_once(layout: &str, ranks: &[RankTrace]) {
    for step in 0..ranks[0].losses.len() {
        let squares = |tensor: &HostTensor| tensor.data.iter().map(|g| g * g).sum::<f64>();
        let by_hand = gradients(layout, ranks, step).values().map(squares).sum::<f64>().sqrt();
        for rank in ranks {
            let gap = (rank.grad_norms[step] - by_hand).abs() / by_hand;
            assert!(gap < 1e-12, "{layout}, step {step}: {} instead of {by_hand}", rank.grad_norms[step]);
        }
    }
}

/// NVIDIA/Megatron-LM issue 844: with the distributed optimizer the gradients of embedding and output layer were summed
/// over first and last stage after they had been scattered over the data-parallel ranks, where they lay at different
/// places.
#[test]
fn megatron_lm_844_tied_embeddings_with_sharded_gradients() {
    let one = train::<Gpt>(&gpt(), "TP1", None);
    for layout in
        ["PP2 DP2 ZeRO1 x2 Et|ttL", "PP3 DP2 ZeRO2 x4", "PP3 DP2 ZeRO3 x4 gpipe", "TP2 PP2 DP2 ZeRO1 x2 Ett|tL"]
    {
        assert_equals_one_device(&one, layout, &train::<Gpt>(&gpt(), layout, None));
    }
}

/// NVIDIA/Megatron-LM issue 656: the two copies of a tied weight drifted apart in training.
#[test]
fn megatron_lm_656_tied_weights_stay_equal() {
    for layout in ["PP3 x4", "PP2 DP2 ZeRO1 x2 Et|ttL", "PP2 VPP2 x2 zb-v Et|t|t|L", "TP2 PP3 x4 zb-h1"] {
        let ranks = train::<Gpt>(&gpt(), layout, None);
        let copies = ranks.iter().flat_map(|rank| &rank.parameters).filter(|t| t.section.name == "embed_tokens.weight");
        let copies: Vec<_> = copies.collect();
        let held_twice = copies.iter().filter(|copy| !copy.section.is_owned()).count();
        assert!(held_twice > 0, "{layout}");
        for copy in &copies {
            let same = copies.iter().filter(|other| other.section.ranges() == copy.section.ranges());
            assert!(same.into_iter().all(|other| other.values == copy.values), "{layout}");
        }
    }
}

/// NVIDIA/Megatron-LM issue 4641: Muon took the last stage's copy of a tied weight for a hidden matrix, the first
/// stage's not. As reported, the last stage has nothing but a module of multi-token prediction, which embeds tokens
/// with a copy of the first stage's weight; and an output layer that shares the embedding.
#[test]
fn megatron_lm_4641_muon_treats_both_copies_of_a_tied_weight_alike() {
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let one = train::<DeepSeekV3>(&deepseek(), "TP1", Some(&muon));
    for layout in ["PP3 x4 Ett|t|L", "PP2 DP2 ZeRO1 x2 Ettt|L", "TP2 SP PP2 x4 zb-h1 Ettt|L"] {
        let ranks = train::<DeepSeekV3>(&deepseek(), layout, Some(&muon));
        let held = |rank: &RankTrace, name: &str| rank.parameters.iter().any(|local| local.section.name == name);
        let last = ranks.last().unwrap();
        assert!(held(last, "embed_tokens.weight") && held(last, "layers.3.eh_proj.weight"), "{layout}");
        assert!(!held(last, "layers.2.input_layernorm.weight"), "{layout}: a layer on the stage of the module");
        assert_equals_one_device(&one, layout, &ranks);
    }
    let one = train::<Gpt>(&gpt(), "TP1", Some(&muon));
    for layout in ["PP3 x4", "TP2 PP3 x4 1f1b", "PP2 DP2 ZeRO2 x2 Ett|tL"] {
        assert_equals_one_device(&one, layout, &train::<Gpt>(&gpt(), layout, Some(&muon)));
    }
}

/// NVIDIA/Megatron-LM pull requests 7117 and 6326: Muon orthogonalised query, key and value together or apart,
/// depending on how a rank's matrix rows of them divided, which happened under sharded weights and with fewer key-value
/// heads than ranks.
#[test]
fn megatron_lm_7117_6326_muon_orthogonalises_the_same_matrices_in_every_layout() {
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let config = LlamaConfig { num_key_value_heads: 1, ..llama() };
    let one = train::<Llama>(&config, "TP1", Some(&muon));
    for layout in ["TP4 SP", "TP4 DP2 ZeRO1", "DP4 ZeRO2", "TP2 PP2 DP2 ZeRO3 x2"] {
        assert_equals_one_device(&one, layout, &train::<Llama>(&config, layout, Some(&muon)));
    }
}

/// bigcode-project/Megatron-LM issue 11: gradients of key and value heads that several tensor parallel ranks share were
/// not summed under the distributed optimizer, nor in interleaved stages.
#[test]
fn bigcode_megatron_lm_11_shared_key_value_heads_in_every_optimizer_and_stage() {
    let config = LlamaConfig { num_key_value_heads: 1, ..llama() };
    let one = train::<Llama>(&config, "TP1", None);
    for layout in ["TP4 SP DP2 ZeRO1", "TP2 PP2 VPP2 DP2 ZeRO1 x2", "TP4 DP2 ZeRO3 x2"] {
        assert_equals_one_device(&one, layout, &train::<Llama>(&config, layout, None));
    }
}

/// NVIDIA/Megatron-LM pull request 5916: the gradient norm left out what some ranks hold. Ours counts every element of
/// the model once: norms that are whole on each rank, padding, tied copies and shards included.
#[test]
fn megatron_lm_5916_the_gradient_norm_counts_everything_once() {
    let tied = GptConfig { make_vocab_size_divisible_by: 8, ..gpt() };
    for layout in
        ["TP1", "TP2 SP", "TP4 SP DP2 ZeRO1", "TP2 SP PP2 DP2 ZeRO2 x2 Et|ttL", "PP2 VPP2 DP2 ZeRO1 x2 zb-v Et|t|t|L"]
    {
        assert_norm_counts_everything_once(layout, &train::<Gpt>(&tied, layout, None));
    }
}

/// NVIDIA/Megatron-LM pull requests 5916 and 6470: where attention is sharded and experts are divided, the norm left
/// out the experts of all but the first tensor parallel ranks.
#[test]
fn megatron_lm_5916_6470_the_gradient_norm_counts_every_expert_once() {
    for layout in
        ["TP2 EP2 ETP1", "TP4 SP EP4 ETP1", "TP2 SP DP2 EP2 ZeRO1", "TP2 DP2 EP4 ETP1 ZeRO2", "DP4 EP2 ETP2 x2"]
    {
        assert_norm_counts_everything_once(layout, &train::<Mixtral>(&moe(), layout, None));
    }
}

/// pytorch/torchtitan pull request 4135: norms were rounded to bf16 for each group of parameters, so that they depended
/// on how these were divided over stages.
#[test]
fn torchtitan_4135_the_norm_of_a_model_in_bf16_does_not_depend_on_how_it_is_divided() {
    let job = SETTINGS.job(llama().vocab_size());
    let train = |layout: &str| {
        let candidate: Candidate = layout.parse().unwrap();
        let build = |rank: &Rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::BF16, SETTINGS.seed).with_part(part);
            Ok(Llama::build(&llama(), params)?)
        };
        trace(&candidate, &job, &[Device::flex()].into(), &llama().dims(), build).unwrap()
    };
    let one = train("x4");
    assert_norm_counts_everything_once("x4", &one);
    for layout in ["PP2 x4", "PP4 x4 zb-h1", "PP2 VPP2 x4"] {
        let ranks = train(layout);
        assert_norm_counts_everything_once(layout, &ranks);
        assert!(ranks.iter().all(|rank| rank.grad_norms == one[0].grad_norms), "{layout}");
    }
    for layout in ["TP2 SP x4", "DP2 ZeRO2 x2"] {
        assert_norm_counts_everything_once(layout, &train(layout));
    }
}

/// pytorch/torchtitan pull requests 1593 and 4772: layers that are recomputed counted their tokens twice, and moved
/// the shares that a loss over all micro-batches of a step balances.
#[test]
fn torchtitan_1593_4772_recomputed_layers_are_not_counted_again() {
    let moe = MixtralConfig { router_balance: BalanceOver::Global, router_aux_loss_coef: 0.5, ..moe() };
    let one = train::<Mixtral>(&moe, "x4", None);
    for layout in ["x4 uniform1", "x4 block2", "TP2 SP x4 uniform2", "PP2 x4 gpipe uniform1", "PP2 VPP2 x4 block1"] {
        assert_equals_one_device(&one, layout, &train::<Mixtral>(&moe, layout, None));
    }
    // The bias of this one moves by the sign of what is counted.
    let one = train::<DeepSeekV3>(&deepseek(), "x4", None);
    for layout in ["x4 uniform1", "DP2 EP2 x2 block1", "DP2 ZeRO3 x2"] {
        assert_equals_one_device(&one, layout, &train::<DeepSeekV3>(&deepseek(), layout, None));
    }
}

/// NVIDIA/Megatron-LM pull requests 1622 and 6080, issue 1628: experts that no rank has alone, but sharded otherwise
/// than attention, had their gradients summed over the data-parallel ranks of attention.
#[test]
fn megatron_lm_1622_1628_6080_gradients_of_experts_sharded_otherwise_than_attention() {
    let one = train::<Mixtral>(&moe(), "TP1", None);
    for layout in
        ["DP4 EP1 ETP4", "DP2 EP1 ETP2 ZeRO1", "TP2 ETP1", "TP4 SP ETP2 ZeRO2", "TP2 SP DP2 ETP4", "TP2 DP2 ETP1 x2"]
    {
        assert_equals_one_device(&one, layout, &train::<Mixtral>(&moe(), layout, None));
    }
}

/// ROCm/TransformerEngine pull request 715: the projections down to the latents, whole on every tensor parallel rank,
/// were counted once for each in the norm. inclusionAI/AReno pull request 496: their gradients were summed twice, those
/// of the rotated key once.
#[test]
fn transformer_engine_715_areno_496_replicated_latent_projections() {
    let one = train::<DeepSeekV3>(&deepseek(), "TP1", None);
    for layout in ["TP8", "TP8 SP", "TP4 SP DP2 ZeRO1", "TP2 PP2 x2 Ett|tL"] {
        let ranks = train::<DeepSeekV3>(&deepseek(), layout, None);
        assert_norm_counts_everything_once(layout, &ranks);
        assert_equals_one_device(&one, layout, &ranks);
    }
}

/// NVIDIA/Megatron-LM issue 7452, its third and fourth finding: losses of multi-token prediction were divided by the
/// tokens that count on one rank, and recomputed with another group of ranks. Here none count on the first of four.
#[test]
fn megatron_lm_7452_multi_token_prediction_over_all_ranks_and_recomputed() {
    let mut job = SETTINGS.job(deepseek().vocab_size());
    for mask in job.batches.iter_mut().filter_map(|batch| batch.mask.as_mut()) {
        mask[..SETTINGS.global_batch / 4 * SETTINGS.seq].fill(false);
    }
    let one = train_on::<DeepSeekV3>(&deepseek(), "TP1", &job);
    for layout in ["DP4", "DP4 EP2 ZeRO2 x2", "TP2 SP DP2 uniform1", "TP2 CP2 block2", "TP2 SP PP2 x4 Ett|tL uniform1"]
    {
        assert_equals_one_device(&one, layout, &train_on::<DeepSeekV3>(&deepseek(), layout, &job));
    }
}

/// NVIDIA/Megatron-LM issues 5100 and 5240: pipelines of four stages and more waited for each other forever; 1586:
/// several chunks per rank trained something else.
#[test]
fn megatron_lm_5100_5240_1586_long_pipelines_end_and_train_the_same() {
    let config = LlamaConfig { num_hidden_layers: 8, ..llama() };
    let one = train::<Llama>(&config, "x8", None);
    for layout in ["PP4 x8", "PP8 x8", "PP4 VPP2 x8", "PP8 x8 zb-h1", "PP4 VPP2 x8 zb-v", "PP8 x8 gpipe"] {
        let ranks = train::<Llama>(&config, layout, None);
        assert_eq!(ranks[0].losses, one[0].losses, "{layout}");
        assert!(weights(layout, &ranks) == weights("x8", &one), "{layout}");
    }
}

/// NVIDIA/Megatron-LM issue 673: whether the loss is multiplied by the context parallel size, and gradients divided by
/// it, was done in two places that did not agree. Both ways to take the mean are those of one rank with the same
/// micro-batches; one token in eight does not count.
#[test]
fn megatron_lm_673_the_loss_is_not_scaled_by_context_parallel_ranks() {
    for loss in [LossMean::PerToken, LossMean::PerMicroBatch] {
        let mut job = SETTINGS.job(llama().vocab_size());
        job.engine.loss = loss;
        let one = train_on::<Llama>(&llama(), "TP1 x2", &job);
        for layout in ["CP2 x2", "CP4 x2", "TP2 SP CP2 x2"] {
            assert_equals_one_device(&one, layout, &train_on::<Llama>(&llama(), layout, &job));
        }
    }
}

/// NVIDIA/Megatron-LM issue 906: DP2 CP4 had other gradients than DP8.
#[test]
fn megatron_lm_906_context_and_data_parallel_ranks_sum_the_same_gradients() {
    let eight = train::<Llama>(&llama(), "DP8", None);
    for layout in ["DP2 CP4", "DP4 CP2 ZeRO1", "DP2 CP2 ZeRO3 x2"] {
        assert_equals_one_device(&eight, layout, &train::<Llama>(&llama(), layout, None));
    }
}

/// NVIDIA/Megatron-LM issue 1464: the ring's backward pass gave wrong gradients of queries, keys and values.
#[test]
fn megatron_lm_1464_attention_gradients_under_context_parallelism() {
    let mistral = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(5), ..llama() };
    for config in [llama(), mistral] {
        let one = train::<Llama>(&config, "TP1", None);
        for layout in ["CP2", "CP4", "CP2 all_gather", "CP2 a2a", "CP4 a2a+p2p:2", "CP2 p2p,a2a,all_gather,p2p"] {
            assert_equals_one_device(&one, layout, &train::<Llama>(&config, layout, None));
        }
    }
}

/// NVIDIA/Megatron-LM issue 1764: the loss became NaN where none of a context parallel rank's tokens counts.
#[test]
fn megatron_lm_1764_a_rank_without_tokens_that_count() {
    let mut job = SETTINGS.job(llama().vocab_size());
    let quarter = SETTINGS.seq / 4;
    for batch in &mut job.batches {
        // Rank 1 of 2 has the second and the third quarter.
        let outside = |place: usize| !(quarter..3 * quarter).contains(&(place % SETTINGS.seq));
        batch.mask = Some((0..batch.tokens.len()).map(outside).collect());
    }
    for loss in [LossMean::PerToken, LossMean::PerMicroBatch] {
        job.engine.loss = loss;
        let one = train_on::<Llama>(&llama(), "TP1", &job);
        assert_equals_one_device(&one, "CP2", &train_on::<Llama>(&llama(), "CP2", &job));
    }
}
