//! Whether a program computes a softmax over rows, or its gradient: it is run on a few rows, and must give what the formula
//! gives. The rows are small and very large, so that a bound on the scores shows.

use kernels_cubecl::fused::{Extent, Program};

const COLUMNS: usize = 5;
/// Largest absolute scores of each row.
const ROWS: [f64; 5] = [1.0, 3.0, 80.0, 1e4, 1e9];

/// The `c` of `softmax(c x)`, if the program's only output is that of its only input.
pub(super) fn scale_of_softmax(program: &Program, scalars: &[f64]) -> Option<f64> {
    let [input] = &program.inputs[..] else { return None };
    let x = scores();
    let y = run(program, scalars, &[&x]).filter(|_| input.extent == Extent::Whole)?;
    let scale = (y[1] / y[0]).ln() / (x[1] - x[0]);
    is_near(&y, &softmax(&x, scale), [1.0; ROWS.len()]).then_some(scale)
}

/// Whether the program's only output is the gradient of `softmax(scale x)` in `x`, with `x` the input of number `scores` and
/// the gradient of the softmax the other one.
pub(super) fn is_softmax_gradient(program: &Program, scalars: &[f64], scores_at: usize, scale: f64) -> bool {
    let (x, dp) = (scores(), gradients());
    let inputs: [&[f64]; 2] = if scores_at == 0 { [&x, &dp] } else { [&dp, &x] };
    let is_whole = program.inputs.len() == 2 && program.inputs.iter().all(|input| input.extent == Extent::Whole);
    let Some(dx) = is_whole.then(|| run(program, scalars, &inputs)).flatten() else { return false };
    let p = softmax(&x, scale);
    let rows = p.chunks(COLUMNS).zip(dp.chunks(COLUMNS));
    let row = |(p, dp): (&[f64], &[f64])| -> Vec<f64> {
        let mean: f64 = p.iter().zip(dp).map(|(p, dp)| p * dp).sum();
        p.iter().zip(dp).map(|(p, dp)| scale * p * (dp - mean)).collect()
    };
    let expected: Vec<f64> = rows.flat_map(row).collect();
    is_near(&dx, &expected, gradient_sizes().map(|size| size * scale.abs()))
}

/// Numbers of the only output, if that and all steps have rows and columns.
fn run(program: &Program, scalars: &[f64], inputs: &[&[f64]]) -> Option<Vec<f64>> {
    let is_whole = matches!(&program.outputs[..], [output] if output.extent == Extent::Whole) && program.draws == 0;
    is_whole.then(|| program.evaluate(inputs, &[], scalars, &[], (ROWS.len(), COLUMNS)).remove(0))
}

fn scores() -> Vec<f64> {
    table(ROWS, 2.3)
}

fn gradients() -> Vec<f64> {
    table(gradient_sizes(), 1.7)
}

/// Large where the scores are small.
fn gradient_sizes() -> [f64; ROWS.len()] {
    let mut sizes = ROWS;
    sizes.reverse();
    sizes
}

fn table(sizes: [f64; ROWS.len()], step: f64) -> Vec<f64> {
    (0..ROWS.len() * COLUMNS).map(|i| sizes[i / COLUMNS] * (1.0 + step * i as f64).sin()).collect()
}

fn softmax(x: &[f64], scale: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let largest = x.iter().map(|x| scale * x).fold(f64::NEG_INFINITY, f64::max);
        let exp: Vec<f64> = x.iter().map(|x| (scale * x - largest).exp()).collect();
        let sum: f64 = exp.iter().sum();
        exp.into_iter().map(move |exp| exp / sum)
    };
    x.chunks(COLUMNS).flat_map(row).collect()
}

/// Whether two tables are equal but for rounding, with numbers of this size in each row.
fn is_near(x: &[f64], y: &[f64], sizes: [f64; ROWS.len()]) -> bool {
    let rows = x.chunks(COLUMNS).zip(y.chunks(COLUMNS)).zip(sizes);
    rows.into_iter().all(|((x, y), size)| x.iter().zip(y).all(|(x, y)| (x - y).abs() <= 1e-9 * size))
}

#[cfg(test)]
mod tests {
    use super::{is_softmax_gradient, scale_of_softmax};
    use kernels_cubecl::fused::{Binary, Element, Extent, Input, Output, Program, Reduce, Step, Unary};

    const WHOLE: Extent = Extent::Whole;

    fn program(inputs: usize, scalars: usize, steps: &[Step]) -> Program {
        let output = Output { register: steps.len() - 1, extent: WHOLE, element: Element::F32 };
        let inputs = vec![Input { extent: WHOLE, element: Element::F32 }; inputs];
        Program { inputs, scalars, draws: 0, steps: steps.to_vec(), outputs: vec![output] }
    }

    /// Register 7 is the softmax of the first input times the first scalar.
    fn softmax() -> Vec<Step> {
        vec![
            Step::Load(0),
            Step::Scalar(0),
            Step::Binary(Binary::Mul, 0, 1),
            Step::Reduce(Reduce::Max, 2),
            Step::Binary(Binary::Sub, 2, 3),
            Step::Unary(Unary::Exp, 4),
            Step::Reduce(Reduce::Sum, 5),
            Step::Binary(Binary::Div, 5, 6),
        ]
    }

    #[test]
    fn a_softmax_is_known_by_its_numbers() {
        let scale = scale_of_softmax(&program(1, 1, &softmax()), &[0.125]).unwrap();
        assert!((scale - 0.125).abs() < 1e-12, "{scale}");
        assert!(scale_of_softmax(&program(1, 1, &softmax()[..6]), &[0.125]).is_none(), "an exponential");
        let mut dropped = program(1, 1, &softmax());
        dropped.draws = 1;
        assert!(scale_of_softmax(&dropped, &[0.125]).is_none(), "with dropout");
    }

    #[test]
    fn scores_with_a_bound_are_others() {
        let mut steps = softmax();
        steps[2] = Step::Binary(Binary::Min, 0, 1);
        assert!(scale_of_softmax(&program(1, 1, &steps), &[1e6]).is_none());
    }

    #[test]
    fn the_gradient_of_a_softmax_is_known_by_its_numbers() {
        let mut steps = softmax();
        steps.extend([
            Step::Load(1),
            Step::Binary(Binary::Mul, 7, 8),
            Step::Reduce(Reduce::Sum, 9),
            Step::Binary(Binary::Sub, 8, 10),
            Step::Binary(Binary::Mul, 7, 11),
            Step::Binary(Binary::Mul, 12, 1),
        ]);
        let whole = program(2, 1, &steps);
        assert!(is_softmax_gradient(&whole, &[0.125], 0, 0.125));
        assert!(!is_softmax_gradient(&whole, &[0.125], 1, 0.125), "with the inputs swapped");
        assert!(!is_softmax_gradient(&whole, &[0.125], 0, 0.25), "with another scale");
        assert!(!is_softmax_gradient(&program(2, 1, &steps[..13]), &[0.125], 0, 0.125), "without the scale");
    }
}
