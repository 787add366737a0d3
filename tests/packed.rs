//! Documents that share a sequence are trained as if each had a sequence of its own, in every layout.

#[path = "packed/assigned.rs"]
mod assigned;

use backend_dist::comm::RunError;
use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use burn_megatron::engine::{DocumentConfig, EngineConfig, RankEngine, TokenBatch};
use burn_megatron::verify::{Candidate, Job, RankTrace};
use models::{
    CausalLm, DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, Mamba2, Mamba2Config,
    Mixtral, MixtralConfig, ModelConfig, NemotronH, NemotronHConfig, ParamBuilder,
};
use tests::{SETTINGS, assert_equals_one_device, gpt, layouts, llama, train_on};

/// Where documents start in each of the sequences.
const STARTS: [&[usize]; 4] = [&[0, 5, 12], &[0], &[0, 1, 2, 9], &[0, 8]];

/// Sequences of several documents.
fn packed(vocab: usize) -> Job {
    let mut job = SETTINGS.job(vocab);
    job.engine.global_batch = STARTS.len();
    for batch in &mut job.batches {
        *batch = batch.slice(0..STARTS.len());
        batch.documents = Some(STARTS.iter().map(|starts| starts.to_vec()).collect());
    }
    job
}

/// The same documents, each at the start of its own sequence; the rest of the sequence does not count.
fn unpacked(vocab: usize) -> Job {
    let mut job = packed(vocab);
    job.engine.global_batch = STARTS.iter().map(|starts| starts.len()).sum();
    job.batches.iter_mut().for_each(|batch| *batch = alone(batch));
    job
}

fn alone(batch: &TokenBatch) -> TokenBatch {
    let seq = batch.seq;
    let (mut tokens, mut labels, mut mask) = (Vec::new(), Vec::new(), Vec::new());
    for (sample, starts) in STARTS.iter().enumerate() {
        for (index, start) in starts.iter().enumerate() {
            let end = starts.get(index + 1).copied().unwrap_or(seq);
            let range = sample * seq + start..sample * seq + end;
            let rest = seq - range.len();
            tokens.extend_from_slice(&batch.tokens[range.clone()]);
            labels.extend_from_slice(&batch.labels[range.clone()]);
            mask.extend_from_slice(&batch.mask.as_ref().unwrap()[range]);
            tokens.extend(std::iter::repeat_n(7, rest));
            labels.extend(std::iter::repeat_n(7, rest));
            mask.extend(std::iter::repeat_n(false, rest));
        }
    }
    TokenBatch { sequences: tokens.len() / seq, seq, tokens, labels, mask: Some(mask), ..TokenBatch::default() }
}

fn packed_equals_unpacked<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    let one = train_on::<M>(config, "TP1", &unpacked(config.vocab_size()));
    each_equals(&one, layouts, |layout| train_on::<M>(config, layout, &packed(config.vocab_size())));
}

/// What `train` gives for each layout is what one device gives.
fn each_equals(one: &[RankTrace], layouts: &[&str], train: impl Fn(&str) -> Vec<RankTrace>) {
    layouts.iter().for_each(|layout| assert_equals_one_device(one, layout, &train(layout)));
}

#[test]
fn a_packed_llama_learns_what_its_documents_teach() {
    let layouts = layouts![
        "TP1" "TP1 x4 selective" "TP2 SP DP2" "PP2 x4 zb-h1" "CP2" "CP4 uniform1" "CP2 all_gather" "CP2 a2a x2"
        "CP4 a2a+p2p:2" "TP2 SP CP2" "CP2 PP2 DP2 ZeRO1 x2" "CP2 selective" "CP4 a2a x2 selective"
        "TP2 SP CP2 all_gather selective" "PP2 CP2 x4 zb-h1 a2a+p2p:1 selective"
    ];
    packed_equals_unpacked::<Llama>(&llama(), &layouts);
}

#[test]
fn a_window_and_norms_of_heads_stay_inside_documents() {
    let mistral = LlamaConfig { variant: LlamaVariant::Mistral, sliding_window: Some(4), ..llama() };
    packed_equals_unpacked::<Llama>(&mistral, &["TP1", "CP2", "CP2 a2a"]);
    let qwen = LlamaConfig { variant: LlamaVariant::Qwen3, ..llama() };
    packed_equals_unpacked::<Llama>(&qwen, &["TP2", "CP2 all_gather"]);
}

#[test]
fn a_packed_gpt_learns_what_its_documents_teach() {
    let config = GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..gpt() };
    packed_equals_unpacked::<Gpt>(&config, &["TP1", "DP4 ZeRO3", "TP2 SP", "CP2", "TP2 SP CP2", "CP4 all_gather"]);
}

/// Eight heads in two groups: four ranks that share a sequence, or their tensor-parallel ranks, compute a group's B and C
/// twice.
fn mamba2() -> Mamba2Config {
    let of = models::sized! { Mamba2Config::tiny();
        vocab_size: 101, hidden_size: 32, head_dim: 6, state_size: 5, use_bias: true
    };
    Mamba2Config { time_step_limit_min: 0.01, time_step_limit_max: Some(2.0), initializer_range: 0.2, ..of }
}

/// Of two key heads, which serve two value heads each, four ranks compute each one twice.
fn qwen3_next() -> MixtralConfig {
    models::sized! { MixtralConfig::qwen3_next_tiny();
        vocab_size: 101, hidden_size: 32, num_hidden_layers: 2, linear_num_key_heads: Some(2),
        linear_num_value_heads: Some(4), linear_value_head_dim: Some(12), router_aux_loss_coef: 0.0,
        initializer_range: 0.2
    }
}

/// States and convolutions begin anew with each document, also where ranks share the sequence.
#[test]
fn recurrent_layers_learn_what_their_documents_teach() {
    let layouts = layouts![
        "TP1" "CP2" "CP4 uniform1" "TP2 CP2 x2 selective" "TP2 SP CP2 a2a" "CP2 DP2 ZeRO3 block1"
        "PP2 CP2 x4 zb-h1 all_gather" "PP2 CP2 DP2 ZeRO1 x2"
    ];
    packed_equals_unpacked::<Mamba2>(&mamba2(), &layouts);
    packed_equals_unpacked::<Mamba2>(&mamba2(), &["CP8", "TP4 SP CP2"]);
    packed_equals_unpacked::<Mixtral>(&qwen3_next(), &layouts);
    packed_equals_unpacked::<Mixtral>(&qwen3_next(), &["CP2 EP2", "TP2 SP CP2 EP2 ETP1"]);
    let nemotron_h = models::sized! { NemotronHConfig::tiny();
        vocab_size: 101, hidden_size: 32, hybrid_override_pattern: "M-*M".into(), mamba_head_dim: 6,
        initializer_range: 0.2
    };
    packed_equals_unpacked::<NemotronH>(&nemotron_h, &layouts);
    // Nothing balances experts here, since padding is routed too.
    let nemotron_3 = models::sized! { nemotron_h;
        hybrid_override_pattern: "ME*E".into(), router_aux_loss_coef: 0.0, moe_router_bias_update_rate: 0.0
    };
    packed_equals_unpacked::<NemotronH>(
        &nemotron_3,
        &["TP1", "CP2 EP2", "TP2 SP CP2 EP2 ETP1", "PP2 CP2 DP2 ZeRO1 x2"],
    );
}

/// NVIDIA/Megatron-LM pull requests 6205 and 4495: modules of multi-token prediction looked across the borders of
/// documents. Nothing balances experts here, since padding is routed too.
#[test]
fn megatron_lm_6205_4495_further_tokens_are_those_of_the_same_document() {
    let config = models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, hidden_size: 32, num_nextn_predict_layers: 2, mtp_loss_scaling_factor: 0.5,
        moe_router_bias_update_rate: 0.0, router_aux_loss_coef: 0.0, initializer_range: 0.1
    };
    packed_equals_unpacked::<DeepSeekV3>(&config, &["TP1", "TP1 x4 uniform1", "TP2 SP DP2", "CP2", "CP4 all_gather"]);
}

/// With dropout, a packed sequence is the same in every layout.
#[test]
fn a_packed_gpt_with_dropout_equals_one_device() {
    let job = packed(gpt().vocab_size());
    let one = train_on::<Gpt>(&gpt(), "TP1", &job);
    let layouts = ["TP2 SP", "CP2", "CP2 a2a DP2", "TP2 SP CP2 all_gather"];
    each_equals(&one, &layouts, |layout| train_on::<Gpt>(&gpt(), layout, &job));
}

/// Megatron's two options are independent: positions that continue change a GPT, attention that crosses borders changes
/// all.
#[test]
fn borders_and_positions_are_two_options() {
    let config = GptConfig { hidden_dropout: 0.0, attention_dropout: 0.0, ..gpt() };
    let losses = |reset_attention_mask, reset_position_ids| {
        let mut job = packed(config.vocab_size());
        job.engine.documents = DocumentConfig { reset_attention_mask, reset_position_ids };
        let [one, two] = ["TP1", "CP2"].map(|layout| train_on::<Gpt>(&config, layout, &job));
        assert_equals_one_device(&one, "CP2", &two);
        one[0].losses[0]
    };
    let all = [losses(true, true), losses(true, false), losses(false, true), losses(false, false)];
    for (index, loss) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| (other - loss).abs() > 1e-9), "{all:?}");
    }
}

/// The results of `f` on each rank of a layout, with an engine for the sequences of [`packed`], one at a time.
fn on_ranks<R: Send>(
    layout: &str,
    f: impl Fn(&mut RankEngine<Llama>) -> Result<R, BoxError> + Sync,
) -> Result<Vec<R>, RunError> {
    let Candidate { layout, context, .. } = layout.parse().unwrap();
    let engine = EngineConfig { micro_batch: 1, context, ..packed(llama().vocab_size()).engine };
    launch(&Mesh::new(layout).unwrap(), &[Device::flex()], |rank| {
        let build = |part| Ok(Llama::build(&llama(), ParamBuilder::new(&rank, FloatDType::F64, 1).with_part(part))?);
        f(&mut RankEngine::new(&rank, &llama().dims(), build, engine.clone())?)
    })
}

#[test]
fn evaluation_sees_the_same() {
    let evaluate = |layout: &str, batch: &TokenBatch| on_ranks(layout, |engine| Ok(engine.eval_step(batch)?)).unwrap();
    let batch = &packed(llama().vocab_size()).batches[0];
    let expected = evaluate("TP1", &alone(batch))[0];
    for layout in ["TP1", "CP2", "CP4 all_gather", "CP2 PP2", "TP2 SP CP2 a2a"] {
        for report in evaluate(layout, batch) {
            assert_eq!(report.tokens, expected.tokens, "{layout}");
            assert!((report.loss - expected.loss).abs() < 1e-12, "{layout}: {report:?} {expected:?}");
        }
    }
}

#[test]
fn lengths_that_ranks_cannot_share_are_refused() {
    let batch = &packed(llama().vocab_size()).batches[0];
    let refused = |layout| on_ranks(layout, |engine| Ok(engine.train_step(batch)?)).unwrap_err().to_string();
    assert!(refused("CP3").contains("sequence length 16 is not a multiple of 6"), "{}", refused("CP3"));
    assert!(refused("CP8 a2a").contains("nearest legal: heads over 4 ranks"), "{}", refused("CP8 a2a"));
}
