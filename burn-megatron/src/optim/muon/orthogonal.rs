//! The orthogonal factor of a matrix; gathering a matrix from the ranks' slices and slicing it again.

use backend_dist::collective::all_gather;
use backend_dist::comm::Group;
use backend_dist::ops::{matmul, matmul_mixed, sum};
use backend_dist::shard::Section;
use burn::tensor::{DType, Tensor};

/// Coefficients of the quintic iteration, for steps one to five (`emerging_optimizers`, `muon_utils.py`, `quintic`;
/// derived in <https://leloykun.github.io/ponder/muon-opt-coeffs/>).
const QUINTIC: [(f64, f64, f64); 5] = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
];

/// The smallest norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Roughly `U Vᵀ` of a matrix `U S Vᵀ`: singular values that are not tiny end up near one, between 0.7 and 1.2 or so.
///
/// Newton-Schulz: `X ← aX + (bA + cA²)X` with `A = XXᵀ`, or `X ← aX + X(bA + cA²)` with `A = XᵀX` if that is smaller, from
/// `X` of Frobenius norm one. The iteration runs in `dtype`, the norm and the result have the matrix's type. bf16 is enough for the iteration
/// (Jordan et al., <https://kellerjordan.github.io/posts/muon/>) and runs on a GPU's tensor cores.
pub fn newton_schulz(matrix: Tensor<2>, steps: usize, dtype: DType) -> Tensor<2> {
    let ([rows, columns], wide) = (matrix.dims(), matrix.dtype());
    let norm = sum(matrix.clone() * matrix.clone()).sqrt().clamp_min(EPS);
    let mut x = (matrix / norm.unsqueeze()).cast(dtype);
    for (a, b, c) in QUINTIC.into_iter().cycle().take(steps) {
        // Only GEMMs read the transpose: additions of it would not read memory in order.
        let turned = x.clone().transpose();
        let square = if rows > columns { matmul(turned, x.clone()) } else { matmul(x.clone(), turned) };
        let mixed = matmul_mixed(square.clone(), square, [c, b], true);
        x = if rows > columns {
            matmul_mixed(x, mixed, [1.0, a], true)
        } else {
            matmul_mixed(mixed, x, [1.0, a], false)
        };
    }
    x.cast(wide)
}

/// The whole global matrix, without padding, from each tensor parallel rank's `local` slice. `ranks` are the tensor
/// parallel group of `section`.
pub fn gather(local: Tensor<2>, section: &Section, ranks: &Group) -> Tensor<2> {
    let Some(split) = section.split else { return local };
    let dim = split.dim;
    let blocks = if ranks.size() > 1 { all_gather(local, dim, ranks) } else { local };
    let step = split.padded / split.parts;
    let blocks = if section.copies > 1 {
        let first = |part: usize| blocks.clone().narrow(dim, part * section.copies * step, step);
        Tensor::cat((0..split.parts).map(first).collect(), dim)
    } else {
        blocks
    };
    blocks.narrow(dim, 0, section.global_shape[dim])
}

/// This rank's slice of a global matrix, with padding: the reverse of [`gather`].
pub fn local(global: Tensor<2>, section: &Section) -> Tensor<2> {
    let Some(split) = section.split else { return global };
    let (mine, mut missing) = (section.ranges()[split.dim].clone(), section.local_shape());
    missing[split.dim] -= mine.len();
    let options = (&global.device(), global.dtype());
    let padding = || Tensor::zeros([missing[0], missing[1]], options);
    match (mine.len(), missing[split.dim]) {
        (0, _) => padding(),
        (len, 0) => global.narrow(split.dim, mine.start, len),
        (len, _) => Tensor::cat(vec![global.narrow(split.dim, mine.start, len), padding()], split.dim),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
    use backend_dist::shard::GroupPosition;
    use burn::tensor::{Device, TensorData};

    fn tensor(values: Vec<f64>, shape: [usize; 2]) -> Tensor<2> {
        Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), DType::F64))
    }

    fn values(tensor: Tensor<2>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    /// Singular values go through the odd polynomial `ax + bx³ + cx⁵` of every step; singular vectors stay. So a
    /// diagonal matrix, also turned on its side, can be followed number by number.
    #[test]
    fn singular_values_follow_the_polynomial() {
        let singular = [3.0f64, 1.0, 0.2];
        let norm = singular.iter().map(|s| s * s).sum::<f64>().sqrt();
        let expected =
            singular.map(|s| QUINTIC.iter().fold(s / norm, |x, (a, b, c)| a * x + b * x.powi(3) + c * x.powi(5)));
        assert!(expected.iter().all(|s| (0.6..1.3).contains(s)), "{expected:?}");
        // Rotated in the plane of the first two columns, so that it is not diagonal.
        let (sin, cos) = 0.7f64.sin_cos();
        let turn = |s: [f64; 3]| {
            let rows = [[s[0] * cos, -s[0] * sin, 0.0, 0.0], [s[1] * sin, s[1] * cos, 0.0, 0.0], [0.0, 0.0, 0.0, s[2]]];
            tensor(rows.concat(), [3, 4])
        };
        for (matrix, result) in
            [(turn(singular), turn(expected)), (turn(singular).transpose(), turn(expected).transpose())]
        {
            for (a, b) in values(newton_schulz(matrix, 5, DType::F64)).into_iter().zip(values(result)) {
                assert!((a - b).abs() < 1e-12, "{a} {b}");
            }
        }
    }

    /// The error of bf16 is small compared with the spread of the singular values after five steps, 0.7 to 1.2.
    #[test]
    fn bf16_iterations_stay_near_those_in_f64() {
        let value = |i: usize| ((i * 7919 % 1000) as f64 / 500.0 - 1.0) * if i.is_multiple_of(17) { 8.0 } else { 1.0 };
        let matrix = tensor((0..48 * 80).map(value).collect(), [48, 80]);
        let exact = values(newton_schulz(matrix.clone(), 5, DType::F64));
        let narrow = values(newton_schulz(matrix, 5, DType::BF16));
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut exact.iter().zip(&narrow).map(|(a, b)| a - b));
        let relative = difference / norm(&mut exact.iter().copied());
        assert!(relative > 1e-4 && relative < 3e-2, "{relative}");
    }

    #[test]
    fn zeros_stay_zeros() {
        assert_eq!(values(newton_schulz(tensor(vec![0.0; 6], [2, 3]), 5, DType::BF16)), [0.0; 6]);
    }

    #[test]
    fn a_matrix_is_gathered_whole_and_sharded_again() {
        let mesh = Mesh::new(ParallelLayout { tp: 4, ..ParallelLayout::default() }).unwrap();
        let shardings: [(&[usize; 2], usize, usize, usize); 5] =
            [(&[8, 3], 0, 4, 8), (&[3, 8], 1, 4, 8), (&[4, 2], 0, 2, 4), (&[5, 2], 0, 4, 12), (&[2, 5], 1, 2, 8)];
        launch(&mesh, &[Device::flex()], |rank| {
            let group = rank.group(Axis::Tp);
            for (shape, dim, parts, padded) in shardings {
                let at = GroupPosition { rank: group.rank(), size: group.size() };
                let section = Section::split_padded("w", shape, dim, parts, padded, at);
                let global: Vec<f64> = (1..=shape.iter().product::<usize>()).map(|i| i as f64).collect();
                let mine = section.slice(&global);
                let [rows, columns] = section.local_shape()[..] else { unreachable!("a matrix") };
                let whole = gather(tensor(mine.clone(), [rows, columns]), &section, &group);
                assert_eq!(values(whole.clone()), global, "{shape:?} {dim} {parts}");
                assert_eq!(values(local(whole, &section)), mine, "{shape:?} {dim} {parts}");
            }
            Ok(())
        })
        .unwrap();
    }
}
