//! Memory of parameters and passes.

use super::*;
use crate::memory::UnitMemory;

#[test]
fn parameters_are_the_models() {
    // The model cards' 8,030,261,248 and 124,439,808, the latter with 47 tokens of padding.
    let states = |decoder: Decoder| memory_of(&single(decoder))[0].states;
    assert_eq!(states(llama3_8b()).weights, 2 * 8_030_261_248);
    assert_eq!(states(gpt()).weights, 2 * (124_439_808 + 47 * 768));
    // A stage that has only the head holds a copy of a tied embedding.
    let two: u64 = memory_of(&job(gpt(), "PP2", ScheduleKind::OneFOneB, 4)).iter().map(|m| m.states.weights).sum();
    assert_eq!(two - states(gpt()).weights, 2 * 50_304 * 768);
}

/// The model card's 671,026,419,200 with the router's corrections, which are no parameters; a module of multi-token
/// prediction is a layer with three norms and a projection of its own.
#[test]
fn latents_and_further_tokens_have_their_parameters() {
    let weights = |mtp: usize| memory_of(&single(Decoder { mtp, ..deepseek_v3() }))[0].states.weights / 2;
    assert_eq!(weights(0), 671_026_419_200 - 58 * 256);
    let (hidden, attention) = (7168, 187_107_328);
    let layer = attention + 2 * hidden + 256 * hidden + 257 * 3 * hidden * 2048;
    assert_eq!(weights(1) - weights(0), layer + 3 * hidden + 2 * hidden * hidden);
    assert_eq!(weights(2) - weights(1), weights(1) - weights(0));
    // The module's embedding on the head's stage is a copy.
    let copied = |mtp: usize| {
        let decoder = Decoder { mtp, layers: 60, ..deepseek_v3() };
        let weights = |job: &Job| memory_of(job).iter().map(|rank| rank.states.weights).sum::<u64>();
        weights(&job(decoder.clone(), "PP2", ScheduleKind::OneFOneB, 4)) - weights(&single(decoder))
    };
    assert_eq!([copied(0), copied(1)], [0, 2 * 129_280 * hidden]);
}

/// Latent attention keeps latents and whole heads, where a layer of the same heads without latents keeps queries, keys
/// and values: per token the norms' outputs, the down projection's, and queries, keys, `[keys | values]`, output.
#[test]
fn latent_attention_keeps_its_latents() {
    let job = single(deepseek_v3());
    let kept = UnitMemory::new(&job.units(&job.stages.stages()[0])[1], &job).kept;
    let (hidden, heads, ffn) = (7168, 128, 18_432);
    let latents = 1536 + 512 + 64;
    let attention = 2 * hidden + latents + 1536 + 512 + heads * (192 + 192 + 256 + 128);
    assert_eq!(kept, 2 * 1024 * (2 * (attention + 2 * hidden + 3 * ffn) + 4 * heads));
    let selective = Job { recompute: Recompute::selective(&[Module::CoreAttention]), ..job };
    let unit = &selective.units(&selective.stages.stages()[0])[1];
    assert_eq!(kept - UnitMemory::new(unit, &selective).kept, 2 * 1024 * heads * (2 * 128 + 4));
    assert_eq!(unit.ops.iter().filter(|op| unit.repeats(op) && op.attention).count(), 1);
}

/// A head in chunks saves its input instead of the logits, works with one chunk of them, and has one more GEMM.
#[test]
fn heads_in_chunks_do_not_save_their_logits() {
    let of = |logits_at_once| {
        let job = Job { logits_at_once, seq: 8192, ..single(llama3_8b()) }.on_gpus();
        let unit = job.units(&job.stages.stages()[0]).pop().unwrap();
        let gemms = unit.ops.iter().filter(|op| op.again).count();
        (UnitMemory::new(&unit, &job), gemms)
    };
    let ((whole, once), (chunks, twice)) = (of(usize::MAX), of(1 << 30));
    // 128,256 logits of each token are 3.9 GiB, in a buffer of 4.
    let (tokens, logits) = (2 * 8192, 1 << 32);
    assert_eq!((once, twice), (0, 1));
    assert_eq!(whole.kept - chunks.kept, logits);
    assert!(chunks.backward < logits / 3 + 4 * 2 * tokens * 4096, "{chunks:?}");
    // Sequences of 32,768 tokens over two ranks are within the usual limit, of 131,072 they are not.
    let usual = |seq| {
        let job = Job { seq, micro_batch: 1, ..job(llama3_8b(), "CP2", ScheduleKind::NoPipeline, 1) };
        memory_of(&job.on_gpus())[0].loss
    };
    assert!(usual(131_072) < usual(32_768));
}

/// On GPUs fp32 gradients are whole all the time under ZeRO 1, sharded under ZeRO 2 with two open buckets of each size,
/// and nothing is copied for a collective or an update.
#[test]
fn gpus_keep_gradients_in_place_and_pay_for_their_libraries() {
    let on = |layout: &str| memory_of(&job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1).on_gpus())[0];
    let per_parameter = |memory: RankMemory| memory.states.total() as f64 / 8_030_261_248.0;
    for (layout, bytes) in [("TP1", 18.0), ("DP8", 18.0), ("DP8 ZeRO1", 6.0 + 12.0 / 8.0)] {
        assert!((per_parameter(on(layout)) - bytes).abs() < 1e-3, "{layout}");
    }
    let (embedding, head, layer) = (128_256 * 4096, 128_256 * 4096 + 4096, 218_112_000);
    let open = 4.0 * f64::from(embedding + head + 2 * layer) / 8_030_261_248.0;
    assert!((per_parameter(on("DP8 ZeRO2")) - (2.0 + 16.0 / 8.0 + open)).abs() < 1e-3);
    assert_eq!((on("DP8").communication, on("DP8 ZeRO1").communication), (0, 0));
    let [alone, dp_ranks, both] = ["TP1", "DP8", "TP2 DP4"].map(|layout| on(layout).libraries);
    assert_eq!(both - dp_ranks, 384 << 20, "a communicator");
    assert!(alone > 1 << 30 && dp_ranks - alone > both - dp_ranks, "{alone} {dp_ranks} {both}");
    // The widest moment works with activations and their gradients, not with gradients of weights.
    let cpu = memory_of(&single(llama3_8b()))[0];
    assert!(on("TP1").working < cpu.working && on("TP1").activations == cpu.activations);
}

/// Under sequence parallelism a column-parallel layer holds its gathered input and the part of its input's gradient
/// while it computes the weight's gradient. Over 8 ranks, whose activations are small, that makes the MLP's first layer
/// the widest moment of a layer, where it was the MLP's last layer with its gathered gradient; over two it is the
/// activation in both cases.
#[test]
fn communications_in_flight_are_counted() {
    let backward = |layout: &str, overlap: bool| {
        let job = Job { overlap, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1).on_gpus() };
        UnitMemory::new(&job.units(&job.stages.stages()[0])[1], &job).backward
    };
    // In sixteenths of the stream: a shard of it is 2; queries, keys and values 3; attention's output 2; the output of
    // the MLP's first layer 14, the activation 7. Attention also saves 4 bytes for each position of a rank's 4 heads.
    let stream = 2 * 2 * 1024 * 4096;
    let sixteenths = |count: u64| stream / 16 * count + 4 * 2 * 1024 * 4;
    let attention = 2 + 2 + 3 + 2;
    // Kept up to there, the gradients of the residual stream, of the layer's output and input, then what is in flight.
    let first = (attention + 2 + 2) + 2 + 14 + 16;
    let last = (attention + 2 + 2 + 14 + 7) + 2 + 16 + 7;
    assert_eq!(backward("TP8 SP", false), sixteenths(last));
    assert_eq!(backward("TP8 SP", true), sixteenths(first + 16 + 2));
    assert_eq!(backward("TP2 SP", true), backward("TP2 SP", false));
    assert_eq!(backward("TP8", true), backward("TP8", false));
}

/// "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): sbh (10 + 24/t) bytes per layer
/// of a GPT in addition to the score matrices, 10/t as well under sequence parallelism. Dropout masks are not saved here (2
/// sbh), and attention saves the log-sum-exp of every position instead of its scores.
#[test]
fn a_layer_keeps_what_the_paper_counts() {
    let (tokens, hidden) = (2 * 1024, 768);
    let sbh = tokens * hidden;
    for (layout, t, between) in [("TP1", 1, 10), ("TP4", 4, 10), ("TP4 SP", 4, 10)] {
        let job = job(gpt(), layout, ScheduleKind::NoPipeline, 1);
        let shards = if job.layout.sp { t } else { 1 };
        let stage = &job.stages.stages()[0];
        let layer = &job.units(stage)[1];
        let kept = UnitMemory::new(layer, &job).kept;
        let statistics = 4 * tokens * 12 / t;
        assert_eq!(kept, (between - 2) * sbh / shards + 24 * sbh / t + statistics, "{layout}");
    }
}

#[test]
fn recomputation_drops_what_it_makes_again() {
    let (tokens, hidden, wide) = (2 * 1024, 4096, 14_336);
    let kept = |recompute: Recompute| memory_of(&Job { recompute, ..single(llama3_8b()) })[0].activations;
    let none = kept(Recompute::default());
    let bytes = |per_token: u64| 32 * 2 * tokens * per_token;
    let only = |module| none - kept(Recompute::selective(&[module]));
    assert_eq!(only(Module::Norms), bytes(2 * hidden));
    assert_eq!(only(Module::MlpActivation), bytes(wide));
    assert_eq!(only(Module::CoreAttention), bytes(hidden) + 32 * 4 * tokens * 32);
    let full = |method, num_layers| {
        kept(Recompute { granularity: Granularity::Full, method, num_layers, ..Recompute::default() })
    };
    let ids = 8 * tokens;
    assert_eq!(full(Method::Uniform, 1), bytes(hidden) + ids);
    assert_eq!(full(Method::Uniform, 4), bytes(hidden) / 4 + ids);
    let layer = (none - ids) / 32;
    assert_eq!(full(Method::Block, 30), ids + 2 * layer + 30 * 2 * tokens * hidden);
    let peak = |recompute| memory_of(&Job { recompute, ..single(llama3_8b()) })[0].peak();
    assert!(peak(Recompute::selective(&ALL)) < peak(Recompute::default()));
}

#[test]
fn schedules_keep_as_many_micro_batches_as_they_say() {
    for (layout, kind) in
        [("PP4", ScheduleKind::GPipe), ("PP4", ScheduleKind::OneFOneB), ("PP4 VPP2", ScheduleKind::Interleaved)]
    {
        let job = job(llama3_8b(), layout, kind, 8);
        let schedule = Schedule::new(job.schedule).unwrap();
        let layers = job.stages.layer_counts();
        let peaks = schedule.peak_activations(|stage| layers[stage] as u64);
        let one = memory_of(&single(llama3_8b()))[0].activations - 8 * 2 * 1024;
        let middle = memory(&job, &schedule)[2].activations;
        assert_eq!(middle, peaks[2] * (one / 32), "{kind}");
    }
    // The first rank of a split backward holds less than if all its saved tensors stayed until its weight gradients.
    let zb = memory_of(&job(llama3_8b(), "PP4", ScheduleKind::ZbH1, 8));
    let plain = memory_of(&job(llama3_8b(), "PP4", ScheduleKind::OneFOneB, 8));
    assert!(zb[3].activations > plain[3].activations && zb[3].activations < plain[0].activations);
}

#[test]
fn fp8_keeps_inputs_in_bytes_and_two_more_copies_of_weights() {
    let job = |fp8| Job { fp8, ..single(llama3_8b()) }.on_gpus();
    let kept = |job: &Job, layer: usize| UnitMemory::new(&job.units(&job.stages.stages()[0])[1 + layer], job).kept;
    let (plain, some) = (job(0..0), job(1..31));
    // Two norms and the activation in bytes instead of bf16; attention saves its own output in both cases.
    let tokens = 2 * 1024;
    assert_eq!(kept(&plain, 1) - kept(&some, 1), tokens * (2 * 4096 + 14_336));
    assert_eq!([0, 31].map(|layer| kept(&some, layer)), [kept(&plain, 0); 2], "first and last layer in bf16");
    let matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336;
    assert_eq!(memory_of(&some)[0].states.quantised, 30 * 2 * matrices);
    assert_eq!(memory_of(&plain)[0].states.quantised, 0);
    // Of an MoE model's attention one norm, and the token copies for two experts.
    let moe = |fp8| Job { fp8, ..single(mixtral_8x7b()) }.on_gpus();
    let saved = kept(&moe(0..0), 1) - kept(&moe(1..31), 1);
    assert_eq!(saved, tokens * 4096 + 2 * tokens * (4096 + 14_336));
    let matrices = matrices + 7 * 3 * 4096 * 14_336;
    assert_eq!(memory_of(&moe(1..31))[0].states.quantised, 30 * 2 * matrices);
    // Without its experts the norm is left, and attention's matrices.
    let but_experts = Job { fp8_experts: false, ..moe(1..31) };
    assert_eq!(kept(&moe(0..0), 1) - kept(&but_experts, 1), tokens * 4096);
    let attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096;
    assert_eq!(memory_of(&but_experts)[0].states.quantised, 30 * 2 * attention);
    let sharded = Job { fp8: 0..32, ..super::job(llama3_8b(), "DP4 ZeRO3", ScheduleKind::NoPipeline, 1) }.on_gpus();
    assert_eq!(memory_of(&sharded)[0].states.quantised, 0, "quantised whenever they are gathered");
    // Frozen weights are not gathered: they are whole everywhere, and quantised once.
    let base = Job { adapters: Some(all_linear(16)), ..sharded };
    assert_eq!(memory_of(&base)[0].states.quantised, 32 * 2 * (attention + 3 * 4096 * 14_336));
}

/// A GEMM with another size is multiplied without FP8, as `training.dtype` has it.
#[test]
fn sizes_that_fp8_has_no_gemms_of_stay_out() {
    let states = |intermediate, fp8_blocks| {
        let decoder = Decoder { intermediate, layers: 1, ..llama3_8b() };
        memory_of(&Job { fp8: 0..1, fp8_blocks, ..single(decoder) }.on_gpus())[0].states.quantised
    };
    let attention = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096);
    let (first, mlp) = (|width: u64| 2 * 2 * 4096 * width, |width: u64| 2 * 3 * 4096 * width);
    let [tensors, blocks] = [false, true];
    assert_eq!(states(14_400, tensors), attention + mlp(14_400));
    assert_eq!(
        states(14_400, blocks),
        attention + first(14_400),
        "14,400 are no multiple of 128, gate and up together are"
    );
    assert_eq!(states(14_464, blocks), attention + mlp(14_464));
    assert_eq!([14_408, 14_404].map(|width| states(width, tensors)), [attention + first(14_408), attention]);
    // Of experts too, whose tokens are padded.
    let of_experts = |intermediate: usize| {
        let mixtral = Decoder { layers: 1, ..mixtral_8x7b() };
        let experts = mixtral.experts.clone().map(|experts| Experts { intermediate, ..experts });
        let decoder = Decoder { experts, ..mixtral };
        memory_of(&Job { fp8: 0..1, ..single(decoder) }.on_gpus())[0].states.quantised
    };
    assert_eq!([14_404, 14_400].map(of_experts), [attention, attention + 8 * mlp(14_400)]);
    // Of 384 tokens, two ranks have 192 each under sequence parallelism.
    let by_two = |layout: &str| {
        let job = super::job(Decoder { layers: 1, ..llama3_8b() }, layout, ScheduleKind::NoPipeline, 1);
        memory_of(&Job { fp8: 0..1, fp8_blocks: true, seq: 384, micro_batch: 1, ..job }.on_gpus())[0].states.quantised
    };
    assert_eq!((by_two("TP2"), by_two("TP2 SP")), ((attention + mlp(14_336)) / 2, 0));
}
