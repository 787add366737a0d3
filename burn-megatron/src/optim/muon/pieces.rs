//! Matrices cross the borders of shards: pieces of the momentum go to the ranks that orthogonalise them, pieces of the
//! steps come back.

use super::super::bucket::Bucket;
use super::super::layout::{Layout, Unit, overlap};
use backend_dist::collective::all_to_all;
use backend_dist::comm::Group;
use backend_dist::matrix_owners::MatrixOwners;
use burn::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;

/// Chooses who orthogonalises each matrix; the same on all ranks that shard it, and on their tensor parallel neighbours.
pub(in super::super) fn assign_owners(buckets: &mut [Bucket]) {
    let mut of_grids = BTreeMap::new();
    for bucket in buckets {
        let (layout, ranks) = (&bucket.layout, bucket.sharding.shards.size());
        let owners = of_grids.entry(bucket.spec.grid()).or_insert_with(|| MatrixOwners::new(ranks));
        let of_unit = |unit: &Unit| {
            let shape = <[usize; 2]>::try_from(&unit.section.global_shape[..]).ok().filter(|_| unit.matrix)?;
            let held = |rank| (rank, overlap(&unit.range, &layout.region(rank, ranks)).len());
            Some(owners.assign(shape, (0..ranks).map(held)))
        };
        bucket.owners = layout.units.iter().map(of_unit).collect();
    }
}

/// What one rank's shard has of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub unit: usize,
    /// The rank whose shard it is in.
    pub holder: usize,
    /// The rank that orthogonalises the matrix.
    pub owner: usize,
    /// Elements of the bucket.
    pub range: Range<usize>,
}

/// The pieces of all matrices of a bucket that is sharded over so many ranks, in the order of its elements. `owners` are
/// those of its units.
pub(super) fn pieces(layout: &Layout, owners: &[Option<usize>], ranks: usize) -> Vec<Piece> {
    let of_unit = |(unit, owner): (usize, &Option<usize>)| {
        let (owner, whole) = (*owner, layout.units[unit].range.clone());
        (0..ranks).filter_map(move |holder| {
            let range = overlap(&whole, &layout.region(holder, ranks));
            (!range.is_empty()).then_some(Piece { unit, holder, owner: owner?, range })
        })
    };
    owners.iter().enumerate().flat_map(of_unit).collect()
}

/// What arrived, by unit and holder.
pub(super) type Arrived = BTreeMap<(usize, usize), Tensor<1>>;

/// Sends the pieces whose holder is not their owner, `ends` from one rank to another, and returns what arrives here. All
/// ranks must take part; where there are no such pieces nobody sends anything. `none` is an empty tensor.
pub(super) fn send_pieces(
    pieces: &[Piece],
    ends: impl Fn(&Piece) -> [usize; 2],
    take: impl Fn(&Piece) -> Tensor<1>,
    none: Tensor<1>,
    group: &Group,
) -> Arrived {
    let crossing: Vec<&Piece> = pieces.iter().filter(|piece| piece.holder != piece.owner).collect();
    if crossing.is_empty() {
        return Arrived::new();
    }
    let (me, ranks) = (group.rank(), group.size());
    let between =
        |from, to| crossing.iter().copied().filter(|piece| ends(piece) == [from, to]).collect::<Vec<&Piece>>();
    let going: Vec<_> = (0..ranks).map(|to| between(me, to)).collect();
    let coming: Vec<_> = (0..ranks).map(|from| between(from, me)).collect();
    let len = |pieces: &Vec<&Piece>| pieces.iter().map(|piece| piece.range.len()).sum();
    let [sends, receives]: [Vec<usize>; 2] = [&going, &coming].map(|of| of.iter().map(len).collect());
    let sent: Vec<Tensor<1>> = going.into_iter().flatten().map(take).collect();
    let sent = if sent.is_empty() { none } else { Tensor::cat(sent, 0) };
    let all = all_to_all(sent, &sends, &receives, group);
    let (mut arrived, mut start) = (Arrived::new(), 0);
    for piece in coming.into_iter().flatten() {
        let end = start + piece.range.len();
        arrived.insert((piece.unit, piece.holder), all.clone().slice([start..end]));
        start = end;
    }
    arrived
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::BucketSpec;
    use super::super::super::layout::ParamScale;
    use super::*;
    use backend_dist::shard::{GroupPosition, ParamSpec, Section};

    /// Twelve elements over three ranks: a matrix of ten, then one of two.
    #[test]
    fn a_matrix_is_in_pieces_where_shards_end() {
        let at = GroupPosition { rank: 0, size: 1 };
        let param = |shape: [usize; 2]| ParamSpec::new(vec![Section::replicated("w", &shape, at)], false);
        let params = vec![param([5, 2]), param([2, 1])];
        let spec = BucketSpec { key: 0, params, hidden: true, at_once: 1, scale: ParamScale::default() };
        let layout = Layout::new(&spec, 3, 1);
        let piece = |unit, holder, owner, range| Piece { unit, holder, owner, range };
        assert_eq!(
            pieces(&layout, &[Some(1), Some(2)], 3),
            [piece(0, 0, 1, 0..4), piece(0, 1, 1, 4..8), piece(0, 2, 1, 8..10), piece(1, 2, 2, 10..12)]
        );
        assert_eq!(pieces(&layout, &[None, Some(2)], 3), [piece(1, 2, 2, 10..12)]);
    }
}
