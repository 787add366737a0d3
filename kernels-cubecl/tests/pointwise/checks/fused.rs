//! Fused programs against their evaluation on the host.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::fused::Element as Kind;
use kernels_cubecl::fused::{
    Binary, Draw, Extent, Input, Output, Part, Plan, Program, Reduce, Sharing, Step, Unary, launch,
};

/// `softmax(x · s)` over a row.
pub fn softmax() -> Program {
    Program {
        inputs: vec![input(Extent::Whole, Kind::Half)],
        scalars: 1,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Scalar(0),
            Step::Binary(Binary::Mul, 0, 1),
            Step::Reduce(Reduce::Max, 2),
            Step::Binary(Binary::Sub, 2, 3),
            Step::Unary(Unary::Exp, 4),
            Step::Reduce(Reduce::Sum, 5),
            Step::Binary(Binary::Div, 5, 6),
        ],
        outputs: vec![
            output(7, Extent::Whole, Kind::Half),
            output(6, Extent::PerRow, Kind::F32),
            output(5, Extent::Whole, Kind::F32),
        ],
    }
}

/// LayerNorm of a sum, with a factor for each row and parameters for each column.
pub fn norm() -> Program {
    Program {
        inputs: vec![
            input(Extent::Whole, Kind::F32),
            input(Extent::Whole, Kind::Half),
            input(Extent::PerRow, Kind::F32),
            input(Extent::PerColumn, Kind::F32),
            input(Extent::PerColumn, Kind::Half),
        ],
        scalars: 2,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Load(1),
            Step::Load(2),
            Step::Binary(Binary::Mul, 1, 2),
            Step::Binary(Binary::Add, 0, 3),
            Step::Reduce(Reduce::Sum, 4),
            Step::Scalar(0),
            Step::Binary(Binary::Mul, 5, 6),
            Step::Binary(Binary::Sub, 4, 7),
            Step::Binary(Binary::Mul, 8, 8),
            Step::Reduce(Reduce::Sum, 9),
            Step::Binary(Binary::Mul, 10, 6),
            Step::Scalar(1),
            Step::Binary(Binary::Add, 11, 12),
            Step::Unary(Unary::Sqrt, 13),
            Step::Binary(Binary::Div, 8, 14),
            Step::Load(3),
            Step::Binary(Binary::Mul, 15, 16),
            Step::Load(4),
            Step::Binary(Binary::Add, 17, 18),
        ],
        outputs: vec![
            output(4, Extent::Whole, Kind::F32),
            output(19, Extent::Whole, Kind::Half),
            output(14, Extent::PerRow, Kind::F32),
        ],
    }
}

/// The softmax of scores `[2, heads, s, t]` under a padding mask `[2, 1, 1, t]` and a mask `[1, 1, s, t]`, with a bias of
/// each head and query.
pub fn masked() -> Program {
    Program {
        inputs: vec![
            input(Extent::Whole, Kind::Half),
            input(Extent::Shared, Kind::Half),
            input(Extent::Shared, Kind::F32),
            input(Extent::SharedPerRow, Kind::F32),
        ],
        scalars: 0,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Load(1),
            Step::Unary(Unary::Relu, 1),
            Step::Binary(Binary::Unless, 0, 2),
            Step::Load(2),
            Step::Binary(Binary::Add, 3, 4),
            Step::Load(3),
            Step::Binary(Binary::Add, 5, 6),
            Step::Reduce(Reduce::Max, 7),
            Step::Binary(Binary::Sub, 7, 8),
            Step::Unary(Unary::Exp, 9),
            Step::Reduce(Reduce::Sum, 10),
            Step::Binary(Binary::Div, 10, 11),
        ],
        outputs: vec![output(12, Extent::Whole, Kind::Half), output(7, Extent::Whole, Kind::F32)],
    }
}

/// `exp(x - row) · column`, without a sum over a row.
pub fn of_rows() -> Program {
    Program {
        inputs: vec![
            input(Extent::Whole, Kind::Half),
            input(Extent::PerRow, Kind::F32),
            input(Extent::PerColumn, Kind::F32),
        ],
        scalars: 0,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Load(1),
            Step::Binary(Binary::Sub, 0, 1),
            Step::Unary(Unary::Exp, 2),
            Step::Load(2),
            Step::Binary(Binary::Mul, 3, 4),
            Step::Unary(Unary::Neg, 1),
        ],
        outputs: vec![
            output(5, Extent::Whole, Kind::Half),
            output(2, Extent::Whole, Kind::F32),
            output(6, Extent::PerRow, Kind::F32),
        ],
    }
}

/// As the gradients of a norm: with a row's sum, and sums of all rows.
pub fn sums_of_rows() -> Program {
    Program {
        inputs: vec![input(Extent::Whole, Kind::Half), input(Extent::Whole, Kind::F32)],
        scalars: 1,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Load(1),
            Step::Binary(Binary::Mul, 0, 1),
            Step::Reduce(Reduce::Sum, 2),
            Step::Scalar(0),
            Step::Binary(Binary::Mul, 3, 4),
            Step::Binary(Binary::Sub, 0, 5),
            Step::Reduce(Reduce::Max, 6),
        ],
        outputs: vec![
            output(2, Extent::PerColumn, Kind::F32),
            output(6, Extent::Whole, Kind::F32),
            output(6, Extent::PerColumn, Kind::F32),
            output(6, Extent::Whole, Kind::Half),
            output(7, Extent::PerRow, Kind::F32),
            output(0, Extent::PerColumn, Kind::F32),
        ],
    }
}

/// As the gradients of biases: sums of all rows of what is broadcast, and of a number.
pub fn sums_of_broadcasts() -> Program {
    Program {
        inputs: vec![
            input(Extent::Whole, Kind::Half),
            input(Extent::PerRow, Kind::F32),
            input(Extent::PerColumn, Kind::Half),
            input(Extent::Shared, Kind::F32),
            input(Extent::SharedPerRow, Kind::F32),
        ],
        scalars: 1,
        draws: 0,
        steps: vec![
            Step::Load(0),
            Step::Load(1),
            Step::Binary(Binary::Mul, 0, 1),
            Step::Load(2),
            Step::Load(3),
            Step::Load(4),
            Step::Binary(Binary::Mul, 4, 5),
            Step::Scalar(0),
        ],
        outputs: [1, 2, 3, 6, 7].map(|register| output(register, Extent::PerColumn, Kind::F32)).to_vec(),
    }
}

/// Every function, summed up.
pub fn functions() -> Program {
    let mut steps = vec![Step::Load(0), Step::Unary(Unary::Abs, 0), Step::Scalar(0), Step::Binary(Binary::Add, 1, 2)];
    let one = steps.len();
    steps.push(Step::Load(1));
    let mut total = one;
    let mut add = |steps: &mut Vec<Step>, step| {
        steps.push(step);
        steps.push(Step::Binary(Binary::Add, total, steps.len() - 1));
        total = steps.len() - 1;
    };
    // On numbers from 1 on, so that all are defined.
    for f in [Unary::Log, Unary::Log1p, Unary::Sqrt, Unary::Recip] {
        add(&mut steps, Step::Unary(f, 3));
    }
    for f in [
        Unary::Exp,
        Unary::Tanh,
        Unary::Erf,
        Unary::Neg,
        Unary::Sin,
        Unary::Cos,
        Unary::Sigmoid,
        Unary::Relu,
        Unary::Gelu,
    ] {
        add(&mut steps, Step::Unary(f, 0));
    }
    for f in
        [Binary::Sub, Binary::Div, Binary::Max, Binary::Min, Binary::GeluGrad, Binary::ReluGrad, Binary::SigmoidGrad]
    {
        add(&mut steps, Step::Binary(f, 0, 3));
    }
    let outputs = vec![output(total, Extent::Whole, Kind::F32)];
    let inputs = vec![input(Extent::Whole, Kind::Half), input(Extent::Single, Kind::F32)];
    Program { inputs, scalars: 1, draws: 0, steps, outputs }
}

/// Zeros and ones of four probabilities, and a row's share of ones.
pub fn dropout() -> Program {
    let steps = vec![
        Step::Load(0),
        Step::Bernoulli(0),
        Step::Binary(Binary::Mul, 0, 1),
        Step::Bernoulli(1),
        Step::Bernoulli(2),
        Step::Reduce(Reduce::Sum, 1),
        Step::Bernoulli(3),
    ];
    let whole = [1, 3, 4, 6].map(|register| output(register, Extent::Whole, Kind::F32));
    let outputs = [&whole[..], &[output(2, Extent::Whole, Kind::Half), output(5, Extent::PerRow, Kind::F32)]].concat();
    Program { inputs: vec![input(Extent::Whole, Kind::Half)], draws: 4, steps, outputs, ..Default::default() }
}

/// Runs `program` on random numbers.
pub fn runs<E: Element>(client: &Client, name: &str, program: &Program, rows: usize, columns: usize) -> usize {
    // Rows as `[2, heads, 3]` where they are shared.
    let heads = (rows / 6).max(1) as u32;
    let shares: Vec<_> = [[1, 0, 0], [0, 0, 1], [heads * 3, 3, 1]]
        .into_iter()
        .map(|strides| Sharing { sizes: [heads, 3], strides })
        .take(program.inputs.iter().filter(|input| input.extent.is_shared()).count())
        .collect();
    let len = |extent| match extent {
        Extent::Whole => rows * columns,
        Extent::PerRow | Extent::SharedPerRow => rows,
        Extent::PerColumn => columns,
        Extent::Shared => rows.min(3) * columns,
        Extent::Single => 1,
    };
    let values: Vec<Vec<f64>> =
        program.inputs.iter().enumerate().map(|(i, input)| random(len(input.extent), i as u64 + 1)).collect();
    let scalars = [1.0 / columns as f64, 1.0];
    let scalars = if program.scalars == 1 { &scalars[1..] } else { &scalars[..program.scalars] };
    let slices: Vec<&[f64]> = values.iter().map(Vec::as_slice).collect();
    let draw = |i: usize| Draw::new(0x1234_5678_9abc_def0, (1 << 40) + i as u64, [0.9, 1.0, 0.0, 0.3][i]);
    let mut draws: Vec<_> = (0..program.draws).map(draw).collect();
    for draw in draws.iter_mut().take(1) {
        *draw = draw.share(Part { first: 1 << 32, stride: 1 << 31, width: 20 }).expect("whole fours");
    }
    let expected = program.evaluate(&slices, &shares, scalars, &draws, (rows, columns));
    let buffer = |values: &Vec<f64>, input: &Input| match input.element {
        Kind::F32 => upload::<f32>(client, values),
        Kind::Half => upload::<E>(client, values),
    };
    let inputs: Vec<_> = values.iter().zip(&program.inputs).map(|(values, input)| buffer(values, input)).collect();
    let empty = |output: &Output| match output.element {
        Kind::F32 => poisoned::<f32>(client, len(output.extent)),
        Kind::Half => poisoned::<E>(client, len(output.extent)),
    };
    let outputs: Vec<_> = program.outputs.iter().map(empty).collect();
    let plan = Plan::of(client, program, rows, columns).expect("rows fit");
    let (read, written) = (inputs.iter().collect::<Vec<_>>(), outputs.iter().collect::<Vec<_>>());
    let scalars: Vec<f32> = scalars.iter().map(|x| *x as f32).collect();
    let size = (rows, columns);
    launch::<E>(client, program.clone(), plan, &read, &shares, &scalars, &draws, &written, size).expect("legal");
    let mut bad = 0;
    for ((output, handle), expected) in program.outputs.iter().zip(&outputs).zip(&expected) {
        let (found, limit) = match output.element {
            Kind::F32 => (download::<f32>(client, handle), f32::LIMIT),
            Kind::Half => (download::<E>(client, handle), E::LIMIT),
        };
        bad += report(&format!("{name} {} {rows} × {columns}", E::NAME), &found, expected, limit);
    }
    bad
}

fn input(extent: Extent, element: Kind) -> Input {
    Input { extent, element }
}

fn output(register: usize, extent: Extent, element: Kind) -> Output {
    Output { register, extent, element }
}
