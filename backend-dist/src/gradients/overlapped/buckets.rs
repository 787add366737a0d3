//! Which gradients are reduced together, in which order, and their means.

use burn::tensor::{DType, Tensor};

use crate::gradients::part;
use crate::pending::Pending;

/// A parameter whose gradient is reduced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduced {
    /// The member that gets the mean; `None` if all do.
    pub owner: Option<usize>,
    pub dtype: DType,
    /// Elements that a rank has of it.
    pub length: usize,
}

/// Parameters that are reduced together: of one type, for one owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    pub owner: Option<usize>,
    /// Indices of parameters.
    pub members: Vec<usize>,
}

/// A bucket on its way, or there.
pub(super) struct Started {
    /// Of the members, each or one behind the other.
    pub sums: Vec<Tensor<1>>,
    /// What they are divided by.
    pub ranks: usize,
    pub pending: Pending,
}

impl Started {
    /// The means, on those who get them, of members of these lengths.
    pub fn wait(self, lengths: &[usize]) -> Vec<Tensor<1>> {
        self.pending.wait();
        let mean = |sum: Tensor<1>| if self.ranks == 1 { sum } else { sum.div_scalar(self.ranks as f64) };
        let means: Vec<_> = self.sums.into_iter().map(mean).collect();
        if means.len() == lengths.len() {
            return means;
        }
        let mut end = 0;
        let next = |length: &usize| {
            end += length;
            part(&means[0], end - length, *length)
        };
        lengths.iter().map(next).collect()
    }
}

/// The buckets of parameters whose gradients come in `order`, in the order in which they are full. A bucket is closed once
/// it has `limit` bytes.
pub(super) fn buckets(params: &[Reduced], order: &[usize], limit: usize) -> Vec<Bucket> {
    struct Open {
        bucket: Bucket,
        dtype: DType,
        bytes: usize,
        /// Place in `order` of the last member.
        last: usize,
    }
    let (mut open, mut all): (Vec<Open>, Vec<Open>) = Default::default();
    for (place, &index) in order.iter().enumerate() {
        let Reduced { owner, dtype, length } = params[index];
        let known = open.iter().position(|open| open.bucket.owner == owner && open.dtype == dtype);
        let at = known.unwrap_or_else(|| {
            open.push(Open { bucket: Bucket { owner, members: Vec::new() }, dtype, bytes: 0, last: 0 });
            open.len() - 1
        });
        open[at].bucket.members.push(index);
        open[at].bytes += length * dtype.size();
        open[at].last = place;
        if open[at].bytes >= limit {
            all.push(open.swap_remove(at));
        }
    }
    all.extend(open);
    all.sort_by_key(|open| open.last);
    all.into_iter().map(|open| open.bucket).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(owner: Option<usize>, length: usize) -> Reduced {
        Reduced { owner, dtype: DType::F32, length }
    }

    fn members(params: &[Reduced], order: &[usize], limit: usize) -> Vec<Vec<usize>> {
        buckets(params, order, limit).into_iter().map(|bucket| bucket.members).collect()
    }

    #[test]
    fn buckets_follow_the_order_of_gradients_and_close_at_their_limit() {
        let params = [of(None, 1), of(None, 2), of(None, 3), of(None, 4)];
        assert_eq!(members(&params, &[3, 2, 1, 0], 20), [vec![3, 2], vec![1, 0]]);
        assert_eq!(members(&params, &[0, 1, 2, 3], 1), [vec![0], vec![1], vec![2], vec![3]]);
        assert_eq!(members(&params, &[3, 2, 1, 0], 1 << 20), [vec![3, 2, 1, 0]]);
    }

    #[test]
    fn a_bucket_has_one_owner_and_one_type_and_starts_when_its_last_gradient_is_there() {
        let mut params = vec![of(Some(0), 4), of(Some(1), 4), of(Some(0), 4), of(Some(1), 4)];
        assert_eq!(members(&params, &[0, 1, 2, 3], 1 << 20), [vec![0, 2], vec![1, 3]]);
        assert_eq!(members(&params, &[0, 1, 3, 2], 1 << 20), [vec![1, 3], vec![0, 2]]);
        params[2].dtype = DType::F64;
        assert_eq!(members(&params, &[0, 1, 2, 3], 1 << 20), [vec![0], vec![2], vec![1, 3]]);
    }
}
