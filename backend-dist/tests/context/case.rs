//! One attention, computed by ranks that share its sequences and by a formula that sees the whole sequences.

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::context::{
    ContextParallel, CpCommType, Documents, attention_in_context, attention_over_context,
};
use backend_dist::ops::{AttentionDropout, AttentionOptions, PackedHeads, PassContext};
use burn::tensor::{Bool, DType, Device, Tensor, TensorData, activation::softmax};

/// Sizes and masks of an attention over whole sequences.
#[derive(Clone, Debug)]
pub struct Case {
    pub positions: usize,
    pub heads: PackedHeads,
    /// Features of a key and of a value.
    pub lengths: [usize; 2],
    pub causal: bool,
    pub window: Option<usize>,
    /// Starts by sample.
    pub documents: Option<Vec<Vec<usize>>>,
    pub dropout: Option<f64>,
}

pub const BATCH: usize = 2;

impl Case {
    pub fn options(&self) -> AttentionOptions {
        let dropout = AttentionDropout { p: 0.0, seed: 5, first_sample: 3, first_head: 0, heads: self.heads.heads };
        let dropout = self.dropout.map(|p| AttentionDropout { p, ..dropout });
        AttentionOptions {
            scale: 0.6,
            causal: self.causal,
            window: self.window,
            softcap: None,
            dropout,
            deterministic: false,
        }
    }

    pub fn documents(&self) -> Option<Documents> {
        self.documents.clone().map(Documents::new)
    }

    /// Whole q, k and v, and the weights of the output in the loss.
    fn inputs(&self) -> [Vec<f64>; 4] {
        let PackedHeads { heads, kv_heads } = self.heads;
        let [d, dv] = self.lengths;
        let sizes = [heads * d, kv_heads * d, kv_heads * dv, heads * dv];
        let mut seed = 0;
        sizes.map(|size| {
            seed += 1;
            numbers(self.positions * BATCH * size, seed)
        })
    }

    fn shapes(&self) -> [[usize; 2]; 4] {
        let PackedHeads { heads, kv_heads } = self.heads;
        let [d, dv] = self.lengths;
        [[heads, d], [kv_heads, d], [kv_heads, dv], [heads, dv]]
    }
}

/// Pseudo-random numbers in `-1.5..1.5`.
fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| (((i + 1) as f64 * 12.9898 + seed as f64 * 78.233).sin() * 43_758.545_3).fract() * 1.5).collect()
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}

fn tensor(values: Vec<f64>, [heads, length]: [usize; 2]) -> Tensor<4> {
    let rows = values.len() / (BATCH * heads * length);
    let data = TensorData::new(values, [rows, BATCH, heads, length]);
    Tensor::from_data(data, (&Device::flex().autodiff(), DType::F64))
}

/// Output and gradients of q, k and v, `[positions, b, heads, features]`.
pub type Results = [Vec<f64>; 4];

/// The output of `f` and the gradients of its weighted sum.
fn run(parts: [Vec<f64>; 4], case: &Case, f: impl Fn([Tensor<4>; 3]) -> Tensor<4>) -> Results {
    let mut shapes = case.shapes().into_iter();
    let [q, k, v, weights] = parts.map(|values| tensor(values, shapes.next().expect("four shapes")));
    let inputs = [q, k, v].map(Tensor::require_grad);
    let out = f(inputs.clone());
    let grads = (out.clone() * weights).sum().backward();
    let [q, k, v] = inputs.map(|x| values(x.grad(&grads).expect("every input has a gradient")));
    [values(out), q, k, v]
}

/// `[s, b, h, d]` to `[b, h, s, d]`, every head repeated `times` times.
fn by_head(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [s, b, h, d] = x.dims();
    let x: Tensor<5> = x.permute([1, 2, 0, 3]).reshape([b, h, 1, s, d]);
    x.repeat_dim(2, times).reshape([b, h * times, s, d])
}

/// All scores, with masked ones at minus infinity.
pub fn formula(case: &Case) -> Results {
    let (n, PackedHeads { heads, kv_heads }) = (case.positions, case.heads);
    let document = |sample: usize, position: usize| match &case.documents {
        Some(starts) => starts[sample].iter().filter(|start| **start <= position).count(),
        None => 0,
    };
    let hides = |sample: usize, query: usize, key: usize| {
        case.causal && key > query
            || case.window.is_some_and(|window| query.abs_diff(key) >= window)
            || document(sample, query) != document(sample, key)
    };
    let hidden: Vec<bool> = (0..BATCH * n * n).map(|i| hides(i / (n * n), i / n % n, i % n)).collect();
    let hidden = Tensor::<4, Bool>::from_data(TensorData::new(hidden, [BATCH, 1, n, n]), &Device::flex().autodiff());
    run(case.inputs(), case, |[q, k, v]| {
        let scores = by_head(q, 1).matmul(by_head(k, heads / kv_heads).swap_dims(2, 3)) * case.options().scale;
        let scores = scores.mask_fill(hidden.clone().expand([BATCH, heads, n, n]), -1e30);
        softmax(scores, 3).matmul(by_head(v, heads / kv_heads)).permute([2, 0, 1, 3])
    })
}

/// The operation on one rank.
pub fn alone(case: &Case) -> Results {
    run(case.inputs(), case, |[q, k, v]| {
        attention_over_context(q, k, v, case.options(), None, case.documents().as_ref(), &PassContext::default())
    })
}

/// The operation on `size` ranks, their shards concatenated. With `packed`, q, k and v are one packed tensor.
pub fn together(case: &Case, size: usize, comm: CpCommType, packed: bool) -> Results {
    let mesh = Mesh::new(ParallelLayout { cp: size, ..Default::default() }).expect("a legal layout");
    let rows = case.positions / size;
    let one = |rank: Rank| {
        let context = ContextParallel { group: rank.group(Axis::Cp), comm };
        let positions: Vec<usize> = context.positions(rows).into_iter().flatten().collect();
        let mut shapes = case.shapes().into_iter();
        let parts = case.inputs().map(|whole| {
            let row = BATCH * shapes.next().expect("four shapes").iter().product::<usize>();
            positions.iter().flat_map(|&position| whole[position * row..(position + 1) * row].to_vec()).collect()
        });
        let (options, documents) = (case.options(), case.documents());
        let results = run(parts, case, |[q, k, v]| match packed {
            true => {
                let qkv = Tensor::cat(vec![q, k, v], 2);
                attention_in_context(
                    qkv,
                    case.heads,
                    options,
                    Some(&context),
                    documents.as_ref(),
                    &PassContext::default(),
                )
            }
            false => {
                attention_over_context(q, k, v, options, Some(&context), documents.as_ref(), &PassContext::default())
            }
        });
        Ok((positions, results))
    };
    let ranks = launch(&mesh, &[Device::flex()], one).expect("no rank fails");
    std::array::from_fn(|i| {
        let row = ranks[0].1[i].len() / rows;
        let mut whole = vec![f64::NAN; case.positions * row];
        for (positions, results) in &ranks {
            for (at, position) in positions.iter().enumerate() {
                whole[position * row..(position + 1) * row].copy_from_slice(&results[i][at * row..(at + 1) * row]);
            }
        }
        whole
    })
}

/// Asserts that outputs and gradients agree to 1e-12 of the largest element.
pub fn same(name: &str, found: &Results, expected: &Results) {
    for (what, (found, expected)) in ["output", "dq", "dk", "dv"].into_iter().zip(found.iter().zip(expected)) {
        assert_eq!(found.len(), expected.len(), "{name}: {what}");
        let scale = expected.iter().fold(0.0f64, |top, x| top.max(x.abs()));
        let off = found.iter().zip(expected).fold(0.0f64, |worst, (a, b)| {
            assert!(a.is_finite(), "{name}: {what} has {a}");
            worst.max((a - b).abs())
        });
        assert!(off <= 1e-12 * scale, "{name}: {what} off by {:e}", off / scale);
    }
}
