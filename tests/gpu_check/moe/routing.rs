//! Routing on the GPU against routing on the host: the same bits, and the times of both.

use std::ops::Range;

use backend_dist::launch::BoxError;
use backend_dist::shard::{HostTensor, Init};
use burn::tensor::{Device, FloatDType};
use models::WeightSource;
use models::layers::{
    Balance, BalanceOver, Capacity, Dispatcher, DropPolicy, ExpertGroups, ExpertKind, MoeConfig, RouterConfig,
    RouterDevice, Scores,
};

use super::{Found, mesh, run_with, time};
use crate::numbers::relative;
use crate::report::Report;

/// Noise; a fifth of the experts are chosen often, every seventh hardly ever and with equal logits, and a bias keeps
/// two from being chosen at all.
struct Uneven;

impl WeightSource for Uneven {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let columns = shape.get(1).copied().unwrap_or(1);
        let factor = |row: usize| match name {
            _ if row % 7 == 3 => 0.0,
            _ if row.is_multiple_of(5) => 3.0,
            _ => 1.0,
        };
        let value = |index: usize| {
            let noise = Init::Normal { std: 0.05 }.value(7, name, index as u64);
            if name.ends_with("router.weight") {
                noise * factor(index / columns)
            } else if name.ends_with("expert_bias") && (4..6).contains(&index) {
                -100.0
            } else {
                noise
            }
        };
        let data = (0..shape.iter().product()).map(value).collect();
        Ok(HostTensor { shape: shape.to_vec(), data }.read_box(ranges))
    }
}

fn config(experts: usize, router: RouterConfig, dispatcher: Dispatcher) -> MoeConfig {
    let init = Init::Normal { std: 0.05 };
    MoeConfig {
        hidden: 64,
        intermediate: 32,
        experts,
        kind: ExpertKind::SwiGlu,
        router,
        capacity: None,
        dispatcher,
        shared: None,
        input: init,
        output: init,
    }
}

/// A router for each kind of scores. Over four consecutive `variant`s every kind appears with and without a bias and
/// with and without groups.
fn routers(experts: usize, variant: usize) -> Vec<(String, RouterConfig)> {
    let all = [
        Scores::SoftmaxAfterTopK,
        Scores::SoftmaxBeforeTopK,
        Scores::NormalisedSoftmax,
        Scores::Sigmoid,
        Scores::PlainSigmoid,
    ];
    let router = |(nth, scores): (usize, Scores)| {
        let (bias_rate, grouped) =
            [(None, false), (Some(1e-3), false), (None, true), (Some(1e-3), true)][(nth + variant) % 4];
        let over = [BalanceOver::Sequence, BalanceOver::MicroBatch, BalanceOver::Global][nth % 3];
        let groups = grouped.then_some(ExpertGroups { groups: 4, top_k: 2, best: 2 });
        let balance = Some(Balance { over, coefficient: 0.01 });
        let top_k = if experts == 8 { 2 } else { 8 };
        let router = RouterConfig { scores, groups, bias_rate, balance, z_loss: 1e-3, ..RouterConfig::new(top_k) };
        let with = |is: bool, what| if is { what } else { "" };
        let (bias, groups) = (with(bias_rate.is_some(), " with a bias"), with(grouped, " in groups"));
        (format!("{experts} experts{groups}{bias}, {scores:?}"), router)
    };
    all.into_iter().enumerate().map(router).collect()
}

fn run(devices: &[Device], config: MoeConfig, place: RouterDevice) -> Found {
    let config = MoeConfig { router: RouterConfig { device: place, ..config.router }, ..config };
    run_with(devices, &mesh(devices.len(), 1), config, FloatDType::F32, Some(&Uneven))
}

/// Whether routing on the device and on the host have the same bits.
fn compare(report: &mut Report, what: &str, devices: &[Device], config: MoeConfig) {
    let run = |place| run(devices, config, place);
    let (host, device) = (run(RouterDevice::Host), run(RouterDevice::Device));
    if host == device {
        return report.holds(format!("{what}: same bits"), true);
    }
    let off = |found: &Found| {
        let of = |(name, grad): (&String, &Vec<f64>)| (relative(grad, &host.1[name]), format!("gradient of {name}"));
        let all = found.1.iter().map(of).chain([(relative(&found.0, &host.0), "output".to_string())]);
        all.max_by(|a, b| a.0.total_cmp(&b.0)).expect("an output")
    };
    let (on_device, on_host) = (off(&device), off(&run(RouterDevice::Host)));
    report
        .holds(format!("{what}: on the device off by {on_device:?}, a second time on the host by {on_host:?}"), false);
}

pub fn check(gpus: usize, report: &mut Report) {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let mut compare = |what: &str, config| compare(report, what, &devices, config);
    for (variant, experts) in [8, 64, 128, 256].into_iter().enumerate() {
        for (what, router) in routers(experts, variant) {
            compare(&what, config(experts, router, Dispatcher::AllToAll));
        }
    }
    for (what, router) in routers(64, 0).into_iter().step_by(3) {
        compare(&format!("{what}, all-gather"), config(64, router, Dispatcher::AllGather));
        for (factor, pad) in [(0.6, false), (1.3, true)] {
            let capacity = Some(Capacity { factor, policy: DropPolicy::Position, pad });
            let config = MoeConfig { capacity, ..config(64, router, Dispatcher::AllToAll) };
            compare(&format!("{what}, capacity {factor}"), config);
        }
    }
}

/// Forward and backward times of both, 4096 tokens per GPU.
pub fn times(gpus: usize) {
    let softmax = |top_k, scores| RouterConfig { scores, ..RouterConfig::new(top_k) };
    let deepseek = RouterConfig {
        groups: Some(ExpertGroups { groups: 8, top_k: 4, best: 2 }),
        bias_rate: Some(1e-3),
        ..softmax(8, Scores::Sigmoid)
    };
    let layers = [
        ("8 experts of Mixtral's features", 4096, 14_336, 8, softmax(2, Scores::SoftmaxAfterTopK)),
        ("128 experts of Qwen3-30B-A3B's features", 2048, 768, 128, softmax(8, Scores::NormalisedSoftmax)),
        ("256 experts in 8 groups, 2048 and 512 features", 2048, 512, 256, deepseek),
    ];
    for (what, hidden, intermediate, experts, router) in layers {
        let [host, device] = [RouterDevice::Host, RouterDevice::Device].map(|place| {
            let router = RouterConfig { device: place, ..router };
            let config = MoeConfig { hidden, intermediate, ..config(experts, router, Dispatcher::AllToAll) };
            1e3 * time(gpus, config)
        });
        println!("EP{gpus}, {what}: routed on the host {host:.2} ms, on the device {device:.2} ms");
    }
}
