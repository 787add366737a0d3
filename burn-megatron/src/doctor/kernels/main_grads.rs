//! Gradients summed up in place: two contributions of a linear layer with its norm and its bias, of a bias
//! added by itself, and of an embedding.

use backend_dist::ops::main_grads::{self, MainGrad};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{LinearOptions, PassContext, Prologue, add_bias, embedding, linear_with, pull_back};
use burn::tensor::{DType, Device, Gradients, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::cases::Scale;
use super::{KernelCheck, Side, bound, error, numbers, values};

const EPS: f64 = 1e-5;
const NAMES: [&str; 5] = ["linear weight", "norm weight", "embedding", "linear bias", "bias"];

/// The checks; none where `device` cannot sum up in place, or the parameters are f64.
pub fn check(device: &Device, scale: &Scale, dtype: DType) -> Vec<KernelCheck> {
    if !main_grads::is_available(device) || dtype == DType::F64 {
        return vec![];
    }
    let [side, reference] = Side::both(device, dtype);
    let expected = registered(&reference, scale);
    let found = catch_unwind(AssertUnwindSafe(|| in_place(&side, scale)));
    main_grads::detach_all();
    let one = |(i, expected): (usize, &Vec<f64>)| KernelCheck {
        name: format!("main gradients: {}", NAMES[i]),
        dtype: format!("{dtype:?}"),
        shape: format!("{scale:?}"),
        error: found.as_ref().map_or(f64::NAN, |found| error(&found[i], expected)),
        // The norm's output and its gradient are rounded to 16 bits, sums are not.
        bound: bound(dtype, if i < 2 { 3 } else { 1 }),
    };
    expected.iter().enumerate().map(one).collect()
}

/// Linear weight, norm weight, table, the bias within the linear layer and the one added to what it gives.
struct Leaves {
    w: Tensor<2>,
    norm: Tensor<1>,
    table: Tensor<2>,
    biases: [Tensor<1>; 2],
}

impl Leaves {
    fn new(side: &Side, scale: &Scale) -> Self {
        let Scale { hidden, ffn, vocab, .. } = *scale;
        Self {
            w: side.tensor(numbers(ffn * hidden, 1), [ffn, hidden]).require_grad(),
            norm: side.tensor(numbers(hidden, 2), [hidden]).require_grad(),
            table: side.tensor(numbers(vocab * hidden, 3), [vocab, hidden]).require_grad(),
            biases: [4, 5].map(|seed| side.tensor(numbers(ffn, seed), [ffn]).require_grad()),
        }
    }

    /// The gradients of a micro-batch; what the operations register.
    fn contribution(&self, side: &Side, scale: &Scale, seed: u64, deferral: &Deferral) -> Gradients {
        let Scale { seq, batch, hidden, ffn, .. } = *scale;
        let tokens = scale.tokens();
        let prologue = Prologue::RmsNorm { weight: self.norm.clone(), rms: EPS.into() };
        let x = side.tensor(numbers(tokens * hidden, seed), [seq, batch, hidden]);
        let ids = side.ids(scale.ids(0), [seq, batch]);
        let [inside, behind] = self.biases.clone();
        let pass = PassContext { weight_grads: deferral.clone(), ..PassContext::default() };
        let options = LinearOptions { pass, ..LinearOptions::default() };
        let y = linear_with(x, prologue, self.w.clone(), Some(inside), options);
        let y = add_bias(y, behind);
        let rows = embedding(self.table.clone(), ids, 0);
        let upstream = side.tensor(numbers(tokens * (ffn + hidden), seed + 1), [seq, batch, ffn + hidden]);
        pull_back(Tensor::cat(vec![y, rows], 2), upstream)
    }
}

/// The sums of what two micro-batches register.
fn registered(side: &Side, scale: &Scale) -> [Vec<f64>; 5] {
    let leaves = Leaves::new(side, scale);
    let [first, second] = [10, 20].map(|seed| leaves.contribution(side, scale, seed, &Deferral::default()));
    let sum = |a: Option<Vec<f64>>, b: Option<Vec<f64>>| -> Vec<f64> {
        let (a, b) = (a.expect("has a gradient"), b.expect("has a gradient"));
        a.iter().zip(&b).map(|(a, b)| a + b).collect()
    };
    [
        sum(leaves.w.grad(&first).map(values), leaves.w.grad(&second).map(values)),
        sum(leaves.norm.grad(&first).map(values), leaves.norm.grad(&second).map(values)),
        sum(leaves.table.grad(&first).map(values), leaves.table.grad(&second).map(values)),
        sum(leaves.biases[0].grad(&first).map(values), leaves.biases[0].grad(&second).map(values)),
        sum(leaves.biases[1].grad(&first).map(values), leaves.biases[1].grad(&second).map(values)),
    ]
}

/// The sums that two micro-batches leave in place, the second one's weight gradient deferred. Panics if an operation
/// registers a gradient that has a main-gradient slot.
fn in_place(side: &Side, scale: &Scale) -> [Vec<f64>; 5] {
    let leaves = Leaves::new(side, scale);
    // Whatever is there before the first contribution must not count.
    let garbage = |len: usize| Tensor::<1>::full([len], 7.0, (&side.device.clone().inner(), DType::F32));
    let sizes = [scale.ffn * scale.hidden, scale.hidden, scale.vocab * scale.hidden, scale.ffn, scale.ffn];
    let sums = sizes.map(garbage);
    let places = sums.clone().map(MainGrad::new);
    main_grads::attach(&leaves.w, places[0].clone());
    main_grads::attach(&leaves.norm, places[1].clone());
    main_grads::attach(&leaves.table, places[2].clone());
    for (bias, place) in leaves.biases.iter().zip(&places[3..]) {
        main_grads::attach(bias, place.clone());
    }
    let deferral = Deferral::possible();
    let first = leaves.contribution(side, scale, 10, &deferral);
    let (second, late) = deferral.deferred(|| leaves.contribution(side, scale, 20, &deferral));
    for grads in [first, second, late.run()] {
        let registered = [leaves.w.grad(&grads).is_some(), leaves.table.grad(&grads).is_some()];
        assert_eq!(registered, [false; 2], "a gradient with a main-gradient slot was registered");
        let vectors = leaves.biases.iter().chain([&leaves.norm]);
        assert!(
            vectors.into_iter().all(|x| x.grad(&grads).is_none()),
            "a gradient with a main-gradient slot was registered"
        );
    }
    assert!(places.iter().all(MainGrad::is_written), "a main gradient was not written");
    sums.map(values)
}
