//! Sums over flat arrays: over the ranks of a group, of squares, of zeros.

use super::{Flat, Real, with_float};
use backend_dist::buffer_collectives;
use backend_dist::collective::{all_reduce, reduce_scatter};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::ops::sum;
use burn::tensor::Tensor;
use std::ops::Range;

impl Flat {
    /// Sums all elements over the group.
    pub fn all_reduce(&mut self, group: &Group) {
        if let Some(buffer) = &self.buffer {
            buffer_collectives::all_reduce(buffer, group).wait();
        } else if group.size() > 1 {
            let tensor = self.tensor.take().expect("the tensor is in place between calls");
            *self = Self::new(all_reduce(tensor, ReduceOp::Sum, group));
        }
    }

    /// This rank's shard of the sum over the group.
    pub fn reduce_scatter(self, group: &Group) -> Self {
        if group.size() == 1 { self } else { Self::new(reduce_scatter(self.into_tensor(), 0, group)) }
    }

    /// Sum of squares of each of these ranges; on the host in double precision.
    pub fn squares(&self, ranges: &[Range<usize>]) -> Vec<f64> {
        if self.host {
            let view = self.view();
            let square =
                |range: &Range<usize>| with_float!(self.dtype, Float => squares::<Float>(&view.read()[range.clone()]));
            return ranges.iter().map(square).collect();
        }
        if ranges.is_empty() {
            return Vec::new();
        }
        // One transfer for all of them.
        let square = |range: &Range<usize>| {
            let part = self.part(range.clone());
            sum(part.clone() * part)
        };
        let sums: Vec<Tensor<1>> = ranges.iter().map(square).collect();
        Tensor::cat(sums, 0).into_data().iter::<f64>().collect()
    }

    /// How many elements of each of these ranges are zero.
    pub fn count_zeros(&self, ranges: &[Range<usize>]) -> Vec<f64> {
        if self.host {
            let view = self.view();
            let zeros = |range: &Range<usize>| {
                with_float!(self.dtype, Float => {
                    view.read::<Float>()[range.clone()].iter().filter(|value| value.wide() == 0.0).count() as f64
                })
            };
            return ranges.iter().map(zeros).collect();
        }
        let zeros = |range: &Range<usize>| self.part(range.clone()).equal_elem(0).int().sum().into_data();
        ranges.iter().map(|range| zeros(range).iter::<f64>().sum()).collect()
    }
}

/// Sum of squares in double precision; eight running sums, so that the additions do not wait for each other.
fn squares<E: Real>(values: &[E]) -> f64 {
    let mut sums = [0.0f64; 8];
    let chunks = values.chunks_exact(8);
    let tail: f64 = chunks.remainder().iter().map(|x| x.wide() * x.wide()).sum();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x.wide() * x.wide();
        }
    }
    sums.iter().sum::<f64>() + tail
}
