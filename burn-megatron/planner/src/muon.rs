//! Time of Muon's Newton-Schulz iterations, which orthogonalise whole matrices (optim/muon.rs).

use layouts::mesh::GridKind;
use std::ops::Range;

use super::Job;
use super::decoder::Decoder;
use super::gpus::Hardware;

/// FLOPs of one Newton-Schulz iteration of a matrix: `A = X Xᵀ`, `A A` and `B X`, with the short side first.
pub(super) fn iteration([rows, columns]: [usize; 2]) -> f64 {
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    4.0 * short * short * long + 2.0 * short.powi(3)
}

/// Seconds that the slowest rank of a stage takes for the matrices of `layers`; nothing with other optimizers.
///
/// Tensor-parallel ranks all orthogonalise the whole matrix. Under ZeRO a rank orthogonalises the matrices that its
/// shard of the layer's flat buffer overlaps, whole.
pub(super) fn newton_schulz(job: &Job, layers: Range<usize>, hardware: &Hardware) -> f64 {
    let Some(iterations) = job.newton_schulz else { return 0.0 };
    let layout = &job.layout;
    let layer = |layer: usize| {
        let (dense, expert) = matrices(&job.decoder, layer);
        let local = job.decoder.experts.as_ref().map_or(0, |experts| experts.count / layout.ep);
        let experts: Vec<[usize; 2]> = std::iter::repeat_n(expert, local).flatten().collect();
        slowest(&dense, layout.zero_shards(GridKind::Dense)) + slowest(&experts, layout.zero_shards(GridKind::Expert))
    };
    let flops: f64 = layers.map(layer).sum();
    iterations as f64 * flops / hardware.gemms
}

/// FLOPs per iteration of the busiest of `shards` equal shards of a buffer in which matrices follow each other.
fn slowest(matrices: &[[usize; 2]], shards: usize) -> f64 {
    let elements = |matrix: &[usize; 2]| matrix[0] as f64 * matrix[1] as f64;
    let shard = matrices.iter().map(elements).sum::<f64>() / shards as f64;
    let mut work = vec![0.0; shards];
    let mut start = 0.0;
    for matrix in matrices {
        let end = start + elements(matrix);
        let last = ((end / shard).ceil() as usize).clamp(1, shards);
        let first = ((start / shard) as usize).min(last - 1);
        work[first..last].iter_mut().for_each(|work| *work += iteration(*matrix));
        start = end;
    }
    work.into_iter().fold(0.0, f64::max)
}

/// The matrices of a layer, `[outputs, inputs]`, and those of one of its experts. Query, key and value are a matrix
/// each, and so are gate and up.
fn matrices(decoder: &Decoder, layer: usize) -> (Vec<[usize; 2]>, Vec<[usize; 2]>) {
    let (hidden, heads) = (decoder.hidden, decoder.heads);
    let mlp = |width: usize| {
        let up = std::iter::repeat_n([width, hidden], if decoder.gated { 2 } else { 1 });
        up.chain([[hidden, width]])
    };
    let mut dense = match (&decoder.latent, decoder.mamba_of(layer)) {
        (Some(latent), _) => {
            let head = latent.rotated + latent.unrotated;
            let queries =
                latent.queries.map_or(vec![[heads * head, hidden]], |rank| vec![[rank, hidden], [heads * head, rank]]);
            let up = [heads * (latent.unrotated + latent.value), latent.keys];
            [queries, vec![[latent.keys + latent.rotated, hidden], up, [hidden, heads * latent.value]]].concat()
        }
        (None, Some(mamba)) => {
            let (inner, grouped) = (mamba.heads * mamba.head_dim, mamba.groups * mamba.state);
            let rows = [inner, inner, grouped, grouped, mamba.heads].map(|rows| [rows, hidden]);
            [&rows[..], &[[hidden, inner]]].concat()
        }
        (None, None) if !decoder.has_mixer(layer) => Vec::new(),
        (None, None) => {
            let (query, key) = (heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim);
            vec![[query, hidden], [key, hidden], [key, hidden], [hidden, query]]
        }
    };
    let mut expert = Vec::new();
    match decoder.experts_of(layer) {
        Some(experts) => {
            dense.push([experts.count, hidden]);
            dense.extend(mlp(experts.shared).filter(|_| experts.shared > 0));
            expert.extend(mlp(experts.intermediate));
        }
        None if decoder.has_mlp(layer) => dense.extend(mlp(decoder.intermediate)),
        None => {}
    }
    (dense, expert)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_shard_counts_whole_matrices() {
        let (small, large) = ([2, 4], [4, 8]);
        assert_eq!(iteration(small), 4.0 * 4.0 * 4.0 + 2.0 * 8.0);
        assert_eq!(iteration([4, 2]), iteration(small));
        let both = [small, large];
        assert_eq!(slowest(&both, 1), iteration(small) + iteration(large));
        // Halves of 20 elements: the first has the small matrix and a part of the large one.
        assert_eq!(slowest(&both, 2), iteration(small) + iteration(large));
        // Quarters of 10: the first again; the others share the large one.
        assert_eq!(slowest(&both, 4), iteration(small) + iteration(large));
        assert_eq!(slowest(&[large, large], 2), iteration(large));
        assert_eq!(slowest(&[], 8), 0.0);
    }
}
