//! A training loop by hand: the generator and the critic of a WGAN, with an optimizer each.

use std::ops::Range;

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, RmsPropConfig};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::tensor::activation::leaky_relu;
use burn_megatron::prelude::*;

use crate::numbers;

type Pair = (Linear, Linear);

fn pair(sizes: [usize; 3], device: &Device) -> Pair {
    let [from, hidden, to] = sizes;
    (LinearConfig::new(from, hidden).init(device), LinearConfig::new(hidden, to).init(device))
}

fn made((first, second): &Pair, noise: Tensor<2>) -> Tensor<2> {
    second.forward(first.forward(noise).tanh())
}

fn judged((first, second): &Pair, x: Tensor<2>) -> Tensor<1> {
    second.forward(leaky_relu(first.forward(x), 0.2)).mean()
}

/// The critic's weights stay small.
struct Clip;

impl ModuleMapper for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.inner().clamp(-0.2, 0.2)).require_grad())
    }
}

struct Values(Vec<f64>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}

/// How the ranks bring gradients together, before and after a pass.
trait Reduces {
    fn begin(&self, model: &Pair);
    fn end(&self, model: &Pair, grads: GradientsParams) -> GradientsParams;
}

/// On one device, or in gradients that are means already.
struct Nothing;

impl Reduces for Nothing {
    fn begin(&self, _: &Pair) {}

    fn end(&self, _: &Pair, grads: GradientsParams) -> GradientsParams {
        grads
    }
}

struct Means<'a>(&'a Rank);

impl Reduces for Means<'_> {
    fn begin(&self, _: &Pair) {}

    fn end(&self, model: &Pair, grads: GradientsParams) -> GradientsParams {
        average_gradients(model, grads, &self.0.group(Axis::Dp))
    }
}

impl Reduces for FullyShard {
    fn begin(&self, model: &Pair) {
        self.begin_pass(model);
    }

    fn end(&self, model: &Pair, grads: GradientsParams) -> GradientsParams {
        self.end_pass(model, grads)
    }
}

/// All values after two steps of the generator and four of the critic.
fn trained(
    [mut generator, mut critic]: [Pair; 2],
    by: [&dyn Reduces; 2],
    items: Range<usize>,
    device: &Device,
) -> Vec<f64> {
    let (mut of_generator, mut of_critic) = (AdamConfig::new().with_beta_1(0.5).init(), RmsPropConfig::new().init());
    for step in 0..4 {
        let noise: Tensor<2> = numbers(&items, [items.len(), 3], step, device);
        let real = numbers(&items, [items.len(), 4], step + 10, device);
        by[1].begin(&critic);
        // Of the generator no rank gathers anything that has a gradient.
        by[0].begin(&generator);
        let loss = judged(&critic, made(&generator, noise.clone()).detach()) - judged(&critic, real);
        let grads = by[1].end(&critic, GradientsParams::from_grads(loss.backward(), &critic));
        by[0].end(&generator, GradientsParams::new());
        critic = of_critic.step(5e-2, critic, grads).map(&mut Clip);
        if step % 2 == 1 {
            by.iter().zip([&generator, &critic]).for_each(|(by, model)| by.begin(model));
            let mut grads = (-judged(&critic, made(&generator, noise))).backward();
            let of = GradientsParams::from_module(&mut grads, &generator);
            let grads = by[0].end(&generator, of);
            by[1].end(&critic, GradientsParams::new());
            generator = of_generator.step(1e-2, generator, grads);
        }
    }
    let mut values = Values(Vec::new());
    [generator, critic].iter().for_each(|model| model.visit(&mut values));
    values.0
}

#[test]
fn a_generator_and_its_critic_train_as_on_one_device() {
    let mut cpu = Device::flex();
    let _ = cpu.configure(FloatDType::F64);
    let one = cpu.autodiff();
    one.seed(1);
    let models = [pair([3, 8, 4], &one), pair([4, 8, 2], &one)];
    // Drawn here, and not by each rank.
    models.iter().for_each(|model| model.visit(&mut Values(Vec::new())));
    let expected = trained(models.clone(), [&Nothing, &Nothing], 0..8, &one);
    // `None`: means of gradients. Else ZeRO 3, with parameters of fewer elements whole.
    for (layout, zero_3) in
        [("DP2", None), ("TP2 DP2", None), ("DP2", Some(0)), ("TP2 DP2", Some(0)), ("TP2 DP2", Some(10))]
    {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let teams = Teams::new(&mesh, Axis::Tp).across(Axis::Dp);
        let run = |rank: &Rank, device: Device| {
            let (device, dp) = (device.autodiff(), rank.group(Axis::Dp));
            let mut models = models.clone().map(|model| model.fork(&device));
            if mesh.layout().tp > 1 {
                let plan = Plan::default().columns("0").rows("1.weight");
                let placed: Result<Vec<_>, _> =
                    models.into_iter().map(|model| parallelize(model, rank, &plan)).collect();
                models = placed?.try_into().expect("two models");
            }
            let share = dp.rank() * 4..dp.rank() * 4 + 4;
            let Some(whole) = zero_3 else { return Ok(trained(models, [&Means(rank), &Means(rank)], share, &device)) };
            let shards = [0, 1].map(|at| FullyShard::new(&models[at], &dp, &Units::auto().keep_below(whole)));
            let [generator, critic] = models;
            let models = [shards[0].shard(generator), shards[1].shard(critic)];
            Ok(trained(models, [&shards[0], &shards[1]], share, &device))
        };
        let ranks = launch(&mesh, &[Device::flex()], |rank| teams.run(&rank, |device| run(&rank, device)));
        for found in ranks.unwrap_or_else(|error| panic!("{layout}, {zero_3:?}: {error}")).into_iter().flatten() {
            let gap = found.iter().zip(&expected).map(|(found, one)| (found - one).abs()).fold(0.0, f64::max);
            assert!(found.len() == expected.len() && gap < 1e-12, "{layout}, {zero_3:?}: {gap}");
        }
    }
}
