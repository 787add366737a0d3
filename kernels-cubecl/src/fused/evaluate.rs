//! What a program gives, computed on the host.
use super::draw::Draw;
use super::program::{Binary, Extent, Program, Reduce, Sharing, Step, Unary};

impl Program {
    /// The outputs for `rows × columns` numbers, computed on the host in f64: what the kernel must give. `shares` are of the
    /// shared inputs.
    pub fn evaluate(
        &self,
        inputs: &[&[f64]],
        shares: &[Sharing],
        scalars: &[f64],
        draws: &[Draw],
        (rows, columns): (usize, usize),
    ) -> Vec<Vec<f64>> {
        let mut outputs = vec![Vec::new(); self.outputs.len()];
        for row in 0..rows {
            let mut registers: Vec<Vec<f64>> = Vec::with_capacity(self.steps.len());
            for step in &self.steps {
                let column = |f: &dyn Fn(usize) -> f64| (0..columns).map(f).collect();
                let register = match *step {
                    Step::Load(input) => {
                        let values = inputs[input];
                        column(&|column| match self.inputs[input].extent {
                            Extent::Whole => values[row * columns + column],
                            Extent::PerRow => values[row],
                            Extent::PerColumn => values[column],
                            Extent::Single => values[0],
                            Extent::Shared => values[shares[self.share(input)].row(row) * columns + column],
                            Extent::SharedPerRow => values[shares[self.share(input)].row(row)],
                        })
                    }
                    Step::Scalar(scalar) => vec![scalars[scalar]; columns],
                    Step::Bernoulli(draw) => column(&|column| draws[draw].bernoulli((row * columns + column) as u64)),
                    Step::Unary(f, x) => registers[x].iter().map(|x| f.of(*x)).collect(),
                    Step::Binary(f, a, b) => {
                        registers[a].iter().zip(&registers[b]).map(|(a, b)| f.of(*a, *b)).collect()
                    }
                    Step::Reduce(Reduce::Sum, x) => vec![registers[x].iter().sum(); columns],
                    Step::Reduce(Reduce::Max, x) => {
                        vec![registers[x].iter().copied().fold(f64::NEG_INFINITY, f64::max); columns]
                    }
                };
                registers.push(register);
            }
            for (values, output) in outputs.iter_mut().zip(&self.outputs) {
                let register = &registers[output.register];
                match output.extent {
                    Extent::PerRow => values.push(register[0]),
                    Extent::PerColumn => {
                        values.resize(columns, 0.0);
                        values.iter_mut().zip(register).for_each(|(sum, x)| *sum += x);
                    }
                    _ => values.extend(register),
                }
            }
        }
        outputs
    }
}

impl Unary {
    /// The function.
    pub fn of(self, x: f64) -> f64 {
        match self {
            Self::Exp => x.exp(),
            Self::Log => x.ln(),
            Self::Log1p => x.ln_1p(),
            Self::Sqrt => x.sqrt(),
            Self::Recip => 1.0 / x,
            Self::Tanh => x.tanh(),
            Self::Erf => libm::erf(x),
            Self::Abs => x.abs(),
            Self::Neg => -x,
            Self::Sin => x.sin(),
            Self::Cos => x.cos(),
            Self::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Self::Relu => x.max(0.0),
            Self::Gelu => x * normal_cdf(x),
        }
    }
}

impl Binary {
    /// The function.
    pub fn of(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Add => a + b,
            Self::Sub => a - b,
            Self::Mul => a * b,
            Self::Div => a / b,
            Self::Max => a.max(b),
            Self::Min => a.min(b),
            Self::GeluGrad => b * (normal_cdf(a) + a * (-0.5 * a * a).exp() / (2.0 * std::f64::consts::PI).sqrt()),
            Self::ReluGrad => f64::from(a > 0.0) * b,
            Self::SigmoidGrad => b * a * (1.0 - a),
            Self::Unless => {
                if b == 0.0 {
                    a
                } else {
                    0.0
                }
            }
        }
    }
}

fn normal_cdf(x: f64) -> f64 {
    0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))
}
