//! What is sent and computed.

use super::*;
use crate::memory::UnitMemory;

/// Two all-reduces per layer in each direction, the same bytes as gathers and scatters under sequence parallelism,
/// where gathered inputs are gathered again for the weights' gradients (arXiv 2205.05198 section 4.2.2).
#[test]
fn tensor_parallel_traffic() {
    let whole = 2 * 2 * 1024 * 4096;
    let tp = |layout: &str| traffic_of(&job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1))[0].tp;
    let all_reduce = 2 * whole * 3 / 4;
    let losses = 2 * 3 * 4 * 2 * 1024 * 3 / 4;
    // Embedding forward, head backward, and four per layer.
    assert_eq!(tp("TP4"), (32 * 4 + 2) * all_reduce + losses);
    let again = 32 * 2 * whole * 3 / 4;
    assert_eq!(tp("TP4 SP"), tp("TP4") + again);
    assert_eq!(tp("TP1"), 0);
}

#[test]
fn dp_ranks_and_stages_communication_what_they_must() {
    let parameters = 8_030_261_248;
    let sent = |layout: &str| traffic_of(&job(llama3_8b(), layout, ScheduleKind::NoPipeline, 4))[0].dp;
    let part = |bytes: u64| bytes * 7 / 8;
    assert_eq!(sent("DP8"), 2 * part(4 * parameters));
    assert_eq!(sent("DP8 ZeRO1"), part(4 * parameters) + part(2 * parameters));
    assert_eq!(sent("DP8 ZeRO2"), 4 * part(4 * parameters) + part(2 * parameters));
    assert_eq!(sent("DP8 ZeRO3"), 4 * (part(4 * parameters) + 2 * part(2 * parameters)));

    // Inside groups as over so many ranks, and between them the sum of a shard, once per step.
    let all = |layout: &str| traffic_of(&job(llama3_8b(), layout, ScheduleKind::NoPipeline, 4))[0];
    for zero in 1..4 {
        let [grouped, inside] =
            [format!("DP8 ZeRO{zero} Group2"), format!("DP2 ZeRO{zero}")].map(|layout| all(&layout));
        assert_eq!(grouped.between_groups, 2 * (4 * parameters / 2) * 3 / 4);
        assert_eq!(grouped.dp - grouped.between_groups, inside.dp);
    }
    assert_eq!((sent("DP8 ZeRO3 Group8"), sent("DP8 ZeRO3 Group1")), (sent("DP8 ZeRO3"), sent("DP8")));

    let pp = |layout: &str, kind| traffic_of(&job(llama3_8b(), layout, kind, 4)).iter().map(|t| t.pp).sum::<u64>();
    let boundary = 2 * 2 * 1024 * 4096;
    assert_eq!(pp("PP4", ScheduleKind::OneFOneB), 4 * 2 * 3 * boundary);
    assert_eq!(pp("PP4 VPP2", ScheduleKind::Interleaved), 4 * 2 * 7 * boundary);
    assert_eq!(pp("TP2 SP PP4", ScheduleKind::OneFOneB), 4 * 2 * 3 * boundary / 2);
    let tied = traffic_of(&job(gpt(), "PP2", ScheduleKind::OneFOneB, 4));
    let table = 4 * 50_304 * 768;
    assert_eq!(tied.iter().map(|t| t.pp).sum::<u64>(), 2 * table + 4 * 2 * 2 * 2 * 1024 * 768);
}

/// Recurrent layers send positions for heads and back, in each direction of a pass; every rank needs the only group.
#[test]
fn recurrent_layers_trade_positions_for_heads() {
    let cp = |layout: &str| traffic_of(&job(mamba2_130m(), layout, ScheduleKind::NoPipeline, 1))[0].cp;
    let (inner, state, heads) = (1536, 128, 24);
    for ranks in [2, 4] {
        let features = inner + 2 * ranks * state + heads + inner;
        let sent = 24 * 2 * (2 * (2 * 1024 / ranks) * features) * (ranks - 1) / ranks;
        assert_eq!(cp(&format!("CP{ranks}")), sent);
    }
    assert_eq!(cp("TP2"), 0);
}

/// Two copies of every token go to the experts' ranks and come back, in each direction of a pass.
#[test]
fn copies_of_tokens_are_sent_to_experts() {
    let copies = 2 * 2 * 1024 * 2 * 4096;
    let ep = |layout: &str| traffic_of(&job(mixtral_8x7b(), layout, ScheduleKind::NoPipeline, 3))[0].ep;
    assert_eq!((ep("TP1"), ep("DP4 EP4")), (0, 3 * 32 * 4 * copies * 3 / 4));
    // Of half of the tokens each, to both ranks of an expert.
    assert_eq!(ep("TP2 SP DP2 EP2"), ep("DP4 EP4"));
    assert_eq!(ep("TP2 SP DP2 EP4 ETP1"), ep("DP4 EP4") / 2);
    // Under perfect balance every rank computes the same number of token copies in every layout.
    let units = |layout: &str| {
        let job = job(mixtral_8x7b(), layout, ScheduleKind::NoPipeline, 1);
        job.units(&job.stages.stages()[0])[1].ops.iter().map(|op| op.flops[0]).sum::<f64>()
    };
    let kept = |decoder: Decoder, layout: &str| {
        let job = job(decoder, layout, ScheduleKind::NoPipeline, 1);
        UnitMemory::new(&job.units(&job.stages.stages()[0])[1], &job).kept
    };
    let (tokens, h, f) = (2 * 1024, 4096, 14_336);
    let (dense, ids) = (kept(llama3_8b(), "DP4"), tokens * (4 * 8 + 8 * 2));
    assert_eq!(kept(mixtral_8x7b(), "DP4 EP4"), dense - 2 * tokens * 3 * f + 2 * 2 * tokens * (h + 3 * f) + ids);
    assert_eq!(units("DP4 EP4"), units("DP4"));
    assert_eq!(units("TP2 SP DP2 EP2"), units("TP2 SP DP2 EP4 ETP1"));
}

/// The model card's 46,702,792,704 parameters, of which 45,097,156,608 are in experts, and Megatron's test vector.
#[test]
fn experts_are_cut_over_their_own_ranks() {
    const EXPERTS: u64 = 32 * 8 * 3 * 4096 * 14_336;
    let rest = 46_702_792_704 - EXPERTS;
    let on = |layout: &str| memory_of(&job(mixtral_8x7b(), layout, ScheduleKind::NoPipeline, 1).on_gpus())[0].states;
    for (layout, experts) in [("TP1", EXPERTS), ("DP8 EP8", EXPERTS / 8), ("DP8 EP2", EXPERTS / 2)] {
        assert_eq!(on(layout).weights, 2 * (rest + experts), "{layout}");
    }
    // Four ranks hold the same experts, eight the same rest.
    let states = on("DP8 EP2 ZeRO1");
    assert_eq!((states.master, states.moments), (4 * (rest / 8 + EXPERTS / 8), 8 * (rest / 8 + EXPERTS / 8)));
    // Nobody else holds these.
    assert_eq!(on("DP8 EP8 ZeRO1").master, 4 * (rest / 8 + EXPERTS / 8));
    let whole = on("TP2 DP4 EP8 ETP1").weights - on("TP2 DP4 EP4").weights;
    assert_eq!(whole, 0, "eight whole experts or four halves");
    let per_token = mixtral_8x7b().flop_shape(4096).per_token(AttentionCount::Causal);
    assert!((per_token / 1e9 - 79.71).abs() < 5e-3);
}

#[test]
fn arithmetic_is_megatrons_count() {
    let mixed = Experts { dense_layers: vec![0, 1, 5], shared: 2048, ..mixtral_8x7b().experts.unwrap() };
    let mixed = Decoder { experts: Some(mixed), ..mixtral_8x7b() };
    // Queries without a latent, as Moonlight's.
    let latent = deepseek_v3().latent.map(|latent| Latent { queries: None, ..latent });
    let direct = Decoder { mtp: 0, latent, ..deepseek_v3() };
    for decoder in [llama3_8b(), gpt(), mixtral_8x7b(), mixed, deepseek_v3(), direct] {
        let job = single(decoder);
        let units: Vec<_> = job.stages.stages().iter().flat_map(|stage| job.units(stage)).collect();
        let forward: f64 = units.iter().flat_map(|unit| &unit.ops).map(|op| op.flops[0]).sum();
        let per_token = job.decoder.flop_shape(1024).per_token(AttentionCount::Causal);
        let counted = 3.0 * forward / (2.0 * 1024.0);
        assert!((counted / per_token - 1.0).abs() < 1e-9, "{counted} {per_token}");
    }
}

/// Multiplications of a token in the matrices of a layer, added up by hand.
#[test]
fn flops_of_small_experts_and_latents() {
    let flops = |decoder: Decoder, seq| decoder.flop_shape(seq).per_token(AttentionCount::Causal);
    let qwen = Decoder { layers: 16, ..qwen3_30b_a3b() };
    let attention = 2048 * (4096 + 2 * 512) + 4096 * 2048;
    let layers = 16 * (attention + 8 * 3 * 2048 * 768);
    let scores = 16 * 32 * (128 + 128) * 4096 / 2;
    let expected = 6 * (layers + 2048 * 151_936 + scores);
    assert_eq!((flops(qwen, 4096), expected), (expected as f64, 8_913_420_288u64));
    // One layer without experts, three with them and that of the module, which also joins two vectors and has logits.
    let experts = Experts { count: 32, dense_layers: vec![0], ..deepseek_v3().experts.unwrap() };
    let deepseek = Decoder { layers: 4, experts: Some(experts), ..deepseek_v3() };
    let queries = 7168 * 1536 + 1536 * 128 * 192;
    let attention = queries + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168;
    let layers = 5 * attention + 3 * 7168 * 18_432 + 4 * (8 + 1) * 3 * 7168 * 2048;
    let scores = 5 * 128 * (192 + 128) * 4096 / 2;
    let expected = 6 * (layers + 2 * 7168 * 7168 + 2 * 7168 * 129_280 + scores);
    assert_eq!((flops(deepseek, 4096), expected), (expected as f64, 31_757_303_808u64));
}
