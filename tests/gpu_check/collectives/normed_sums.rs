//! Small sums, the residual addition and the norm behind them by one kernel, against the three apart: bits, in CUDA graphs
//! too; a rank that is lost; and times.

use super::each;
use super::one_shot::{self, CHAIN, lost, records, time};
use crate::ranks::{on_gpus, tensor_parallel};
use crate::report::Report;
use backend_dist::collective::{all_reduce, one_shot_sums};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::gpu::{Recording, overwrite};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::ops::tensor_parallel::Partial;
use backend_dist::ops::{PassContext, Prologue, Residual, Rms};
use burn::tensor::{DType, Int, Tensor, TensorData};

const TYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// Lengths of rows: of models; of one and of several vectors of a thread; and some that fill no whole warps.
const COLUMNS: [usize; 14] = [256, 264, 520, 768, 1000, 1024, 2048, 3072, 4096, 5120, 8192, 12_288, 12_296, 16_384];

const EPS: f64 = 1e-5;

/// How far a norm in f32 may be from the one that is computed apart, in another order.
const F32: f64 = 1e-6;

pub fn check(gpus: usize, report: &mut Report) {
    each(
        &tensor_parallel(gpus),
        report,
        &[
            ("sums with norms of all types and sizes", all_sizes),
            ("3,000 sums with norms, each of the one before", many),
            ("sums with norms in a CUDA graph", recorded),
        ],
    );
}

/// What is summed, what that is added to, the norm's weight, and what may be prefetched.
#[derive(Clone)]
struct Inputs {
    partial: Tensor<3>,
    stream: Tensor<3>,
    weight: Tensor<1>,
    next: Option<Tensor<2>>,
    plus_one: bool,
}

impl Inputs {
    fn new(rank: &Rank, [rows, columns]: [usize; 2], dtype: DType) -> Self {
        let values = |count: usize, seed: usize| {
            let number = |i: usize| (((i * 37 + seed * 101) as f64).sin() * 43_758.545_3).fract() * 3.0;
            TensorData::new((0..count).map(number).collect::<Vec<_>>(), [count])
        };
        let on_rank = |count, seed| Tensor::<1>::from_data(values(count, seed), (&rank.device, dtype));
        let rows_of = |seed| on_rank(rows * columns, seed).reshape([rows, 1, columns]);
        let next = Some(Tensor::zeros([23, 1000], (&rank.device, dtype)));
        Self {
            partial: rows_of(rank.rank + 1),
            stream: rows_of(97),
            weight: on_rank(columns, 98),
            next,
            plus_one: rows % 2 == 0,
        }
    }

    fn norm(&self) -> Prologue {
        Prologue::RmsNorm { weight: self.weight.clone(), rms: Rms { eps: EPS, plus_one: self.plus_one } }
    }

    /// The new stream and its norm: by one kernel, or by three.
    fn sum(&self, group: &Group, together: bool) -> [Tensor<3>; 2] {
        let stream = Residual::enter(self.stream.clone(), &PassContext::default());
        let sum = match together {
            true => stream.plus_sum(Partial::new(self.partial.clone()), group, self.norm(), self.next.clone()),
            false => stream.plus(all_reduce(self.partial.clone(), ReduceOp::Sum, group), self.norm()),
        };
        [sum.value(), sum.norm(self.norm())]
    }
}

/// The stream has the same bits, and so has the norm but in f32.
fn expect(what: &str, found: [Tensor<3>; 2], expected: [Tensor<3>; 2]) -> Result<(), BoxError> {
    let dtype = found[0].dtype();
    for (name, bound, found, expected) in found
        .into_iter()
        .zip(expected)
        .zip([("stream", 0.0), ("norm", if dtype == DType::F32 { F32 } else { 0.0 })])
        .map(|((found, expected), (name, bound))| (name, bound, found, expected))
    {
        let [found, expected] = [found, expected].map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>());
        let is_wrong = |(found, expected): (&f64, &f64)| {
            let is_near = (found - expected).abs() <= bound * expected.abs().max(1.0);
            !is_near || !expected.is_finite()
        };
        if let Some(i) = found.iter().zip(&expected).position(is_wrong) {
            return Err(format!("{what}, {name}: element {i} is {}, not {}", found[i], expected[i]).into());
        }
    }
    Ok(())
}

fn all_sizes(rank: &Rank) -> Result<(), BoxError> {
    let (group, mut counted) = (rank.group(Axis::Tp), [0, 0]);
    let sums = one_shot_sums(&group, &rank.device);
    for dtype in TYPES {
        for columns in COLUMNS {
            for rows in [1, 2, 7, 64] {
                let (inputs, what) =
                    (Inputs::new(rank, [rows, columns], dtype), format!("{rows} × {columns} {dtype:?}"));
                let fits = rows * columns * dtype.size() <= (512 << 10) / group.size();
                if sums.take_norms(&inputs.partial) != fits {
                    return Err(format!("{what}: there is {}a kernel", if fits { "not " } else { "" }).into());
                }
                counted[usize::from(fits)] += 1;
                // Without waits of the host, and each with its neighbours of other kernels.
                let [together, apart] = [true, false].map(|together| inputs.sum(&group, together));
                let again = inputs.sum(&group, true);
                expect(&what, together, apart.clone())?;
                expect(&what, again, apart)?;
            }
        }
    }
    if rank.rank == 0 {
        println!("  {} by one kernel, {} too large for it", counted[1], counted[0]);
    }
    Ok(())
}

/// Each stream is half of what the next sum is added to, and makes its summand.
fn many(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let sums = one_shot_sums(&group, &rank.device);
    for dtype in TYPES {
        let first = Inputs::new(rank, [3, 4096], dtype);
        if !sums.take_norms(&first.partial) {
            return Err(format!("there is no kernel for {dtype:?}").into());
        }
        let chain = |together: bool| {
            (0..1000).fold(first.sum(&group, together), |[stream, normed], round| {
                // Now and then one row, which leaves old words where three wait.
                let rows = if round % 3 == 1 { 1 } else { 3 };
                let part = |x: &Tensor<3>| x.clone().slice([0..rows]);
                // In f32 the norms may differ.
                let of = if dtype == DType::F32 { &stream } else { &normed };
                let partial = (part(of) * 0.7 + (rank.rank % 4) as f64).sin();
                let inputs = Inputs { partial, stream: part(&stream) * 0.5, ..first.clone() };
                let made = inputs.sum(&group, together);
                let whole = |old: Tensor<3>, new: Tensor<3>| old.slice_assign([0..rows, 0..1, 0..4096], new);
                let [new_stream, new_normed] = made;
                [whole(stream, new_stream), whole(normed, new_normed)]
            })
        };
        let [together, apart] = [true, false].map(chain);
        expect(&format!("{dtype:?}"), together, apart)?;
    }
    Ok(())
}

/// Replays with other data.
fn recorded(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let _sums = one_shot_sums(&group, &rank.device);
    if !records(&group) {
        return Ok(());
    }
    for dtype in TYPES {
        let shape = [2, 4096];
        let fixed = Inputs::new(rank, shape, dtype);
        let changing = Tensor::<1, Int>::zeros([shape[0] * shape[1]], (&rank.device, DType::I32));
        let run = |together: bool| {
            let values = changing.clone().float().cast(dtype).reshape([shape[0], 1, shape[1]]);
            let partial = fixed.partial.clone() * values;
            let first = Inputs { partial, ..fixed.clone() }.sum(&group, together);
            // Three, so that replays begin with either half of the memory.
            (0..2).fold(first, |[stream, _], _| {
                let partial = (stream.clone() + (rank.rank % 4) as f64).sin();
                Inputs { partial, stream, ..fixed.clone() }.sum(&group, together)
            })
        };
        let (recording, made) = Recording::new(&changing, || run(true))?;
        for round in 0..2000 {
            let values: Vec<i32> = (0..shape[0] * shape[1]).map(|i| ((i * 7 + round * 5) % 11) as i32 - 5).collect();
            overwrite(&changing, &values);
            recording.replay()?;
            if round % 100 < 2 {
                expect(&format!("{dtype:?}, replay {round}"), made.clone(), run(false))?;
            }
        }
    }
    Ok(())
}

/// As `one-shot-lost-rank`.
pub fn lost_rank(gpus: usize, report: &mut Report) {
    lost(gpus, report, "a sum with a norm", |x, group| {
        let columns = x.dims()[0];
        let rows = x.clone().reshape([1, 1, columns]);
        let inputs = Inputs { partial: rows.clone(), stream: rows, weight: x, next: None, plus_one: false };
        let [_, normed] = inputs.sum(group, true);
        normed.reshape([columns])
    });
}

/// Prints microseconds of a sum, the addition and the norm in a chain, by three kernels and by one.
pub fn speed(gpus: usize, report: &mut Report) {
    let shapes = [[1, 2048], [1, 4096], [8, 4096], [32, 4096], [1, 8192], [1, 16_384]];
    let times = on_gpus(&tensor_parallel(gpus), |rank| {
        let group = rank.group(Axis::Tp);
        let _sums = one_shot_sums(&group, &rank.device);
        let time = |shape: [usize; 2], together: bool| {
            let input = Tensor::<1, Int>::ones([shape[0] * shape[1]], (&rank.device, DType::I32));
            let next = Some(Tensor::zeros([4096, 4096], (&rank.device, DType::BF16)));
            let fixed = Inputs { next, ..Inputs::new(rank, shape, DType::BF16) };
            time(rank, &input, || {
                (0..CHAIN).fold([fixed.stream.clone(), fixed.partial.clone()], |[stream, partial], _| {
                    Inputs { partial, stream, ..fixed.clone() }.sum(&group, together)
                })
            })
        };
        shapes.iter().map(|shape| Ok([time(*shape, false)?, time(*shape, true)?])).collect::<Result<Vec<_>, BoxError>>()
    });
    let Some(times) = report.attempt("times of sums with norms", times) else { return };
    println!(
        "sum over {gpus} GPUs, addition and norm in bf16, us: eager, in a CUDA graph (only ranks with a process each)"
    );
    let cases = shapes.iter().map(|[rows, columns]| format!("{rows:>2} × {columns:>6}"));
    one_shot::print(&times, cases, ["by three kernels", "by one"]);
}
