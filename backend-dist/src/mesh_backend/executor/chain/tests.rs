use super::*;
use kernels_cubecl::fused::{Binary, Reduce};

fn tensor(id: u64, shape: [usize; 2]) -> TensorIr {
    TensorIr { id: TensorId::new(id), shape: Shape::from(shape), status: TensorStatus::ReadOnly, dtype: DType::F32 }
}

/// Whether the chain takes `expression` where a kernel has room for rows of eight numbers.
fn joins(chain: &mut Chain<TensorId>, expression: Expression, out: &TensorIr) -> bool {
    let limits = Limits { dtype: DType::F32, fits: |columns| columns <= 8, elements: 1 << 20 };
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
