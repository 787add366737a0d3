//! Models whose loss is a formula: what somebody remembers, a field of spheres that rays meet, and distances of a siamese network.

use std::ops::Range;

use burn::module::{Initializer, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::{relu, sigmoid, softplus};
use burn_megatron::prelude::*;

use crate::{PLAIN, classes, layouts, numbers, plan, proven};

/// Each number of one vector has a meaning, as in FSRS.
#[derive(Module, Debug)]
struct Memory {
    w: Param<Tensor<1>>,
}

const START: [f64; 8] = [0.4, 1.2, 2.3, 5.8, 0.7, 0.3, 0.9, 0.2];
const REVIEWS: usize = 4;

/// Methods by reference, which a `Param` has too.
trait Pick {
    fn pick(&self, index: usize) -> Tensor<1>;
}

impl Pick for Tensor<1> {
    fn pick(&self, index: usize) -> Tensor<1> {
        self.clone().slice(s![index..index + 1])
    }
}

impl Memory {
    fn new(device: &Device) -> Self {
        Self { w: Param::from_data(START, device) }
    }

    /// Gaps and grades from 1 to 4, of `[REVIEWS, n]`; `w` is one of the vector's numbers.
    fn loss(&self, gaps: Tensor<2>, grades: Tensor<2>, w: impl Fn(usize) -> Tensor<1>) -> Tensor<1> {
        let row = |x: &Tensor<2>, at: usize| x.clone().slice(s![at..at + 1, ..]).squeeze_dim::<1>(0);
        let recall = |gap: Tensor<1>, stability: Tensor<1>| (gap / stability + 1.0).powf(-w(7));
        let mut stability = self.w.val().select(0, row(&grades, 0).int() - 1).clamp(0.1, 100.0);
        let mut loss = self.w.val().log().mean() * 0.1;
        for at in 1..REVIEWS {
            let (gap, grade) = (row(&gaps, at), row(&grades, at));
            let r = recall(gap.clone(), stability.clone());
            let success = stability.clone() * (stability.clone().powf(-w(5)) * ((-r.clone() + 1) * w(4)).exp() + 1);
            let failure = w(6) * stability.clone().powf(w(5));
            let failure = failure.clone().mask_where(stability.clone().lower(failure), stability.clone());
            let easy = success.ones_like().mask_where(grade.clone().equal_scalar(4), w(4));
            let next = (success * easy).mask_where(grade.clone().equal_scalar(1), failure);
            stability = next.mask_where(gap.equal_scalar(0), stability).clamp(0.1, 100.0);
            let known = grade.greater_scalar(1).float();
            loss = loss - (known.clone() * r.clone().log() + (-known + 1) * (-r + 1.0001).log()).mean();
        }
        loss
    }
}

fn reviews(items: &Range<usize>, device: &Device) -> [Tensor<2>; 2] {
    let n = items.len();
    [(9, 0), (4, 1)].map(|(below, least)| (classes(items, [n, REVIEWS], below, device) + least).float().transpose())
}

#[test]
fn one_vector_of_numbers() {
    let loss = |model: &Memory, items: Range<usize>, device: &Device| {
        let [gaps, grades] = reviews(&items, device);
        model.loss(gaps, grades, |index| model.w.val().pick(index))
    };
    let data_parallel = "DP2, DP2 ZeRO1, DP2 ZeRO2, DP2 ZeRO3, DP4 ZeRO3";
    proven(Memory::new, loss, data_parallel, Proof::default());
    proven(Memory::new, loss, "DP2, DP2 ZeRO1, DP2 ZeRO2", Proof::default().overlap_grad_reduce());
}

/// `w.pick(0)` of a `Param` is that of the tensor that it holds, which ZeRO 3 does not gather.
#[test]
fn a_parameter_that_is_read_without_val() {
    let loss = |model: &Memory, items: Range<usize>, device: &Device| {
        let [gaps, grades] = reviews(&items, device);
        model.loss(gaps, grades, |index| model.w.pick(index))
    };
    proven(Memory::new, loss, "DP2, DP2 ZeRO1, DP2 ZeRO2", Proof::default());
    let error = |layout, proof| verify_module_as(Memory::new, loss, &layouts(layout), &proof).unwrap_err().to_string();
    let text = error("DP2 ZeRO3", Proof::default());
    assert!(text.contains("parameter `module.w` is on another rank"), "{text}");
    assert!(text.contains("nearest legal: `param.val()` instead of `*param`, a method by `&self`"), "{text}");
    let text = error("DP2", Proof::default().overlap_grad_reduce());
    assert!(text.contains("parameter `module.w` has one more gradient"), "{text}");
    assert!(text.contains("nearest legal: `param.val()`"), "{text}");
    // Never by `val()`: the gradient comes at the end of the pass.
    let never = |model: &Memory, items: Range<usize>, device: &Device| {
        let [gaps, _] = reviews(&items, device);
        (gaps.unsqueeze::<3>() * model.w.pick(4).unsqueeze() - model.w.pick(5).unsqueeze()).powi_scalar(2).mean()
    };
    proven(Memory::new, never, "DP2, DP2 ZeRO1, DP2 ZeRO2", Proof::default().overlap_grad_reduce());
}

/// Spheres that flow into each other, which rays meet step by step.
#[derive(Module, Debug)]
struct Scene {
    centers: Param<Tensor<2>>,
    colors: Param<Tensor<2>>,
    radius: Param<Tensor<2>>,
}

impl Scene {
    fn new(device: &Device) -> Self {
        let uniform = |shape| Initializer::Uniform { min: -0.4, max: 0.4 }.init(shape, device);
        Self { centers: uniform([4, 3]), colors: uniform([4, 3]), radius: uniform([4, 1]) }
    }

    fn distance(&self, at: Tensor<2>) -> Tensor<2> {
        let (centers, radius) = (self.centers.val(), softplus(self.radius.val(), 1.0) * 0.3);
        let sphere = |index: usize| {
            let center = centers.clone().slice(s![index..index + 1, ..]);
            let gap = (at.clone() - center).powf_scalar(2.0).sum_dim(1);
            (gap + 1e-6).sqrt() - radius.clone().slice(s![index..index + 1, ..])
        };
        (1..4).map(sphere).fold(sphere(0), |nearest, next| {
            let blend = ((nearest.clone() - next.clone()).abs().neg() + 0.2).clamp_min(0.0) / 0.2;
            nearest.min_pair(next) - blend.powf_scalar(2.0) * 0.05
        })
    }

    fn render(&self, from: Tensor<2>, towards: Tensor<2>) -> Tensor<2> {
        let [n, _] = from.dims();
        let mut depth = Tensor::<2>::zeros([n, 1], (&from.device(), from.dtype()));
        for _ in 0..4 {
            depth = depth.clone() + self.distance(from.clone() + towards.clone() * depth) * 0.5;
        }
        let at = from + towards * depth;
        let side = |axis: usize| {
            let step = Tensor::<1, Int>::arange(0..3, &at.device()).equal_scalar(axis as i64).float() * 0.01;
            let step = step.unsqueeze::<2>();
            self.distance(at.clone() + step.clone()) - self.distance(at.clone() - step)
        };
        let normal = Tensor::cat(vec![side(0), side(1), side(2)], 1);
        let normal = normal.clone() / (normal.powf_scalar(2.0).sum_dim(1) + 1e-6).sqrt();
        let light = Tensor::<2>::from_data([[-0.4, 0.4, -0.8]], &at.device());
        sigmoid(self.colors.val()).mean_dim(0) * ((normal * light).sum_dim(1).clamp_min(0.0) + 0.1)
    }
}

#[test]
fn rays_that_march_to_spheres() {
    let loss = |model: &Scene, items: Range<usize>, device: &Device| {
        let n = items.len();
        let towards = numbers::<2>(&items, [n, 3], 0, device);
        let towards = towards.clone() / towards.powf_scalar(2.0).sum_dim(1).sqrt();
        let from = Tensor::<1>::from_floats([0.0, 0.0, -2.5], device).reshape([1, 3]).repeat_dim(0, n);
        (model.render(from, towards) - numbers(&items, [n, 3], 1, device).abs()).powf_scalar(2.0).mean()
    };
    proven(Scene::new, loss, PLAIN, plan(Plan::default().rows("centers|radius")));
    proven(Scene::new, loss, "TP2, TP2 DP2 ZeRO3", plan(Plan::default().rows("colors")));
}

/// One tower for an item, one like it and one unlike it.
#[derive(Module, Debug)]
struct Siamese {
    tower: Vec<(Linear, Option<LayerNorm>)>,
}

/// Distances have nothing of the last bias, and little of the norm's: their gradients are the rounding of terms that cancel, which
/// was held against a bound below what `f64` rounds to.
#[test]
fn gradients_that_a_loss_of_distances_cancels_are_rounding() {
    let make = |device: &Device| Siamese {
        tower: vec![
            (LinearConfig::new(6, 16).init(device), Some(LayerNormConfig::new(16).init(device))),
            (LinearConfig::new(16, 7).init(device), None),
        ],
    };
    let loss = |model: &Siamese, items: Range<usize>, device: &Device| {
        let tower = |seed: usize| {
            let x = numbers(&items, [items.len(), 6], seed, device);
            model.tower.iter().fold(x, |x, (linear, norm)| match norm {
                Some(norm) => relu(norm.forward(linear.forward(x))),
                None => linear.forward(x),
            })
        };
        let (anchor, like, unlike) = (tower(1), tower(2), tower(3));
        let distance = |x: Tensor<2>, y: Tensor<2>| (x - y).powi_scalar(2).sum_dim(1);
        (distance(anchor.clone(), like) - distance(anchor, unlike) + 1.0).clamp_min(0.0).mean()
    };
    proven(make, loss, PLAIN, plan(Plan::auto().columns("tower.0.0").rows("tower.1")));
}
