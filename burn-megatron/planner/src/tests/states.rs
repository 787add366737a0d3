//! Memory of weights, gradients and the optimizer's states.

use super::*;

/// Mixed precision with AdamW: 2 + 4 + 4 + 8 bytes per parameter, sharded over the data-parallel ranks (arXiv 1910.02054
/// section 5 with fp32 gradients).
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
    assert!((per_parameter("DP8 ZeRO1 Group2", 2) - (6.0 + 12.0 / 2.0)).abs() < 1e-3);
    assert!((per_parameter("DP8 ZeRO2 Group4", 2) - (2.0 + 16.0 / 4.0)).abs() < 1e-3);
    assert!((per_parameter("DP8 ZeRO3 Group4", 4) - 16.0 / 4.0).abs() < 1e-3);
}

#[test]
fn optimizers_differ_in_their_moments() {
    let moments = |moments| memory_of(&Job { moments, ..single(llama3_8b()) })[0].states.moments;
    assert_eq!(moments(Moments::ONE) * 2, moments(Moments::ADAMW));
    assert_eq!(moments(Moments::NONE), 0);
    let matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336);
    assert_eq!(moments(Moments::ADAMW) - moments(Moments::MUON), 4 * matrices);
}

/// On GPUs 8 of the 12 bytes that masters and moments take in fp32 are saved; on CPU ranks masters stay fp32.
#[test]
fn states_in_16_bits_take_half() {
    let states = |state_bytes, gpu| memory_of(&Job { state_bytes, gpu, ..single(llama3_8b()) })[0].states;
    let (wide, small) = (states(StateBytes::F32, true), states(StateBytes::BF16, true));
    assert_eq!((2 * small.master, 2 * small.moments), (wide.master, wide.moments));
    assert_eq!((small.weights, small.gradients), (wide.weights, wide.gradients));
    assert_eq!(small.total(), 12 * 8_030_261_248);
    let grads = states(StateBytes { main_grads: 2, ..StateBytes::BF16 }, true);
    assert_eq!((2 * grads.gradients, grads.total()), (small.gradients, 10 * 8_030_261_248));
    assert_eq!(states(StateBytes::BF16, false).master, wide.master);
    let double = |state_bytes| memory_of(&Job { state_bytes, element: 8, ..single(llama3_8b()) })[0].states;
    assert_eq!(double(StateBytes::BF16), double(StateBytes::F32), "fp64 states");
}

/// The whole of Llama-3-8B at 8,192 tokens: 18 bytes a parameter are too many for one H200, 12 are not.
#[test]
fn small_states_are_proposed_where_they_make_a_run_fit() {
    let h200 = 143_771 << 20;
    let job = Job { micro_batch: 1, seq: 8192, ..single(llama3_8b()) }.on_gpus();
    assert!(ladder::first_of(std::slice::from_ref(&job), h200).is_none());
    let (small, keys) = ladder::with_small_states(&job, h200).unwrap();
    assert!(ladder::fits(&small, h200));
    assert_eq!(small.state_bytes, StateBytes::BF16);
    assert!(keys.contains("optimizer.exp-avg-dtype = bf16"), "{keys}");
    let (smallest, keys) = ladder::with_small_states(&small, h200).unwrap();
    assert_eq!(smallest.state_bytes, StateBytes::BITS8);
    assert!(keys.contains("optimizer.exp-avg-dtype = 8bit"), "{keys}");
    let (hosted, keys) = ladder::with_small_states(&smallest, h200).unwrap();
    assert_eq!(
        (hosted.state_bytes, hosted.offload, keys.as_str()),
        (StateBytes::BITS8, 1.0, "optimizer.cpu-offload = true")
    );
    assert!(ladder::with_small_states(&hosted, h200).is_none(), "it has them");
    // f16 weights have no remainders.
    let (half, keys) = ladder::with_small_states(&Job { bf16: false, ..job.clone() }, h200).unwrap();
    assert_eq!(half.state_bytes, StateBytes { main_params: 4, ..StateBytes::BF16 });
    assert_eq!(keys, "optimizer.exp-avg-dtype = bf16 and optimizer.exp-avg-sq-dtype = bf16");
    assert!(ladder::with_small_states(&Job { moments: Moments::ONE, ..job }, h200).is_none(), "not AdamW");
}

/// Masters and moments leave the GPU, but for the pieces that pass through it; a step lasts as long as their copies, 96 GB
/// of fp32 each way.
#[test]
fn states_in_host_memory_cost_copies() {
    let with = |offload, state_bytes| Job { offload, state_bytes, ..single(llama3_8b()) }.on_gpus();
    let of = |offload| memory_of(&with(offload, StateBytes::F32))[0];
    let (device, half, host) = (of(0.0), of(0.5), of(1.0));
    assert_eq!((host.states.master, host.states.moments, host.states.host), (0, 0, 12 * 8_030_261_248));
    assert_eq!(host.states.total() + host.states.host, device.states.total());
    assert_eq!(half.states.total() + half.states.host, device.states.total());
    assert_eq!(2 * half.states.host, host.states.host);
    assert_eq!(host.communication - device.communication, 3 * 12 * (8 << 20), "three pieces of 8 Mi parameters");
    let cpu = memory_of(&Job { offload: 1.0, ..single(llama3_8b()) })[0].states;
    assert_eq!(cpu.host, 0, "the same memory");
    let hardware = gpus::Hardware::of(gpus::find("h200").unwrap(), 2);
    let time = |job: Job| Plan::new(job, &hardware).unwrap().time.optimizer;
    let [plain, small] = [StateBytes::F32, StateBytes::BF16].map(|bytes| time(with(1.0, bytes)));
    assert!((plain / (12.0 * 8_030_261_248.0 / hardware.model.steps.host_link) - 1.0).abs() < 1e-6, "{plain}");
    assert!((plain / small - 2.0).abs() < 1e-6 && time(with(0.0, StateBytes::F32)) < small / 10.0);
}

/// Long sequences are bound by what layers save. Of their inputs at most three are on the GPU beyond that of the layer at
/// work.
#[test]
fn inputs_of_recomputed_layers_wait_in_host_memory() {
    let with = |cpu_offload, gpu| {
        let recompute = Recompute { cpu_offload, ..Recompute::full() };
        memory_of(&Job { recompute, gpu, micro_batch: 1, seq: 131_072, ..single(llama3_8b()) })[0]
    };
    let (device, host) = (with(false, true), with(true, true));
    let input = 131_072 * 4096 * 2;
    assert_eq!((device.host, host.host), (0, 32 * input));
    let tensors = |memory: RankMemory| memory.peak() - memory.pages;
    let saved = tensors(device) - tensors(host);
    assert!((29 * input..=32 * input).contains(&saved), "{saved} of inputs of {input}");
    assert_eq!(with(true, false).peak(), with(false, false).peak(), "the same memory");
}

/// The whole of Llama-3-8B at 8,192 tokens fits one H100 of 80 GB with moments in 8 bits, which have a scale for 256
/// elements, and main gradients in bf16: 8 1/32 bytes a parameter.
#[test]
fn states_in_8_bits_fit_a_gpu_of_80_gb() {
    let h100 = 81_559 << 20;
    let with = |state_bytes| {
        Job {
            micro_batch: 1,
            seq: 8192,
            state_bytes: StateBytes { main_grads: 2, ..state_bytes },
            ..single(llama3_8b())
        }
        .on_gpus()
    };
    let states = memory_of(&with(StateBytes::BITS8))[0].states;
    assert_eq!(states.moments, 2 * 8_030_261_248 / 256 * 260);
    assert_eq!(states.total(), 8 * 8_030_261_248 + 8 * 8_030_261_248 / 256);
    assert!(ladder::first_of(&[with(StateBytes::BF16)], h100).is_none());
    let (job, keys) = ladder::with_small_states(&with(StateBytes::F32), h100).unwrap();
    assert!(keys.contains("8bit") && ladder::fits(&job, h100), "{keys}");
}
