use super::*;
use kernels_cubecl::fused::{Binary, Reduce};

fn tensor(id: u64, shape: [usize; 2]) -> TensorIr {
    TensorIr { id: TensorId::new(id), shape: Shape::from(shape), status: TensorStatus::ReadOnly, dtype: DType::F32 }
}

/// Whether the chain takes `expression` where a kernel has room for rows of eight numbers.
fn joins(chain: &mut Chain<TensorId>, expression: Expression, out: &TensorIr) -> bool {
    let limits = Limits { dtype: DType::F32, fits: |columns| columns <= 8, sums: |_| true, elements: 1 << 20 };
    chain.join((&expression, out), limits, &ById::default(), |x, _| Operand {
        handle: x.id,
        is_half: false,
        has_copy: false,
    })
}

fn two<'a>(f: Binary, a: &'a TensorIr, b: &'a TensorIr) -> Expression<'a> {
    Expression::Binary(f, Box::new(Expression::Tensor(a)), Box::new(Expression::Tensor(b)))
}

fn sum(x: &TensorIr) -> Expression<'_> {
    Expression::Reduce(Reduce::Sum, Box::new(Expression::Tensor(x)))
}

fn quarter_of(x: &TensorIr) -> Expression<'_> {
    Expression::Binary(Binary::Mul, Box::new(Expression::Tensor(x)), Box::new(Expression::Number(0.25)))
}

/// A row must lie in registers only if something is summed over it.
#[test]
fn long_rows_run_together_without_their_sums() {
    for (columns, fits) in [(8, true), (16, false)] {
        let whole = [3, columns];
        let (x, row, column) = (tensor(1, whole), tensor(2, [3, 1]), tensor(3, [1, columns]));
        let (shifted, scaled, total) = (tensor(4, whole), tensor(5, whole), tensor(6, [3, 1]));
        let chain = &mut Chain::default();
        assert!(joins(chain, two(Binary::Sub, &x, &row), &shifted));
        assert!(joins(chain, two(Binary::Mul, &shifted, &column), &scaled));
        assert_eq!(joins(chain, sum(&scaled), &total), fits, "{columns} columns");
        assert!(chain.has(scaled.id) && chain.has(total.id) == fits);
        assert_eq!(joins(&mut Chain::default(), sum(&x), &total), fits, "{columns} columns");
    }
}

/// What a launch writes.
fn run(launch: &Launch<Vec<f64>>) -> Vec<Vec<f64>> {
    let inputs: Vec<&[f64]> = launch.inputs.iter().map(Vec::as_slice).collect();
    launch.program.evaluate(&inputs, &launch.shares, &launch.scalars, &launch.draws, (launch.rows, launch.columns))
}

fn ids<H>(launch: &Launch<H>) -> Vec<Option<u64>> {
    launch.outputs.iter().map(|x| x.id.map(|id| id.value())).collect()
}

/// Of a norm `(x - mean) gamma` of a sum, the centered and the scaled input are not written, and what remakes them has the
/// same numbers.
#[test]
fn what_follows_from_the_input_of_a_norm_is_not_written() {
    let whole = [3, 4];
    let (a, b, gamma) = (tensor(1, whole), tensor(2, whole), tensor(3, [1, 4]));
    let [x, centered, scaled] = [4, 5, 6].map(|id| tensor(id, whole));
    let [total, mean] = [7, 8].map(|id| TensorIr { status: TensorStatus::ReadWrite, ..tensor(id, [3, 1]) });
    let values = |id: TensorId| -> Vec<f64> {
        let count = if id == gamma.id { 4 } else { 12 };
        (0..count).map(|i| (i as f64 + 7.0 * id.value() as f64).sin()).collect()
    };
    let chain = || {
        let mut chain = Chain::default();
        assert!(joins(&mut chain, two(Binary::Add, &a, &b), &x));
        assert!(joins(&mut chain, sum(&x), &total));
        assert!(joins(&mut chain, quarter_of(&total), &mean));
        assert!(joins(&mut chain, two(Binary::Sub, &x, &mean), &centered));
        assert!(joins(&mut chain, two(Binary::Mul, &centered, &gamma), &scaled));
        chain
    };
    let (launch, remade) = chain().take(DType::F32, true, None).unwrap();
    assert_eq!(ids(&launch), [Some(4), None], "the sum, and the mean of each row");
    let written = run(&launch.with_inputs(values));
    let stored = chain().take(DType::F32, true, Some(centered.id)).unwrap().0;
    assert_eq!(ids(&stored), [Some(4), Some(5)], "what is about to be read is written");
    let expected = run(&chain().launch_of(scaled.id, DType::F32, true).unwrap().with_inputs(values));
    let remade: Vec<_> = remade
        .into_iter()
        .map(|launch| {
            let launch = launch.with_inputs(|origin| match origin {
                Origin::Output(output) => written[output].clone(),
                Origin::Input(id) => values(id),
            });
            (ids(&launch), run(&launch))
        })
        .collect();
    assert_eq!(remade[1], (vec![Some(6)], expected), "as the chain itself computes it");
    assert_eq!(remade[0], (vec![Some(5)], vec![run(&stored.with_inputs(values))[1].clone()]));
}

/// Nothing is remade from inputs of all elements.
#[test]
fn what_needs_more_than_is_stored_is_written() {
    let whole = [3, 4];
    let (a, b) = (tensor(1, whole), tensor(2, whole));
    let (product, sum_of_both) = (tensor(4, whole), tensor(5, whole));
    let mut chain = Chain::default();
    assert!(joins(&mut chain, two(Binary::Mul, &a, &b), &product));
    assert!(joins(&mut chain, two(Binary::Add, &product, &b), &sum_of_both));
    let (launch, remade) = chain.take(DType::F32, true, None).unwrap();
    assert_eq!(ids(&launch), [Some(4), Some(5)]);
    assert!(remade.is_empty());
}

/// A launch writes something: rows times columns follow from nothing that it writes.
#[test]
fn what_follows_from_inputs_alone_is_written() {
    let (rows, columns, product) = (tensor(1, [3, 1]), tensor(2, [1, 4]), tensor(3, [3, 4]));
    let mut chain = Chain::default();
    assert!(joins(&mut chain, two(Binary::Mul, &rows, &columns), &product));
    let (launch, remade) = chain.take(DType::F32, true, None).unwrap();
    assert_eq!((ids(&launch), remade.len()), (vec![Some(3)], 0));
}

/// Which chain a number of rows is part of depends on what a rank has read.
#[test]
fn numbers_of_rows_are_f32_in_every_chain() {
    for (columns, is_half) in [(1, false), (2, true)] {
        let (x, double) = (tensor(1, [3, columns]), tensor(2, [3, columns]));
        let limits = Limits { dtype: DType::F32, fits: |_| true, sums: |_| true, elements: 1 << 20 };
        let mut chain = Chain::default();
        let sum = two(Binary::Add, &x, &x);
        let operand = |x: &TensorIr, _| Operand { handle: x.id, is_half: true, has_copy: false };
        assert!(chain.join((&sum, &double), limits, &ById::default(), operand));
        assert_eq!(chain.is_half(double.id), is_half);
        let (launch, _) = chain.take(DType::F32, true, None).unwrap();
        assert_eq!(launch.outputs[0].is_half, is_half, "{columns} columns");
    }
}

/// A sum over one column is none over the columns of longer rows.
#[test]
fn what_is_summed_over_one_column_does_not_become_a_number_of_longer_rows() {
    let [x, total, double] = [1, 2, 3].map(|id| tensor(id, [3, 1]));
    let (whole, out) = (tensor(4, [3, 4]), tensor(5, [3, 4]));
    for (expression, grows) in [(sum(&x), false), (two(Binary::Add, &x, &x), true)] {
        let mut chain = Chain::default();
        let of_rows = if grows { &double } else { &total };
        assert!(joins(&mut chain, expression, of_rows));
        assert_eq!(joins(&mut chain, two(Binary::Mul, &whole, of_rows), &out), grows);
    }
}

/// The gradients of a norm's parameters are sums of rows of numbers that nobody else reads.
#[test]
fn rows_are_summed_without_being_written() {
    let limits = Limits { dtype: DType::F32, fits: |_| true, sums: |columns| columns == 4, elements: 1 << 20 };
    let (x, y) = (tensor(1, [3, 4]), tensor(2, [3, 4]));
    let product = tensor(3, [3, 4]);
    let consumed = TensorIr { status: TensorStatus::ReadWrite, ..product.clone() };
    let (total, beta, double) = (tensor(4, [1, 4]), tensor(5, [1, 4]), tensor(6, [3, 4]));
    let mut chain = Chain::default();
    assert!(joins(&mut chain, two(Binary::Mul, &x, &y), &product));
    assert!(joins(&mut chain, two(Binary::Add, &product, &y), &double));
    assert!(!chain.sum_rows(&x, &total, limits), "the chain does not compute what it reads");
    assert!(chain.sum_rows(&consumed, &total, limits) && chain.sum_rows(&double, &beta, limits));
    assert!(!chain.has(product.id) && chain.is_sum(total.id) && !chain.is_sum(double.id) && chain.has_sums());
    assert!(!chain.sum_rows(&total, &tensor(7, [1, 1]), limits), "a sum has one row");
    let flat = TensorIr { shape: Shape::from([4]), ..tensor(8, [1, 4]) };
    assert!(chain.reshape(&TensorIr { status: TensorStatus::ReadWrite, ..total.clone() }, &flat));
    chain.want_half(flat.id);
    let (launch, remade) = chain.take(DType::F32, true, None).unwrap();
    assert_eq!((ids(&launch), remade.len()), (vec![Some(6), Some(5), Some(8)], 0));
    assert_eq!(launch.outputs[2].shape.to_vec(), [4]);
    let numbers = |first: usize| (first..first + 12).map(|x| x as f64).collect();
    let launch = launch.with_inputs(|x| if x == TensorId::new(1) { numbers(0) } else { numbers(1) });
    let column = |c: usize, f: fn(f64) -> f64| (0..3).map(|row| f((4 * row + c) as f64)).sum::<f64>();
    let columns = |f| (0..4).map(|c| column(c, f)).collect::<Vec<_>>();
    assert_eq!(run(&launch)[1..], [columns(|x| x * (x + 1.0) + x + 1.0), columns(|x| x * (x + 1.0))]);
}

/// Rows that a kernel cannot sum, and one row, which is its own sum.
#[test]
fn some_rows_are_not_summed_in_the_chain() {
    let limits = Limits { dtype: DType::F32, fits: |_| true, sums: |columns| columns == 4, elements: 1 << 20 };
    for (shape, sums) in [([3, 4], true), ([3, 5], false), ([1, 4], false)] {
        let (x, double, total) = (tensor(1, shape), tensor(2, shape), tensor(3, [1, shape[1]]));
        let mut chain = Chain::default();
        assert!(joins(&mut chain, two(Binary::Add, &x, &x), &double));
        assert_eq!(chain.sum_rows(&double, &total, limits), sums, "{shape:?}");
    }
}
