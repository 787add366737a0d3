//! Time, layouts and reports.

use super::*;

#[test]
fn layouts_of_a_mixture_are_found() {
    let asked = Job { seq: 4096, micro_batch: 1, ..job(mixtral(), "DP8 EP8 ZeRO1", ScheduleKind::NoPipeline, 2) };
    let found = wish(&asked.on_gpus(), 8, 130);
    assert!(found.best.iter().any(|candidate| candidate.job.layout.ep > 1));
    let dense = wish(&Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) }, 8, 80);
    assert!(dense.best.iter().all(|candidate| candidate.job.layout.ep == 1));
}

#[test]
fn steps_take_as_long_as_was_measured() {
    // benchmarks/README.md, seconds of a step on H200s. Routers of the mixtures were balanced by force.
    let full = Recompute { granularity: Granularity::Full, ..Recompute::default() };
    let rows = |decoder: Decoder, layout, micro_batch, micro_batches, seq| Job {
        micro_batch,
        seq,
        ..job(decoder, layout, ScheduleKind::NoPipeline, micro_batches).on_gpus()
    };
    let dense = |layout, micro_batches, seq| rows(llama3_8b(), layout, 1, micro_batches, seq);
    let mixture = |layout| rows(Decoder { layers: 8, ..mixtral() }, layout, 2, 2, 4096);
    let qwen = MixtralConfig { num_hidden_layers: 16, ..MixtralConfig::qwen3_30b_a3b() };
    let qwen = rows(Decoder::from(&FamilyConfig::Mixtral(qwen)), "DP2 EP2 ZeRO1", 2, 2, 4096);
    let small = Decoder::from(&FamilyConfig::Llama(LlamaConfig::llama3_1b()));
    for (name, job, measured) in [
        ("1B", rows(small, "DP1", 4, 1, 4096), 0.246),
        ("8B", dense("DP2 ZeRO1", 2, 8192), 1.488),
        ("8B over two", rows(llama3_8b(), "TP2 SP", 2, 2, 8192), 1.471),
        ("8B over four", rows(llama3_8b(), "TP4 SP", 2, 4, 8192), 1.563),
        ("8B in FP8", Job { fp8: 0..32, ..dense("DP2 ZeRO2", 2, 8192) }, 1.138),
        ("8B, sequences over four", Job { recompute: full, ..dense("CP4 ZeRO2", 1, 65_536) }, 4.325),
        ("a Mixtral", mixture("DP2 EP2 ZeRO1"), 0.635),
        ("a Mixtral in FP8", Job { fp8: 0..8, ..mixture("DP2 EP2 ZeRO1") }, 0.486),
        ("a Mixtral over four", mixture("DP4 EP4 ZeRO1"), 0.614),
        ("Qwen3-MoE", qwen.clone(), 0.403),
        ("Qwen3-MoE in FP8 but experts", Job { fp8: 0..16, fp8_experts: false, ..qwen.clone() }, 0.390),
        ("Qwen3-MoE in FP8", Job { fp8: 0..16, ..qwen }, 0.603),
    ] {
        let planned = Plan::new(job, &h200()).unwrap().time.step;
        assert!((planned / measured - 1.0).abs() < 0.065, "{name}: {planned} s planned, {measured} s measured");
    }
    let of = |layout| Job { seq: 8192, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 1) };
    let plan = Plan::new(of("DP8 ZeRO2"), &h200()).unwrap();
    let sharded = Plan::new(of("DP8 ZeRO3"), &h200()).unwrap();
    assert!(sharded.time.recompute > 0.2 * sharded.time.step && sharded.memory[0].peak() < plan.memory[0].peak() / 2);
    let parts: f64 = plan.time.parts().iter().map(|(_, seconds)| seconds).sum();
    assert!((parts / plan.time.step - 1.0).abs() < 0.01, "{:?}", plan.time);
}

/// Small experts in FP8 have a product each; what a plan says of that is what was measured (docs/fp8.md).
#[test]
fn small_experts_are_quicker_without_fp8() {
    let rows = |decoder: Decoder, layers: usize| Job {
        seq: 4096,
        fp8: 0..layers,
        ..job(decoder, "DP2 EP2 ZeRO1", ScheduleKind::NoPipeline, 2).on_gpus()
    };
    let quicker = |job: &Job| Plan::new(job.clone(), &h200()).unwrap().quicker_without_fp8_experts(&h200());
    let qwen = MixtralConfig { num_hidden_layers: 16, ..MixtralConfig::qwen3_30b_a3b() };
    let small = rows(Decoder::from(&FamilyConfig::Mixtral(qwen)), 16);
    let large = rows(Decoder { layers: 8, ..mixtral() }, 8);
    let without = Job { fp8_experts: false, ..small.clone() };
    let step = |job: &Job| Plan::new(job.clone(), &h200()).unwrap().time.step;
    assert_eq!(quicker(&small), Some(step(&without)));
    assert!(step(&without) < 0.85 * step(&small) && step(&without) < step(&Job { fp8: 0..0, ..small }));
    assert_eq!(
        [quicker(&large), quicker(&without), quicker(&rows(Decoder { layers: 8, ..llama3_8b() }, 8))],
        [None; 3]
    );
    assert!(report::describe(&without).ends_with(", fp8 but experts"), "{}", report::describe(&without));
}

/// Attention inside documents costs as much as in rows of their length.
#[test]
fn attention_stays_inside_documents() {
    let attention = |job: &Job| -> f64 {
        let units = job.units(&job.stages.stages()[0]);
        units.iter().flat_map(|unit| &unit.ops).filter(|op| op.attention).map(|op| op.flops[0]).sum()
    };
    let rows = |seq, micro_batch, documents| Job { seq, micro_batch, documents, ..single(llama3_8b()) };
    assert_eq!(attention(&rows(8192, 1, Some(1024))), attention(&rows(1024, 8, None)));
    assert_eq!(attention(&rows(8192, 1, Some(100_000))), attention(&rows(8192, 1, None)));
    assert!(
        Plan::new(rows(65_536, 1, Some(1024)), &h200()).unwrap().time.step
            < Plan::new(rows(65_536, 1, None), &h200()).unwrap().time.step
    );
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
    let ratio = hardware.with_products(500.0).attention(128)[1] / hardware.attention(128)[1];
    assert!((ratio - 500e12 / hardware.products).abs() < 1e-12);
    assert!(hardware.attention(80) == hardware.attention(96) && hardware.attention(512) == hardware.attention(256));
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
