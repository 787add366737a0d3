use backend_dist::mesh::ParallelLayout;
use models::recompute::{Granularity, Method, Module, Recompute};

use super::gpus::{self, Hardware};
use super::*;
use crate::flops::AttentionCount;
use crate::schedule::stages::Split;
use crate::schedule::{ScheduleKind, bounds};

const ALL: [Module; 3] = [Module::CoreAttention, Module::MlpActivation, Module::Norms];

fn llama3_8b() -> Decoder {
    Decoder {
        vocab: 128_256,
        vocab_multiple: 128,
        hidden: 4096,
        intermediate: 14_336,
        experts: None,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        window: None,
        gated: true,
        head_norms: false,
        norm_bias: false,
        attention_bias: false,
        mlp_bias: false,
        positions: None,
        tied: false,
    }
}

/// Mixtral 8x7B.
fn mixtral() -> Decoder {
    let experts = Experts { count: 8, top_k: 2, intermediate: 14_336, shared: 0, dense_layers: Vec::new() };
    Decoder { vocab: 32_000, experts: Some(experts), ..llama3_8b() }
}

/// A GPT with 4 hidden² in the MLP, as the papers have it.
fn gpt() -> Decoder {
    Decoder {
        vocab: 50_257,
        hidden: 768,
        intermediate: 3072,
        layers: 12,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        gated: false,
        norm_bias: true,
        attention_bias: true,
        mlp_bias: true,
        positions: Some(1024),
        tied: true,
        ..llama3_8b()
    }
}

fn job(decoder: Decoder, layout: &str, kind: ScheduleKind, micro_batches: usize) -> Job {
    let layout: ParallelLayout = layout.parse().unwrap();
    let spec = ScheduleSpec::new(kind, layout.pp, micro_batches).with_virtual_pipeline(layout.vpp);
    Job {
        stages: Split::equal(decoder.layers, spec.placement()).layout().unwrap(),
        decoder,
        layout,
        schedule: spec,
        micro_batch: 2,
        seq: 1024,
        element: 2,
        moments: Moments::ADAMW,
        recompute: Recompute::default(),
        fp8: 0..0,
        fp8_weights: true,
        gpu: false,
        overlap: true,
    }
}

fn single(decoder: Decoder) -> Job {
    job(decoder, "TP1", ScheduleKind::NoPipeline, 1)
}

fn memory_of(job: &Job) -> Vec<RankMemory> {
    memory(job, &Schedule::new(job.schedule).unwrap())
}

fn h200() -> Hardware {
    Hardware::of(gpus::find("h200").unwrap(), 2)
}

#[test]
fn parameters_are_the_models() {
    // The model cards' 8,030,261,248 and 124,439,808, the latter with 47 rows of padding.
    let states = |decoder: Decoder| memory_of(&single(decoder))[0].states;
    assert_eq!(states(llama3_8b()).weights, 2 * 8_030_261_248);
    assert_eq!(states(gpt()).weights, 2 * (124_439_808 + 47 * 768));
    // A stage that has only the head holds a copy of a tied embedding.
    let two: u64 = memory_of(&job(gpt(), "PP2", ScheduleKind::OneFOneB, 4)).iter().map(|m| m.states.weights).sum();
    assert_eq!(two - states(gpt()).weights, 2 * 50_304 * 768);
}

/// Mixed precision with AdamW: 2 + 4 + 4 + 8 bytes per parameter, cut by the number of replicas (arXiv 1910.02054 section 5
/// with fp32 gradients).
#[test]
fn zero_cuts_states_as_the_paper_says() {
    let per_parameter = |layout: &str, element: u64| {
        let job = Job { element, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1) };
        memory_of(&job)[0].states.total() as f64 / 8_030_261_248.0
    };
    for (layout, bytes) in [("DP8", 18.0), ("DP8 ZeRO1", 6.0 + 12.0 / 8.0), ("DP8 ZeRO2", 2.0 + 16.0 / 8.0)] {
        assert!((per_parameter(layout, 2) - bytes).abs() < 1e-3, "{layout}");
    }
    // Narrow weights are gathered from the wide shard; they have no shard of their own.
    assert!((per_parameter("DP8 ZeRO3", 2) - 2.0).abs() < 1e-3);
    assert!((per_parameter("DP8 ZeRO3", 4) - 2.0).abs() < 1e-3);
    assert!((per_parameter("ZeRO3", 2) - 18.0).abs() < 1e-3, "nobody to share with");
    assert!((per_parameter("DP8", 8) - 32.0).abs() < 1e-3);
}

/// On GPUs fp32 gradients are whole all the time under ZeRO 1, cut under ZeRO 2 beside two open buckets of each size, and
/// nothing is copied for an exchange or an update.
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
    let [alone, replicas, both] = ["TP1", "DP8", "TP2 DP4"].map(|layout| on(layout).libraries);
    assert!(alone > 1 << 30 && both - replicas == replicas - alone, "{alone} {replicas} {both}");
    // The widest moment works with activations and their gradients, not with gradients of weights.
    let cpu = memory_of(&single(llama3_8b()))[0];
    assert!(on("TP1").working < cpu.working && on("TP1").activations == cpu.activations);
}

/// Under sequence parallelism a column-parallel layer holds its gathered input and the part of its input's gradient while
/// it computes the weight's gradient. Over 8 ranks, which cut activations small, that makes the MLP's first layer the widest
/// moment of a layer, where it was the MLP's last layer with its gathered gradient; over two it is the activation either way.
#[test]
fn exchanges_in_flight_are_counted() {
    let backward = |layout: &str, overlap: bool| {
        let job = Job { overlap, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1).on_gpus() };
        super::memory::UnitMemory::new(&job.units(&job.stages.stages()[0])[1], &job).backward
    };
    // In sixteenths of the stream: a part of it is 2; queries, keys and values 3; attention's output 2; the product of the
    // MLP's first layer 14, the activation 7. Beside them attention keeps 4 bytes for each row of a rank's 4 heads.
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

#[test]
fn optimizers_differ_in_their_moments() {
    let moments = |moments| memory_of(&Job { moments, ..single(llama3_8b()) })[0].states.moments;
    assert_eq!(moments(Moments::ONE) * 2, moments(Moments::ADAMW));
    assert_eq!(moments(Moments::NONE), 0);
    let matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336);
    assert_eq!(moments(Moments::ADAMW) - moments(Moments::MUON), 4 * matrices);
}

/// "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): sbh (10 + 24/t) bytes per layer of a
/// GPT beside the score matrices, 10/t as well under sequence parallelism. Of them are no dropout masks here (2 sbh),
/// and attention keeps the log-sum-exp of every row instead of its scores.
#[test]
fn a_layer_keeps_what_the_paper_counts() {
    let (tokens, hidden) = (2 * 1024, 768);
    let sbh = tokens * hidden;
    for (layout, t, between) in [("TP1", 1, 10), ("TP4", 4, 10), ("TP4 SP", 4, 10)] {
        let job = job(gpt(), layout, ScheduleKind::NoPipeline, 1);
        let cut = if job.layout.sp { t } else { 1 };
        let stage = &job.stages.stages()[0];
        let layer = &job.units(stage)[1];
        let kept = super::memory::UnitMemory::new(layer, &job).kept;
        let statistics = 4 * tokens * 12 / t;
        assert_eq!(kept, (between - 2) * sbh / cut + 24 * sbh / t + statistics, "{layout}");
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
    // The first rank of a split backward holds less than if all it kept stayed until its weight gradients.
    let zb = memory_of(&job(llama3_8b(), "PP4", ScheduleKind::ZbH1, 8));
    let plain = memory_of(&job(llama3_8b(), "PP4", ScheduleKind::OneFOneB, 8));
    assert!(zb[3].activations > plain[3].activations && zb[3].activations < plain[0].activations);
}

/// Two all-reduces per layer in each direction, the same bytes as gathers and scatters under sequence parallelism, where
/// gathered inputs are gathered again for the weights' gradients (arXiv 2205.05198 section 4.2.2).
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

fn traffic_of(job: &Job) -> Vec<Traffic> {
    traffic(job, &Schedule::new(job.schedule).unwrap())
}

#[test]
fn replicas_and_stages_exchange_what_they_must() {
    let parameters = 8_030_261_248;
    let sent = |layout: &str| traffic_of(&job(llama3_8b(), layout, ScheduleKind::NoPipeline, 4))[0].dp;
    let part = |bytes: u64| bytes * 7 / 8;
    assert_eq!(sent("DP8"), 2 * part(4 * parameters));
    assert_eq!(sent("DP8 ZeRO1"), part(4 * parameters) + part(2 * parameters));
    assert_eq!(sent("DP8 ZeRO2"), 4 * part(4 * parameters) + part(2 * parameters));
    assert_eq!(sent("DP8 ZeRO3"), 4 * (part(4 * parameters) + 2 * part(2 * parameters)));

    let pp = |layout: &str, kind| traffic_of(&job(llama3_8b(), layout, kind, 4)).iter().map(|t| t.pp).sum::<u64>();
    let boundary = 2 * 2 * 1024 * 4096;
    assert_eq!(pp("PP4", ScheduleKind::OneFOneB), 4 * 2 * 3 * boundary);
    assert_eq!(pp("PP4 VPP2", ScheduleKind::Interleaved), 4 * 2 * 7 * boundary);
    assert_eq!(pp("TP2 SP PP4", ScheduleKind::OneFOneB), 4 * 2 * 3 * boundary / 2);
    let tied = traffic_of(&job(gpt(), "PP2", ScheduleKind::OneFOneB, 4));
    let table = 4 * 50_304 * 768;
    assert_eq!(tied.iter().map(|t| t.pp).sum::<u64>(), 2 * table + 4 * 2 * 2 * 2 * 1024 * 768);
}

#[test]
fn arithmetic_is_megatrons_count() {
    let mixed = Experts { dense_layers: vec![0, 1, 5], shared: 2048, ..mixtral().experts.unwrap() };
    for decoder in [llama3_8b(), gpt(), mixtral(), Decoder { experts: Some(mixed), ..mixtral() }] {
        let job = single(decoder);
        let units: Vec<_> = job.stages.stages().iter().flat_map(|stage| job.units(stage)).collect();
        let forward: f64 = units.iter().flat_map(|unit| &unit.ops).map(|op| op.flops[0]).sum();
        let per_token = job.decoder.flop_shape(1024).per_token(AttentionCount::Causal);
        let counted = 3.0 * forward / (2.0 * 1024.0);
        assert!((counted / per_token - 1.0).abs() < 1e-9, "{counted} {per_token}");
    }
}

/// The model card's 46,702,792,704 parameters, of which 45,097,156,608 are in experts, and Megatron's test vector.
#[test]
fn experts_are_cut_over_their_own_ranks() {
    const EXPERTS: u64 = 32 * 8 * 3 * 4096 * 14_336;
    let rest = 46_702_792_704 - EXPERTS;
    let on = |layout: &str| memory_of(&job(mixtral(), layout, ScheduleKind::NoPipeline, 1).on_gpus())[0].states;
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
    let per_token = mixtral().flop_shape(4096).per_token(AttentionCount::Causal);
    assert!((per_token / 1e9 - 79.71).abs() < 5e-3);
}

/// Two copies of every token go to the experts' ranks and come back, in each direction of a pass.
#[test]
fn copies_of_tokens_are_sent_to_experts() {
    let copies = 2 * 2 * 1024 * 2 * 4096;
    let ep = |layout: &str| traffic_of(&job(mixtral(), layout, ScheduleKind::NoPipeline, 3))[0].ep;
    assert_eq!((ep("TP1"), ep("DP4 EP4")), (0, 3 * 32 * 4 * copies * 3 / 4));
    // Of half of the tokens each, to both ranks of an expert.
    assert_eq!(ep("TP2 SP DP2 EP2"), ep("DP4 EP4"));
    assert_eq!(ep("TP2 SP DP2 EP4 ETP1"), ep("DP4 EP4") / 2);
    // Experts compute what they are sent: as many rows on every rank, whatever the layout.
    let units = |layout: &str| {
        let job = job(mixtral(), layout, ScheduleKind::NoPipeline, 1);
        job.units(&job.stages.stages()[0])[1].ops.iter().map(|op| op.flops[0]).sum::<f64>()
    };
    let kept = |decoder: Decoder, layout: &str| {
        let job = job(decoder, layout, ScheduleKind::NoPipeline, 1);
        super::memory::UnitMemory::new(&job.units(&job.stages.stages()[0])[1], &job).kept
    };
    let (tokens, h, f) = (2 * 1024, 4096, 14_336);
    let (dense, ids) = (kept(llama3_8b(), "DP4"), tokens * (4 * 8 + 8 * 2));
    assert_eq!(kept(mixtral(), "DP4 EP4"), dense - 2 * tokens * 3 * f + 2 * 2 * tokens * (h + 3 * f) + ids);
    assert_eq!(units("DP4 EP4"), units("DP4"));
    assert_eq!(units("TP2 SP DP2 EP2"), units("TP2 SP DP2 EP4 ETP1"));
}

#[test]
fn layouts_of_a_mixture_are_found() {
    let asked = Job { seq: 4096, micro_batch: 1, ..job(mixtral(), "DP8 EP8 ZeRO1", ScheduleKind::NoPipeline, 2) };
    let found = wish(&asked.on_gpus(), 8, 130);
    assert!(found.best.iter().any(|candidate| candidate.job.layout.ep > 1));
    let dense = wish(&Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) }, 8, 80);
    assert!(dense.best.iter().all(|candidate| candidate.job.layout.ep == 1));
}

#[test]
fn a_step_takes_as_long_as_was_measured() {
    // PyTorch FSDP2 with torch.compile on eight H200: 10,453 tokens/s per GPU with two rows of 8,192 tokens. It keeps
    // activations, as ZeRO 2 does here.
    let of = |layout| Job { seq: 8192, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1) };
    let plan = Plan::new(of("DP8 ZeRO2"), &h200()).unwrap();
    let each = plan.time.tokens_per_second / 8.0;
    assert!((each / 10_453.0 - 1.0).abs() < 0.03, "{each}");
    let sharded = Plan::new(of("DP8 ZeRO3"), &h200()).unwrap();
    assert!(sharded.time.recompute > 0.2 * sharded.time.step && sharded.memory[0].peak() < plan.memory[0].peak() / 2);
    let parts: f64 = plan.time.parts().iter().map(|(_, seconds)| seconds).sum();
    assert!((parts / plan.time.step - 1.0).abs() < 0.01, "{:?}", plan.time);
}

#[test]
fn the_bubble_is_the_schedules() {
    let decoder = Decoder { vocab: 128, ..llama3_8b() };
    let job = job(decoder, "PP4", ScheduleKind::OneFOneB, 8);
    let plan = Plan::new(job, &h200()).unwrap();
    let formula = 3.0 / 11.0;
    assert!((plan.time.idle_share - formula).abs() < 0.01, "{}", plan.time.idle_share);
    assert_eq!(bounds::bubble(&plan.job.schedule, 1, 1, 1), Some(9));
    assert_eq!(plan.fullest(), 0);
}

fn wish(job: &Job, gpus: usize, memory_gib: u64) -> Found {
    let hardware = Hardware { memory: memory_gib << 30, ..h200() };
    search(&Wish { job, gpus, hardware: &hardware, legal: &|layout| 8 % layout.tp == 0 })
}

#[test]
fn the_best_layouts_fit_and_are_sorted() {
    let asked = Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) };
    let found = wish(&asked, 8, 80);
    assert!(found.best.len() > 2 && found.best.len() <= 5);
    assert!(found.best.is_sorted_by(|a, b| a.time.step <= b.time.step));
    for candidate in &found.best {
        let job = &candidate.job;
        assert!(candidate.memory.peak() <= 80 << 30);
        assert_eq!((job.layout.world_size(), job.global_batch()), (8, 32), "{:?}", job.layout);
        assert!(job.schedule.check().is_ok());
    }
    // It takes 144 GB as it was asked for: the nearest shards, and leaves the other sizes alone.
    let nearest = found.nearest.unwrap().job;
    assert_eq!((nearest.layout.dp, nearest.layout.tp, nearest.layout.pp), (8, 1, 1));
    assert!(nearest.layout.zero > 0);
    assert!(wish(&asked, 8, 4).best.is_empty() && wish(&asked, 8, 4).nearest.is_none());
    let more = wish(&asked, 16, 80);
    assert!(more.best[0].time.step < found.best[0].time.step);
}

#[test]
fn uneven_layers_are_still_a_layout() {
    let decoder = Decoder { layers: 30, ..llama3_8b() };
    let found = wish(&single(Decoder { vocab: 1280, ..decoder }), 4, 30);
    let four = found.best.iter().find(|candidate| candidate.job.layout.pp == 4);
    assert!(four.is_some_and(|candidate| candidate.job.stages.num_layers() == 30));
}

#[test]
fn gpus_are_known_by_name() {
    assert_eq!(gpus::find("H100").unwrap().memory, 80.0);
    let error = gpus::find("h10").unwrap_err();
    assert!(error.contains("`h10` is unknown; legal: h100,") && error.contains("a100-80gb"), "{error}");
    let hardware = h200();
    assert_eq!(hardware.with_products(500.0).attention / hardware.attention, 500e12 / hardware.products);
    assert!(hardware.between(8, 1) > hardware.between(8, 8));
    assert_eq!(hardware.between(16, 1), hardware.link.min(8.0 * hardware.network));
}

#[test]
fn a_report_says_what_fits() {
    let asked = Job { seq: 8192, ..job(llama3_8b(), "PP2 DP4", ScheduleKind::OneFOneB, 4) };
    let hardware = Hardware { memory: 60 << 30, ..h200() };
    let plan = Plan::new(asked.clone(), &hardware).unwrap();
    let found = wish(&asked, 8, 60);
    let report =
        Report { plan: &plan, hardware: &hardware, name: "h200", all_ranks: true, gpus: 8, found: Some(&found) };
    let text = report.to_string();
    for part in [
        "layout       PP2 DP4 1f1b, micro-batch 2 on 8 x h200",
        "DOES NOT FIT",
        "  rank 1 ",
        "weights 7.5 GiB, gradients 15.0 GiB",
        "bubble       ",
        "sent         tp 0 B, pp ",
        "nearest that fits\n",
        "fastest of ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!((bytes(1023), bytes(1536), bytes(3 << 30)), ("1023 B".into(), "1.5 KiB".into(), "3.0 GiB".into()));
}

#[test]
fn fp8_keeps_inputs_in_bytes_and_two_more_copies_of_weights() {
    let job = |fp8| Job { fp8, ..single(llama3_8b()) }.on_gpus();
    let kept = |job: &Job, layer: usize| {
        super::memory::UnitMemory::new(&job.units(&job.stages.stages()[0])[1 + layer], job).kept
    };
    let (plain, some) = (job(0..0), job(1..31));
    // Two norms and the activation in bytes instead of bf16; attention keeps its own output either way.
    let tokens = 2 * 1024;
    assert_eq!(kept(&plain, 1) - kept(&some, 1), tokens * (2 * 4096 + 14_336));
    assert_eq!([0, 31].map(|layer| kept(&some, layer)), [kept(&plain, 0); 2], "first and last layer in bf16");
    let matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336;
    assert_eq!(memory_of(&some)[0].states.quantised, 30 * 2 * matrices);
    assert_eq!(memory_of(&plain)[0].states.quantised, 0);
    let sharded = Job { fp8: 0..32, ..self::job(llama3_8b(), "DP4 ZeRO3", ScheduleKind::NoPipeline, 1) }.on_gpus();
    assert_eq!(memory_of(&sharded)[0].states.quantised, 0, "quantised whenever they are gathered");
}
