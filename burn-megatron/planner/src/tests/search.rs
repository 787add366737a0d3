//! Time, layouts and reports.

use super::*;

#[test]
fn layouts_of_a_moe_are_found() {
    let asked = Job { seq: 4096, micro_batch: 1, ..job(mixtral_8x7b(), "DP8 EP8 ZeRO1", ScheduleKind::NoPipeline, 2) };
    let found = searched(&asked.on_gpus(), 8, 130);
    assert!(found.best.iter().any(|candidate| candidate.job.layout.ep > 1));
    let dense = searched(&Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) }, 8, 80);
    assert!(dense.best.iter().all(|candidate| candidate.job.layout.ep == 1));
}

#[test]
fn steps_take_as_long_as_was_measured() {
    // benchmarks/README.md, seconds of a step on H200s. Routers of the MoE models were forced to balance.
    let full = Recompute { granularity: Granularity::Full, ..Recompute::default() };
    let sequences = |decoder: Decoder, layout, micro_batch, micro_batches, seq| Job {
        micro_batch,
        seq,
        ..job(decoder, layout, ScheduleKind::NoPipeline, micro_batches).on_gpus()
    };
    let dense = |layout, micro_batches, seq| sequences(llama3_8b(), layout, 1, micro_batches, seq);
    let moe = |layout| sequences(Decoder { layers: 8, ..mixtral_8x7b() }, layout, 2, 2, 4096);
    let qwen = Decoder { layers: 16, ..qwen3_30b_a3b() };
    let qwen = sequences(qwen, "DP2 EP2 ZeRO1", 2, 2, 4096);
    // On one GPU.
    let alone = |decoder: Decoder, layers| Job {
        fp8: 0..layers,
        ..sequences(Decoder { layers, ..decoder }, "DP1", 2, 4, 4096)
    };
    for (name, job, measured) in [
        ("1B", sequences(llama3_1b(), "DP1", 4, 1, 4096), 0.246),
        ("8B", dense("DP2 ZeRO1", 2, 8192), 1.488),
        ("8B over two", sequences(llama3_8b(), "TP2 SP", 2, 2, 8192), 1.471),
        ("8B over four", sequences(llama3_8b(), "TP4 SP", 2, 4, 8192), 1.563),
        ("8B in FP8", Job { fp8: 0..32, ..dense("DP2 ZeRO2", 2, 8192) }, 1.138),
        ("8B, sequences over four", Job { recompute: full, ..dense("CP4 ZeRO2", 1, 65_536) }, 4.325),
        ("a Mixtral", moe("DP2 EP2 ZeRO1"), 0.635),
        ("a Mixtral in FP8", Job { fp8: 0..8, ..moe("DP2 EP2 ZeRO1") }, 0.486),
        ("a Mixtral over four", moe("DP4 EP4 ZeRO1"), 0.614),
        ("Qwen3-MoE", qwen.clone(), 0.403),
        ("Qwen3-MoE in FP8 but experts", Job { fp8: 0..16, fp8_experts: false, ..qwen.clone() }, 0.390),
        ("fewer layers of Qwen3-MoE in FP8", alone(qwen3_30b_a3b(), 7), 0.385),
        ("fewer layers of Mixtral in FP8", alone(mixtral_8x7b(), 3), 0.387),
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

/// Experts are all one launch in FP8 too, and small ones gain less (docs/fp8.md).
#[test]
fn experts_gain_by_fp8() {
    let gain = |decoder: Decoder| {
        let all = Job { seq: 4096, fp8: 0..2, ..job(decoder, "DP2 EP2 ZeRO1", ScheduleKind::NoPipeline, 2).on_gpus() };
        let without = Job { fp8_experts: false, ..all.clone() };
        assert!(report::describe(&without).ends_with(", fp8 except experts"), "{}", report::describe(&without));
        let [all, without] = [all, without].map(|job| Plan::new(job, &h200()).unwrap().time.step);
        without / all
    };
    let gains = [qwen3_30b_a3b(), mixtral_8x7b()].map(|decoder| gain(Decoder { layers: 2, ..decoder }));
    assert!(1.0 < gains[0] && gains[0] < 1.1 && 1.2 < gains[1], "{gains:?}");
}

/// Attention within documents costs as much as in sequences of their length.
#[test]
fn attention_stays_inside_documents() {
    let attention = |job: &Job| -> f64 {
        let units = job.units(&job.stages.stages()[0]);
        units.iter().flat_map(|unit| &unit.ops).filter(|op| op.attention).map(|op| op.flops[0]).sum()
    };
    let sequences = |seq, micro_batch, documents| Job { seq, micro_batch, documents, ..single(llama3_8b()) };
    assert_eq!(attention(&sequences(8192, 1, Some(1024))), attention(&sequences(1024, 8, None)));
    assert_eq!(attention(&sequences(8192, 1, Some(100_000))), attention(&sequences(8192, 1, None)));
    assert!(
        Plan::new(sequences(65_536, 1, Some(1024)), &h200()).unwrap().time.step
            < Plan::new(sequences(65_536, 1, None), &h200()).unwrap().time.step
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

fn searched(job: &Job, gpus: usize, memory_gib: u64) -> SearchResult {
    let hardware = Hardware { memory: memory_gib << 30, ..h200() };
    search(&SearchRequest {
        job,
        gpus,
        hardware: &hardware,
        legal: &|layout| 8 % layout.tp == 0,
        zero: None,
        micro_batch: None,
    })
}

#[test]
fn the_best_layouts_fit_and_are_sorted() {
    let asked = Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) };
    let found = searched(&asked, 8, 80);
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
    assert!(searched(&asked, 8, 4).best.is_empty() && searched(&asked, 8, 4).nearest.is_none());
    let more = searched(&asked, 16, 80);
    assert!(more.best[0].time.step < found.best[0].time.step);
}

/// Sequences of 131,072 tokens on four and eight H200s are split over ranks if tensor parallelism does not do it, and the
/// best of all layouts is at least as fast but for the order in which a formula chooses the layouts to simulate.
#[test]
fn long_sequences_get_context_parallelism() {
    let hardware = Hardware { memory: 131 << 30, ..h200() };
    let best = |job: &Job, gpus, legal: &dyn Fn(&ParallelLayout) -> bool| {
        let request = SearchRequest { job, gpus, hardware: &hardware, legal, zero: None, micro_batch: None };
        let best = search(&request).best.swap_remove(0);
        (best.job.layout, best.time.step)
    };
    for gpus in [4, 8] {
        let asked = Job { seq: 131_072, micro_batch: 1, ..job(llama3_8b(), "CP4", ScheduleKind::NoPipeline, 8) };
        let asked = asked.on_gpus();
        let (layout, step) = best(&asked, gpus, &|layout| layout.tp == 1);
        assert!(layout.cp > 1 && layout.world_size() == gpus, "{layout}");
        let (any, fastest) = best(&asked, gpus, &|layout| 8 % layout.tp == 0);
        assert!(fastest <= 1.02 * step, "{any} {fastest} s, {layout} {step} s");
        let (without, slower) = best(&asked, gpus, &|layout| 8 % layout.tp == 0 && layout.cp == 1);
        assert!(fastest <= 1.02 * slower, "{any} {fastest} s, {without} {slower} s");
    }
    // 8,192 tokens need none.
    let short = Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) };
    assert_eq!(searched(&short.on_gpus(), 8, 131).best[0].job.layout.cp, 1);
}

/// Else the fastest of all layouts would be slower than that of the file.
#[test]
fn a_micro_batch_that_is_no_power_of_two_is_searched_too() {
    let asked = Job { micro_batch: 6, ..job(llama3_1b(), "DP2", ScheduleKind::NoPipeline, 1) }.on_gpus();
    let found = searched(&asked, 2, 140);
    let step = Plan::new(asked, &h200()).unwrap().time.step;
    assert!(found.best[0].time.step <= step, "{} > {step}", found.best[0].time.step);
    assert!(found.best.iter().any(|candidate| candidate.job.micro_batch == 6));
}

#[test]
fn a_search_may_fix_micro_batch_and_zero() {
    let asked = Job { seq: 8192, ..job(llama3_8b(), "DP8", ScheduleKind::NoPipeline, 2) };
    let hardware = Hardware { memory: 131 << 30, ..h200() };
    let legal = |layout: &ParallelLayout| layout.tp == 1;
    let request =
        SearchRequest { job: &asked, gpus: 8, hardware: &hardware, legal: &legal, zero: Some(2), micro_batch: Some(1) };
    let found = search(&request);
    assert!(!found.best.is_empty());
    for Candidate { job, .. } in &found.best {
        let zero = if job.layout.dp * job.layout.cp > 1 { 2 } else { 0 };
        assert_eq!((job.micro_batch, job.layout.tp, job.layout.zero), (1, 1, zero), "{}", job.layout);
    }
}

/// Muon's iterations are GEMMs: 6.7e14 FLOPs per step of Llama 3 8B, divided over data-parallel ranks under ZeRO.
#[test]
fn muon_takes_its_iterations() {
    let step = |newton_schulz, layout: &str| {
        let job =
            Job { newton_schulz, seq: 8192, micro_batch: 1, ..job(llama3_8b(), layout, ScheduleKind::NoPipeline, 2) };
        Plan::new(job.on_gpus(), &h200()).unwrap().time.optimizer
    };
    let more = |layout| step(Some(5), layout) - step(None, layout);
    let flops = more("DP1") * h200().gemms;
    assert!((flops / 6.7e14 - 1.0).abs() < 0.1, "{flops}");
    // A shard overlaps two of the three large matrices.
    assert!(more("DP4 ZeRO1") < 0.6 * more("DP1") && more("DP4 ZeRO1") > 0.25 * more("DP1"));
    for layout in ["TP4 SP", "DP4"] {
        assert!((more(layout) / more("DP1") - 1.0).abs() < 1e-9, "whole matrices on every rank of {layout}");
    }
}

#[test]
fn uneven_layers_are_still_a_layout() {
    let decoder = Decoder { layers: 30, ..llama3_8b() };
    let asked = single(Decoder { vocab: 1280, ..decoder });
    let hardware = Hardware { memory: 30 << 30, ..h200() };
    let legal = |layout: &ParallelLayout| layout.tp == 1 && layout.cp == 1;
    let found = search(&SearchRequest {
        job: &asked,
        gpus: 4,
        hardware: &hardware,
        legal: &legal,
        zero: None,
        micro_batch: None,
    });
    let four = found.best.iter().find(|candidate| candidate.job.layout.pp == 4);
    assert!(four.is_some_and(|candidate| candidate.job.stages.num_layers() == 30));
}

#[test]
fn gpus_are_known_by_name() {
    assert_eq!(gpus::find("H100").unwrap().memory, 80.0);
    let error = gpus::find("h10").unwrap_err();
    assert!(error.contains("`h10` is unknown; legal: h100,") && error.contains("a100-80gb"), "{error}");
    let hardware = h200();
    let ratio = hardware.with_gemms(500.0).attention(128)[1] / hardware.attention(128)[1];
    assert!((ratio - 500e12 / hardware.gemms).abs() < 1e-12);
    assert!(hardware.attention(80) == hardware.attention(96) && hardware.attention(512) == hardware.attention(256));
    assert!(hardware.between(8, 1) > hardware.between(8, 8));
    assert_eq!(hardware.between(16, 1), hardware.link.min(8.0 * hardware.network));
}

/// Two hosts of eight: over slow links the weights that ZeRO 3 gathers for every pass cost more than the sum of a shard's
/// gradients once per step. Inside one host groups only add a collective.
#[test]
fn groups_of_zero_pay_between_slow_hosts() {
    let step = |layout: &str, network: f64| {
        let hardware = Hardware { network, ..h200() };
        Plan::new(job(llama3_8b(), layout, ScheduleKind::NoPipeline, 4).on_gpus(), &hardware).unwrap().time.step
    };
    let slow = 1e9;
    assert!(step("DP16 ZeRO3 Group8", slow) < 0.5 * step("DP16 ZeRO3", slow));
    assert!(step("DP16 ZeRO1 Group8", slow) < step("DP16 ZeRO1", slow));
    assert!(step("DP16 ZeRO3 Group8", slow) > step("DP16 ZeRO3 Group8", 50e9));
    assert!(step("DP8 ZeRO1 Group4", slow) >= step("DP8 ZeRO1", slow));
    assert_eq!(step("DP8 ZeRO1 Group4", slow), step("DP8 ZeRO1 Group4", 50e9));
}

#[test]
fn a_report_says_what_fits() {
    let asked = Job { seq: 8192, ..job(llama3_8b(), "PP2 DP4", ScheduleKind::OneFOneB, 4) };
    let hardware = Hardware { memory: 60 << 30, ..h200() };
    let plan = Plan::new(asked.clone(), &hardware).unwrap();
    let found = searched(&asked, 8, 60);
    let report =
        Report { plan: &plan, hardware: &hardware, name: "h200", all_ranks: true, gpus: 8, found: &found, other: None };
    let text = report.to_string();
    for part in [
        "layout       PP2 DP4 1f1b, micro-batch 2 on 8 x h200",
        "DOES NOT FIT",
        "  rank 1 ",
        "weights 7.5 GiB, gradients 15.0 GiB, master weights 15.0 GiB",
        "bubble       ",
        "sent         tp 0 B, pp ",
        "nearest that fits\n",
        "fastest of ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("soft cap"));
    let capped = Job { decoder: Decoder { softcap: true, ..asked.decoder.clone() }, ..asked.clone().on_gpus() };
    let plan = Plan::new(capped, &hardware).unwrap();
    let text =
        Report { plan: &plan, hardware: &hardware, name: "h200", all_ranks: true, gpus: 8, found: &found, other: None }
            .to_string();
    assert!(text.contains("attention    no GPU kernel has the soft cap of the scores"), "{text}");
    assert_eq!((bytes(1023), bytes(1536), bytes(3 << 30)), ("1023 B".into(), "1.5 KiB".into(), "3.0 GiB".into()));
}
