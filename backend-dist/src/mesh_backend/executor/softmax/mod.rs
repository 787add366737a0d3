//! Whether a program computes a softmax over rows, or its gradient: it is run on a few rows, and must give what the formula
//! gives. The scores of the rows are small and very large, and so small that all are far below zero, so that a bound on
//! them shows; in one row, everything is hidden.

mod known;
#[cfg(test)]
mod tests;

pub(super) use known::Known;

use kernels_cubecl::fused::{Draw, Extent, Input, Program};

const COLUMNS: usize = 5;
/// How far the scores of each row are from their middle.
const SIZES: [f64; 8] = [1.0, 3.0, 2.0, 80.0, 1e4, 1e9, 1e4, 1e9];
/// The middle.
const MIDDLES: [f64; 8] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2e4, -2e9];
const HIDDEN_ROW: usize = 2;

/// What an input of a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    Scores,
    /// The gradient of the result.
    Gradient,
    /// One where a score is hidden, else zero.
    Hidden,
    /// One for each row of which all is hidden.
    AllHidden,
}

/// What a softmax is multiplied by: the scores before it, and after it the weights that dropout keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Factors {
    pub scale: f64,
    pub kept: f64,
}

impl Factors {
    pub fn are_near(self, other: Self) -> bool {
        let is_near = |x: f64, y: f64| (x - y).abs() <= 1e-9 * y.abs();
        is_near(self.scale, other.scale) && is_near(self.kept, other.kept)
    }
}

/// A program, and what it reads. With a draw, that drops weights.
pub(super) struct Formula<'a> {
    pub program: &'a Program,
    pub scalars: &'a [f64],
    pub draws: &'a [Draw],
    pub roles: &'a [Role],
}

/// Masks of the rows.
struct Masks {
    hidden: Vec<f64>,
    draw: Option<Draw>,
}

impl Formula<'_> {
    /// The factors, if the program's only output is the softmax of the scores, zero where they are hidden.
    pub fn factors(&self) -> Option<Factors> {
        let (x, y) = (scores(), self.run(&self.masks(false))?);
        let kept = if self.draws.is_empty() { 1.0 } else { y[..COLUMNS].iter().sum() };
        let scale = (y[1] / y[0]).ln() / (x[1] - x[0]);
        let factors = Factors { scale, kept };
        self.is_softmax(factors).then_some(factors)
    }

    fn is_softmax(&self, factors: Factors) -> bool {
        self.gives([1.0; SIZES.len()].map(|size| size * factors.kept.abs()), |masks| {
            let weights = softmax(&scores(), factors.scale, &masks.hidden);
            weights.iter().zip(masks.kept(factors.kept)).map(|(p, kept)| p * kept).collect()
        })
    }

    /// Whether the program's only output is the gradient of the scores of such a softmax.
    pub fn is_gradient(&self, factors: Factors) -> bool {
        let Factors { scale, kept } = factors;
        self.gives(gradient_sizes().map(|size| size * (scale * kept).abs()), |masks| {
            let p = softmax(&scores(), scale, &masks.hidden);
            let dp: Vec<f64> = gradients().iter().zip(masks.kept(kept)).map(|(dp, kept)| dp * kept).collect();
            let row = |(p, dp): (&[f64], &[f64])| -> Vec<f64> {
                let mean: f64 = p.iter().zip(dp).map(|(p, dp)| p * dp).sum();
                p.iter().zip(dp).map(|(p, dp)| scale * p * (dp - mean)).collect()
            };
            p.chunks(COLUMNS).zip(dp.chunks(COLUMNS)).flat_map(row).collect()
        })
    }

    /// Whether the program gives what `formula` does, with masks and without, but for rounding of numbers of this size in
    /// each row.
    fn gives(&self, sizes: [f64; SIZES.len()], formula: impl Fn(&Masks) -> Vec<f64>) -> bool {
        let has_masks = self.roles.contains(&Role::Hidden) || !self.draws.is_empty();
        [false, true].into_iter().filter(|masked| !masked || has_masks).all(|masked| {
            let masks = self.masks(masked);
            self.run(&masks).is_some_and(|y| is_near(&y, &formula(&masks), sizes))
        })
    }

    /// Masks that hide and drop nothing, or some.
    fn masks(&self, masked: bool) -> Masks {
        let hides = masked && self.roles.contains(&Role::Hidden);
        let is_hidden = |i: usize| hides && (i / COLUMNS == HIDDEN_ROW || i % 4 == 3);
        let probability = if masked { 0.5 } else { 1.0 };
        Masks {
            hidden: (0..SIZES.len() * COLUMNS).map(|i| f64::from(is_hidden(i))).collect(),
            draw: self.draws.first().map(|_| Draw::new(1, 0, probability)),
        }
    }

    /// Numbers of the only output, if that, scores and gradient have rows and columns.
    fn run(&self, masks: &Masks) -> Option<Vec<f64>> {
        let Self { program, scalars, draws, roles } = self;
        let is_matrix = |(input, role): (&Input, &Role)| {
            input.extent == Extent::Whole || matches!(role, Role::Hidden | Role::AllHidden)
        };
        let fits = matches!(&program.outputs[..], [output] if output.extent == Extent::Whole)
            && draws.len() < 2
            && program.inputs.len() == roles.len()
            && program.inputs.iter().zip(*roles).all(is_matrix);
        if !fits {
            return None;
        }
        let input = |role: &Role| match role {
            Role::Scores => scores(),
            Role::Gradient => gradients(),
            Role::Hidden => masks.hidden.clone(),
            Role::AllHidden => masks.hidden.chunks(COLUMNS).flat_map(all).collect(),
        };
        let inputs: Vec<Vec<f64>> = roles.iter().map(input).collect();
        let inputs: Vec<&[f64]> = inputs.iter().map(Vec::as_slice).collect();
        let whole = |input: &Input| Input { extent: Extent::Whole, ..*input };
        let program = Program { inputs: program.inputs.iter().map(whole).collect(), ..(*program).clone() };
        let draws: Vec<Draw> = masks.draw.into_iter().collect();
        Some(program.evaluate(&inputs, &[], scalars, &draws, (SIZES.len(), COLUMNS)).remove(0))
    }
}

impl Masks {
    /// What each weight is multiplied by.
    fn kept(&self, factor: f64) -> impl Iterator<Item = f64> {
        let kept = move |i| self.draw.map_or(1.0, |draw| factor * draw.bernoulli(i));
        (0..(SIZES.len() * COLUMNS) as u64).map(kept)
    }
}

/// In each column, whether all of the row is hidden.
fn all(row: &[f64]) -> [f64; COLUMNS] {
    [row.iter().product(); COLUMNS]
}

fn scores() -> Vec<f64> {
    table(SIZES, MIDDLES, 2.3)
}

fn gradients() -> Vec<f64> {
    table(gradient_sizes(), [0.0; SIZES.len()], 1.7)
}

/// Large where the scores are small.
fn gradient_sizes() -> [f64; SIZES.len()] {
    SIZES.map(|size| 1e9 / size)
}

fn table(sizes: [f64; SIZES.len()], middles: [f64; SIZES.len()], step: f64) -> Vec<f64> {
    let number = |i: usize| middles[i / COLUMNS] + sizes[i / COLUMNS] * (1.0 + step * i as f64).sin();
    (0..SIZES.len() * COLUMNS).map(number).collect()
}

fn softmax(x: &[f64], scale: f64, hidden: &[f64]) -> Vec<f64> {
    let row = |(x, hidden): (&[f64], &[f64])| {
        let visible = |(x, hidden): (&f64, &f64)| if *hidden == 0.0 { scale * x } else { f64::NEG_INFINITY };
        let x: Vec<f64> = x.iter().zip(hidden).map(visible).collect();
        let largest = x.iter().copied().fold(f64::MIN, f64::max);
        let exp: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
        // A row of which all is hidden has zeros.
        let sum = exp.iter().sum::<f64>().max(1.0);
        exp.into_iter().map(move |exp| exp / sum)
    };
    x.chunks(COLUMNS).zip(hidden.chunks(COLUMNS)).flat_map(row).collect()
}

/// Whether two tables are equal but for rounding, with numbers of this size in each row.
fn is_near(x: &[f64], y: &[f64], sizes: [f64; SIZES.len()]) -> bool {
    let rows = x.chunks(COLUMNS).zip(y.chunks(COLUMNS)).zip(sizes);
    rows.into_iter().all(|((x, y), size)| x.iter().zip(y).all(|(x, y)| (x - y).abs() <= 1e-9 * size))
}
