//! Time of Muon's Newton-Schulz iterations, which orthogonalise whole matrices (`optim/muon/mod.rs`).

use layouts::matrix_owners::MatrixOwners;
use layouts::mesh::GridKind;
use std::ops::Range;

use super::Job;
use super::decoder::Decoder;
use super::gpus::Hardware;

/// Seconds that the slowest rank of a stage takes for the matrices of `layers`; nothing with other optimizers.
///
/// Tensor-parallel ranks all orthogonalise the whole matrix. Under ZeRO every matrix has one owner.
pub(super) fn newton_schulz(job: &Job, layers: Range<usize>, hardware: &Hardware) -> f64 {
    let Some(iterations) = job.newton_schulz else { return 0.0 };
    let layout = &job.layout;
    let mut owners = [GridKind::Dense, GridKind::Expert].map(|grid| MatrixOwners::new(layout.zero_shards(grid)));
    for layer in layers {
        let (dense, expert) = matrices(&job.decoder, layer);
        let local = job.decoder.experts.as_ref().map_or(0, |experts| experts.count / layout.ep);
        let experts: Vec<[usize; 2]> = std::iter::repeat_n(expert, local).flatten().collect();
        for (matrices, owners) in [dense, experts].iter().zip(&mut owners) {
            assign(matrices, owners);
        }
    }
    let flops: f64 = owners.iter().map(MatrixOwners::slowest).sum();
    iterations as f64 * flops / hardware.gemms
}

/// Gives the matrices of a buffer, in which they follow each other, to the owners of its equal shards.
fn assign(matrices: &[[usize; 2]], owners: &mut MatrixOwners) {
    let elements = |matrix: &[usize; 2]| matrix[0] * matrix[1];
    let shard = matrices.iter().map(elements).sum::<usize>().div_ceil(owners.ranks());
    let mut start = 0;
    for matrix in matrices {
        let end = start + elements(matrix);
        let held = |rank: usize| end.min((rank + 1) * shard).saturating_sub(start.max(rank * shard));
        owners.assign(*matrix, (0..owners.ranks()).map(|rank| (rank, held(rank))).collect::<Vec<_>>());
        start = end;
    }
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
