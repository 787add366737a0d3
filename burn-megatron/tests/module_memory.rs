//! What is planned of a plain Burn module against what a CPU rank allocates in a training step, and what models with
//! adapters over one base allocate.

use backend_dist::launch::launch;
use backend_dist::memory::{RankAllocator, live, peak, reset_peak};
use backend_dist::mesh::Mesh;
use burn::module::{ModuleDisplay, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_megatron::learner::{BertBatch, BertTraining, T5Batch, T5Training};
use burn_megatron::plan_module::{ModulePlan, ModuleRun, plan_module};
use burn_megatron::prelude::*;
use models::images::{Llava, LlavaConfig, Vit, VitConfig};
use models::lora::{LoraConfig, with_adapters};
use models::{Bert, BertConfig, T5, T5Config};

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

const BATCH: usize = 8;
const LENGTH: usize = 64;

struct Make;

impl ModuleVisitor for Make {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let _ = param.base();
    }
}

/// Bytes of weights, of the passes next to them, of gradients, and of the optimizer's states.
fn measured<M: Module>(
    make_model: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Device) -> Tensor<1> + Sync,
) -> [u64; 4] {
    let found = launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
        let (rank, device) = (rank.rank, Device::flex().autodiff());
        // GEMMs keep what they pack their operands into.
        drop(loss(&make_model(&device), &device).backward());
        let before = live(rank);
        let model = make_model(&device);
        // Parameters are made when they are first used.
        model.visit(&mut Make);
        let weights = live(rank) - before;
        reset_peak(rank);
        let loss = loss(&model, &device);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        drop(loss);
        let (passes, whole) = (peak(rank) - before - weights, live(rank) - before - weights);
        let mut optimizer = AdamWConfig::new().init();
        let model = optimizer.step(1e-3, model, gradients);
        let states = live(rank) - before - weights;
        drop(model);
        Ok([weights, passes, whole, states])
    });
    found.unwrap()[0]
}

/// Plan and measurement are alike: the plan does not know what an operation needs while it runs.
fn alike<M: Module + ModuleDisplay>(
    name: &str,
    make_model: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Device) -> Tensor<1> + Sync,
) -> ModulePlan {
    let plan = plan_module(&make_model, &loss, &ModuleRun::default()).unwrap();
    let measured = measured(make_model, loss);
    let planned = [plan.weights, plan.passes, plan.gradients, plan.states];
    println!("{name}: planned {planned:?}, measured {measured:?}");
    for ((what, limit), (planned, measured)) in
        [("weights", 0.03), ("passes", 0.1), ("gradients", 0.03), ("states", 0.03)]
            .iter()
            .zip(planned.iter().zip(measured))
    {
        // Each tensor has some bytes that are no data.
        let gap = planned.abs_diff(measured).saturating_sub(1 << 16) as f64 / measured as f64;
        assert!(gap < *limit, "{name}: {what}: planned {planned} bytes, measured {measured}: {gap:.3}");
    }
    plan
}

fn bert_loss(model: &BertTraining, device: &Device) -> Tensor<1> {
    let ints = || Tensor::<2, Int>::zeros([BATCH, LENGTH], device);
    let next_sentence = Tensor::<1, Int>::zeros([BATCH], device);
    let padding = ints().equal_elem(1);
    model.run(&BertBatch { tokens: ints(), types: ints(), padding, labels: ints(), next_sentence }).0
}

fn bert(device: &Device) -> Bert {
    let sizes = BertConfig { vocab_size: 500, hidden_size: 128, num_hidden_layers: 3, ..BertConfig::base() };
    Bert::new(&BertConfig { num_attention_heads: 4, intermediate_size: 512, ..sizes }, device)
}

/// One test, because the counts are of the process.
#[test]
fn plans_are_what_ranks_allocate() {
    adapters_over_one_base_take_their_own_memory();
    let whole = alike("BERT", |device| BertTraining { bert: bert(device) }, bert_loss);
    let adapted = |device: &Device| {
        let bert = bert(device);
        let plan = LoraConfig { rank: 4, ..LoraConfig::default() }.module_plan(&bert).unwrap();
        BertTraining { bert: with_adapters(bert, &plan, None).unwrap() }
    };
    let adapted = alike("BERT with LoRA", adapted, bert_loss);
    assert_eq!(adapted.parameters[0] - adapted.parameters[1], whole.parameters[0]);
    assert!(adapted.states < whole.states / 8);

    let sizes = T5Config { vocab_size: 500, d_model: 128, d_kv: 32, d_ff: 256, num_layers: 2, ..T5Config::small() };
    let sizes = T5Config { num_decoder_layers: 2, num_heads: 4, ..sizes };
    alike(
        "T5",
        |device| T5Training { t5: T5::new(&sizes, device) },
        |model, device| {
            let ints = |length| Tensor::<2, Int>::zeros([BATCH, length], device);
            let (output, labels) = (ints(LENGTH / 2), ints(LENGTH / 2));
            model.run(&T5Batch { input: ints(LENGTH), padding: ints(LENGTH).equal_elem(1), output, labels }).0
        },
    );
    let sizes = VitConfig { hidden_size: 128, intermediate_size: 256, image_size: 32, ..VitConfig::tiny() };
    alike(
        "ViT",
        |device| Vit::new(&sizes, device),
        |model, device| {
            let pixels = Tensor::zeros([BATCH, 3, 32, 32], device);
            Vit::loss(model.forward(pixels), Tensor::zeros([BATCH], device))
        },
    );
    let mut sizes = LlavaConfig::tiny();
    (sizes.text_config.hidden_size, sizes.text_config.intermediate_size) = (128, 384);
    alike(
        "LLaVA",
        |device| Llava::new(&sizes, device),
        |model, device| {
            let ids = || Tensor::<2, Int>::zeros([BATCH, LENGTH], device);
            let [channels, size] = model.image();
            Llava::loss(model.forward(ids(), Tensor::zeros([BATCH, channels, size, size], device)), ids())
        },
    );
    layouts_divide_what_a_rank_needs();
}

/// Layers that tensor parallelism shards are on a rank by half, with what their passes keep; ZeRO divides the rest.
fn layouts_divide_what_a_rank_needs() {
    let plan = |layout: &str| {
        let run = ModuleRun { layout: layout.parse().unwrap(), plan: Bert::plan(), ..ModuleRun::default() };
        plan_module(|device| BertTraining { bert: bert(device) }, bert_loss, &run)
    };
    let [one, tp, sp, zero] = ["TP1", "TP2", "TP2 SP", "DP4 ZeRO2"].map(|layout| plan(layout).unwrap());
    assert!(one.counts.collectives.is_empty());
    assert!((tp.counts.flops / one.counts.flops - 0.5).abs() < 0.05, "{} {}", tp.counts.flops, one.counts.flops);
    assert!(tp.weights < 6 * one.weights / 10 && tp.passes < 4 * one.passes / 5 && sp.passes < tp.passes);
    // An all-reduce after attention and one after the MLP of each layer, in both passes.
    assert!(tp.counts.collectives["all-reduce"].times >= 10, "{tp}");
    assert!(sp.counts.collectives["reduce-scatter"].times >= 10, "{sp}");
    // A rank owns whole parameters, the largest of which is the table of positions.
    let owned = |whole: u64, largest: u64| whole.div_ceil(4)..=whole.div_ceil(4) + largest;
    let largest = 4 * 512 * 128;
    assert_eq!(zero.weights, one.weights);
    assert!(owned(one.gradients, largest).contains(&zero.gradients), "{zero}");
    assert!(owned(one.states, 2 * largest).contains(&zero.states), "{zero}");
    let one_matrix = |layout: &str| {
        let run = ModuleRun { layout: layout.parse().unwrap(), ..ModuleRun::default() };
        let loss = |model: &Linear, device: &Device| model.forward(Tensor::<2>::ones([4, 64], device)).mean();
        plan_module(|device| LinearConfig::new(64, 64).init(device), loss, &run).unwrap()
    };
    let [first, second] = ["DP2 ZeRO1", "DP8 ZeRO2"].map(one_matrix);
    assert_eq!((first.gradients, first.states), (4 * 64 * 65, 8 * 64 * 64));
    assert_eq!((second.gradients, second.states), (4 * 64 * 64, 8 * 64 * 64));
    let loaded = |device: &Device| {
        let saved: Linear = LinearConfig::new(64, 64).init(&Device::flex().autodiff());
        LinearConfig::new(64, 64).init(device).load_record(saved.into_record())
    };
    let loss = |model: &Linear, device: &Device| model.forward(Tensor::<2>::ones([4, 64], device)).mean();
    assert_eq!(plan_module(loaded, loss, &ModuleRun::default()).unwrap(), one_matrix("TP1"));
    for (layout, text) in [("DP2 ZeRO3", "nearest legal: 2"), ("PP2", "nearest legal: TP1"), ("TP3", "do not divide")] {
        let error = plan(layout).unwrap_err().to_string();
        assert!(error.contains(text), "{layout}: {error}");
    }
}

/// Of three: neither when they are there nor while they are made is the base in memory again.
fn adapters_over_one_base_take_their_own_memory() {
    let config = LlamaConfig { vocab_size: 4096, hidden_size: 256, intermediate_size: 1024, ..LlamaConfig::tiny() };
    let plan = std::sync::Arc::new(LoraConfig::default().plan(&config.hf_names()).unwrap());
    let found = launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
        let at = rank.rank;
        let params = || ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff();
        let before = live(at);
        let base = Llama::build(&config, params())?;
        let weights = live(at) - before;
        reset_peak(at);
        let adapted = (0..3).map(|_| Llama::build(&config, params().with_lora(&plan, None).with_weights_of(&base)));
        let adapted = adapted.collect::<Result<Vec<_>, _>>()?;
        let adapters = adapted.iter().flat_map(|model| model.registry().iter().filter(|spec| spec.trained));
        let bytes = adapters.map(|spec| 4 * spec.local_len() as u64).sum();
        Ok([weights, peak(at) - before - weights, bytes])
    });
    let [weights, taken, adapters] = found.unwrap()[0];
    assert!(weights >= 4 * config.parameter_count() as u64);
    assert!(
        taken >= adapters && taken < adapters + weights / 4,
        "{taken} bytes for {adapters} of adapters over {weights}"
    );
}
