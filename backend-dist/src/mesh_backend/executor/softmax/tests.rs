use super::Role::{AllHidden, Gradient, Hidden, Scores};
use super::{Draw, Extent, Factors, Formula, Input, Program, Role};
use kernels_cubecl::fused::{Binary, Element, Output, Reduce, Register, Step, Unary};

/// Steps that are written one after the other.
#[derive(Clone, Default)]
struct Steps {
    steps: Vec<Step>,
    scalars: Vec<f64>,
}

impl Steps {
    fn add(&mut self, step: Step) -> Register {
        self.steps.push(step);
        self.steps.len() - 1
    }

    fn number(&mut self, x: f64) -> Register {
        self.scalars.push(x);
        self.add(Step::Scalar(self.scalars.len() - 1))
    }

    fn two(&mut self, f: Binary, a: Register, b: Register) -> Register {
        self.add(Step::Binary(f, a, b))
    }

    fn times(&mut self, a: Register, factor: f64) -> Register {
        let factor = self.number(factor);
        self.two(Binary::Mul, a, factor)
    }

    /// `x`, but `value` where `mask` is one.
    fn filled(&mut self, x: Register, mask: Register, value: f64) -> Register {
        let kept = self.two(Binary::Unless, x, mask);
        let (one, value) = (self.number(1.0), self.number(value));
        let others = self.two(Binary::Sub, one, mask);
        let filled = self.two(Binary::Unless, value, others);
        self.two(Binary::Add, kept, filled)
    }

    fn softmax(&mut self, x: Register) -> Register {
        let max = self.add(Step::Reduce(Reduce::Max, x));
        let shifted = self.two(Binary::Sub, x, max);
        let exp = self.add(Step::Unary(Unary::Exp, shifted));
        let sum = self.add(Step::Reduce(Reduce::Sum, exp));
        self.two(Binary::Div, exp, sum)
    }

    /// The gradient of the softmax `p` for the gradient `dp`.
    fn gradient(&mut self, p: Register, dp: Register) -> Register {
        let product = self.two(Binary::Mul, p, dp);
        let sum = self.add(Step::Reduce(Reduce::Sum, product));
        let difference = self.two(Binary::Sub, dp, sum);
        self.two(Binary::Mul, p, difference)
    }

    fn program(&self, inputs: usize, draws: usize) -> Program {
        let output = Output { register: self.steps.len() - 1, extent: Extent::Whole, element: Element::F32 };
        let inputs = vec![Input { extent: Extent::Whole, element: Element::F32 }; inputs];
        Program { inputs, scalars: self.scalars.len(), draws, steps: self.steps.clone(), outputs: vec![output] }
    }

    fn check<T>(&self, roles: &[Role], draws: &[Draw], check: impl FnOnce(Formula) -> T) -> T {
        let program = self.program(roles.len(), draws.len());
        check(Formula { program: &program, scalars: &self.scalars, draws, roles })
    }

    fn factors(&self, roles: &[Role], draws: &[Draw]) -> Option<Factors> {
        self.check(roles, draws, |formula| formula.factors())
    }
}

fn softmax(scale: f64) -> Steps {
    let mut steps = Steps::default();
    let x = steps.add(Step::Load(0));
    let x = steps.times(x, scale);
    steps.softmax(x);
    steps
}

/// The register of the mask in [`masked`].
const MASK: Register = 3;

/// What is hidden has this score, and weight zero unless that is `shown`.
fn masked(value: f64, knows_rows: bool, shown: bool) -> Steps {
    let mut steps = Steps::default();
    let x = steps.add(Step::Load(0));
    let x = steps.times(x, 0.125);
    let mask = steps.add(Step::Load(1));
    let mut x = steps.filled(x, mask, value);
    if knows_rows {
        let rows = steps.add(Step::Load(2));
        x = steps.two(Binary::Unless, x, rows);
    }
    let p = steps.softmax(x);
    if !shown {
        steps.two(Binary::Unless, p, mask);
    }
    steps
}

const MASKS: [Role; 3] = [Scores, Hidden, AllHidden];

fn draw() -> Draw {
    Draw::new(3, 4, 0.9)
}

fn near(x: f64, y: f64) -> bool {
    (x - y).abs() < 1e-12
}

#[test]
fn a_softmax_is_known_by_its_numbers() {
    let steps = softmax(0.125);
    let Factors { scale, kept } = steps.factors(&[Scores], &[]).unwrap();
    assert!(near(scale, 0.125) && kept == 1.0, "{scale} {kept}");
    let mut exponential = steps.clone();
    exponential.steps.truncate(6);
    assert!(exponential.factors(&[Scores], &[]).is_none(), "an exponential");
    let mut double = steps;
    double.times(7, 2.0);
    assert!(double.factors(&[Scores], &[]).is_none(), "twice that");
}

#[test]
fn scores_with_a_bound_are_others() {
    for (f, bound) in [(Binary::Min, 1e6), (Binary::Max, -1e6)] {
        let mut steps = Steps::default();
        let x = steps.add(Step::Load(0));
        let bound = steps.number(bound);
        let x = steps.two(f, x, bound);
        steps.softmax(x);
        assert!(steps.factors(&[Scores], &[]).is_none(), "{f:?}");
    }
}

#[test]
fn what_masks_hide_has_no_weight() {
    let minus_infinity = f64::NEG_INFINITY;
    let factors = masked(minus_infinity, true, false).factors(&MASKS, &[]).unwrap();
    assert!(near(factors.scale, 0.125) && factors.kept == 1.0, "{factors:?}");
    assert!(masked(minus_infinity, true, true).factors(&MASKS, &[]).is_none(), "weights where all is hidden");
    assert!(masked(minus_infinity, false, true).factors(&MASKS[..2], &[]).is_none(), "NaN where all is hidden");
    assert!(masked(-1e4, true, false).factors(&MASKS, &[]).is_none(), "another score");
    let swapped = [Scores, AllHidden, Hidden];
    assert!(masked(minus_infinity, true, false).factors(&swapped, &[]).is_none(), "masks in each other's place");
}

#[test]
fn dropout_comes_after_the_softmax() {
    for with_masks in [false, true] {
        let mut steps = if with_masks { masked(f64::NEG_INFINITY, true, false) } else { softmax(0.125) };
        let roles = if with_masks { &MASKS[..] } else { &[Scores] };
        let p = steps.steps.len() - 1;
        let mut before = steps.clone();
        let drawn = steps.add(Step::Bernoulli(0));
        let dropped = steps.two(Binary::Mul, p, drawn);
        steps.times(dropped, 1.25);
        let Factors { scale, kept } = steps.factors(roles, &[draw()]).unwrap();
        assert!(near(scale, 0.125) && near(kept, 1.25), "{scale} {kept}");
        let drawn = before.add(Step::Bernoulli(0));
        let dropped = before.two(Binary::Mul, p, drawn);
        before.softmax(dropped);
        assert!(before.factors(roles, &[draw()]).is_none());
    }
}

#[test]
fn the_gradient_of_a_softmax_is_known_by_its_numbers() {
    let mut steps = softmax(0.125);
    let dp = steps.add(Step::Load(1));
    steps.gradient(7, dp);
    let unscaled = steps.clone();
    steps.times(steps.steps.len() - 1, 0.125);
    let known = |steps: &Steps, roles: [Role; 2], scale| {
        steps.check(&roles, &[], |formula| formula.is_gradient(Factors { scale, kept: 1.0 }))
    };
    assert!(known(&steps, [Scores, Gradient], 0.125));
    assert!(!known(&steps, [Gradient, Scores], 0.125), "with the inputs swapped");
    assert!(!known(&steps, [Scores, Gradient], 0.25), "with another scale");
    assert!(!known(&unscaled, [Scores, Gradient], 0.125), "without the scale");
}

#[test]
fn the_gradient_goes_back_through_masks_and_dropout() {
    let roles = [Scores, Hidden, AllHidden, Gradient];
    let gradient = |drops: bool, hides: bool| {
        let mut steps = masked(f64::NEG_INFINITY, true, true);
        let p = steps.steps.len() - 1;
        let mut dp = steps.add(Step::Load(3));
        dp = steps.times(dp, 1.25);
        if drops {
            let drawn = steps.add(Step::Bernoulli(0));
            dp = steps.two(Binary::Mul, dp, drawn);
        }
        if hides {
            dp = steps.two(Binary::Unless, dp, MASK);
        }
        let mut dx = steps.gradient(p, dp);
        if hides {
            dx = steps.two(Binary::Unless, dx, MASK);
        }
        steps.times(dx, 0.125);
        steps.check(&roles, &[draw()], |formula| formula.is_gradient(Factors { scale: 0.125, kept: 1.25 }))
    };
    assert!(gradient(true, true));
    assert!(!gradient(false, true), "without the dropout");
    assert!(!gradient(true, false), "with gradients of hidden weights");
}
