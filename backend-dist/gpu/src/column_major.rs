//! Strided row-major GEMMs as problems of a column-major library (cuBLAS). Pure arithmetic.

/// A strided batch of matrices: element `(b, i, j)` is at index `b · batch + i · row + j · column`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// Number of matrices.
    pub batches: usize,
    /// Rows of a matrix.
    pub rows: usize,
    /// Columns of a matrix.
    pub columns: usize,
    /// Stride of matrices.
    pub batch: usize,
    /// Stride of rows.
    pub row: usize,
    /// Stride of columns.
    pub column: usize,
}

impl Matrices {
    /// Contiguous, row-major.
    pub fn dense(batches: usize, rows: usize, columns: usize) -> Self {
        Self { batches, rows, columns, batch: rows * columns, row: columns, column: 1 }
    }

    /// One matrix: the last dimension by all others, if these are evenly spaced.
    pub fn flat(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let last = shape.len() - 1;
        let (rows, row) = collapse(&shape[..last], &strides[..last])?;
        Some(Self { batches: 1, rows, columns: shape[last], batch: 0, row, column: strides[last] })
    }

    /// The last two dimensions; the others are a batch, if they are evenly spaced.
    pub fn batched(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let lead = shape.len() - 2;
        let (batches, batch) = collapse(&shape[..lead], &strides[..lead])?;
        let (rows, columns) = (shape[lead], shape[lead + 1]);
        Some(Self { batches, rows, columns, batch, row: strides[lead], column: strides[lead + 1] })
    }

    /// The transpose, without a copy.
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, row: self.column, column: self.row, ..self }
    }

    /// Elements from the first to the last, inclusive; 0 if there are none.
    pub fn span(&self) -> usize {
        let sizes = [(self.batches, self.batch), (self.rows, self.row), (self.columns, self.column)];
        if sizes.iter().any(|&(n, _)| n == 0) {
            return 0;
        }
        1 + sizes.iter().map(|&(n, stride)| (n - 1) * stride).sum::<usize>()
    }

    /// The matrices in the library's terms, if possible: either rows or columns must be contiguous.
    pub fn stored(&self) -> Option<Stored> {
        let batch = if self.batches > 1 { self.batch } else { 0 };
        let found = |transposed, inner, outer, stride| {
            // The stride of a dimension of size one is never used and may be anything.
            let ld: usize = if outer == 1 { inner } else { stride };
            (ld >= inner).then_some(Stored { transposed, rows: inner, columns: outer, ld, batch })
        };
        let by_rows = (self.column == 1 || self.columns == 1).then(|| found(false, self.columns, self.rows, self.row));
        let by_columns = (self.row == 1 || self.rows == 1).then(|| found(true, self.rows, self.columns, self.column));
        by_rows.flatten().or(by_columns.flatten())
    }
}

/// Number and spacing of the elements of `shape`, if they are evenly spaced. Dimensions of size one have no spacing.
fn collapse(shape: &[usize], strides: &[usize]) -> Option<(usize, usize)> {
    let (mut count, mut spacing) = (1, None);
    for (&n, &stride) in shape.iter().zip(strides).rev().filter(|&(&n, _)| n != 1) {
        match spacing {
            None => spacing = Some(stride),
            Some(inner) if stride == inner * count => {}
            Some(_) => return None,
        }
        count *= n;
    }
    Some((count, spacing.unwrap_or(0)))
}

/// A column-major matrix (or a batch) in memory, and whether the library must transpose it to get the operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Whether the library must transpose it.
    pub transposed: bool,
    /// Elements of a contiguous column.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// Leading dimension: stride of columns.
    pub ld: usize,
    /// Stride of matrices; 0 for a single one.
    pub batch: usize,
}

/// The row-major GEMM `C = A · B` as the column-major `Cᵀ = Bᵀ · Aᵀ`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// `B`, the library's first operand.
    pub first: Stored,
    /// `A`, the library's second operand.
    pub second: Stored,
    /// `C`, never transposed.
    pub out: Stored,
    /// Number of GEMMs.
    pub batches: usize,
    /// SMs that they leave to overlapped collectives.
    pub reserved_sms: usize,
}

impl Problem {
    /// `[m, k] · [k, n]` with a contiguous output; `None` if an operand has to be copied first, see
    /// [`Matrices::stored`], or the operands do not fit.
    pub fn new(a: &Matrices, b: &Matrices) -> Option<Self> {
        let fits = a.columns == b.rows && a.batches == b.batches;
        let out = Matrices::dense(a.batches, a.rows, b.columns);
        // An output with one column is stored either way; it must not be transposed.
        let out = Stored { transposed: false, rows: out.columns, columns: out.rows, ld: out.columns, ..out.stored()? };
        fits.then_some(Self { first: b.stored()?, second: a.stored()?, out, batches: a.batches, reserved_sms: 0 })
    }

    /// The same GEMMs with the rows of `out` as output, which may have gaps between them; `None` if they do not fit or
    /// rows are not contiguous.
    pub fn onto(self, out: &Matrices) -> Option<Self> {
        let [rows, columns] = [self.out.columns, self.out.rows];
        let ld = if rows == 1 { columns } else { out.row };
        let batch = if out.batches > 1 { out.batch } else { 0 };
        let fits = [out.batches, out.rows, out.columns] == [self.batches, rows, columns];
        let are_runs = (out.column == 1 || columns == 1) && ld >= columns;
        (fits && are_runs).then_some(Self { out: Stored { ld, batch, ..self.out }, ..self })
    }
}

/// The largest power of two up to 256 that divides an address.
pub fn alignment(address: usize) -> u32 {
    1 << address.trailing_zeros().min(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element `(i, j)` of the library's operand after its transposition flag.
    fn element(stored: &Stored, batch: usize, i: usize, j: usize) -> usize {
        let (i, j) = if stored.transposed { (j, i) } else { (i, j) };
        assert!(i < stored.rows && j < stored.columns);
        batch * stored.batch + j * stored.ld + i
    }

    /// Every element of `matrices`, in the library's terms, has the right index.
    fn holds(matrices: &Matrices) {
        let stored = matrices.stored().unwrap();
        for b in 0..matrices.batches {
            for i in 0..matrices.rows {
                for j in 0..matrices.columns {
                    let expected = b * matrices.batch + i * matrices.row + j * matrices.column;
                    assert_eq!(element(&stored, b, j, i), expected, "{matrices:?} as {stored:?}");
                }
            }
        }
    }

    #[test]
    fn operands_lie_where_the_library_looks() {
        let cases: [(&[usize], &[usize]); 8] = [
            (&[3, 4], &[4, 1]),
            (&[3, 4], &[7, 1]),
            (&[4, 3], &[1, 4]),
            (&[1, 4], &[99, 1]),
            (&[4, 1], &[1, 77]),
            (&[4, 1], &[6, 1]),
            (&[1, 1], &[5, 5]),
            (&[1, 5], &[1, 9]),
        ];
        for (shape, strides) in cases {
            let matrix = Matrices::batched(shape, strides).unwrap();
            holds(&matrix);
            holds(&matrix.transposed());
        }
        // Keys [s, b, h, d] as [b, h, s, d]: the batch is evenly spaced.
        let (b, h, s, d) = (2, 3, 5, 4);
        let keys = Matrices::batched(&[b, h, s, d], &[h * d, d, b * h * d, 1]).unwrap();
        assert_eq!((keys.batches, keys.batch, keys.row), (6, d, b * h * d));
        holds(&keys);
        holds(&keys.transposed());
    }

    #[test]
    fn what_the_library_cannot_see_is_refused() {
        assert_eq!(Matrices::batched(&[3, 4], &[8, 2]).unwrap().stored(), None, "neither rows nor columns are runs");
        assert_eq!(Matrices::batched(&[3, 4], &[0, 1]).unwrap().stored(), None, "a broadcast row");
        assert_eq!(Matrices::flat(&[2, 3, 4], &[4, 8, 1]), None, "transposed leading dimensions");
        // A slice of the heads of a packed projection of 8 heads.
        assert_eq!(Matrices::batched(&[2, 3, 5, 4], &[32, 4, 64, 1]), None);
    }

    #[test]
    fn leading_dimensions_collapse_where_evenly_spaced() {
        let flat =
            |shape: &[usize], strides: &[usize]| Matrices::flat(shape, strides).map(|m| (m.rows, m.row, m.column));
        assert_eq!(flat(&[2, 3, 4], &[12, 4, 1]), Some((6, 4, 1)));
        assert_eq!(flat(&[2, 3, 4], &[24, 8, 1]), Some((6, 8, 1)), "padded rows");
        assert_eq!(flat(&[1, 3, 4], &[99, 4, 1]), Some((3, 4, 1)));
        assert_eq!(flat(&[4], &[1]), Some((1, 0, 1)));
        assert_eq!(flat(&[2, 2, 3, 4], &[24, 12, 4, 1]), Some((12, 4, 1)));
    }

    #[test]
    fn a_linear_layer_is_a_gemm_with_a_transposed_weight() {
        let (tokens, input, output) = (6, 4, 5);
        let x = Matrices::dense(1, tokens, input);
        let w = Matrices::dense(1, output, input);
        let grad = Matrices::dense(1, tokens, output);
        let forward = Problem::new(&x, &w.transposed()).unwrap();
        assert_eq!((forward.first.transposed, forward.second.transposed), (true, false));
        assert_eq!((forward.out.rows, forward.out.columns, forward.out.ld), (output, tokens, output));
        let weight = Problem::new(&grad.transposed(), &x).unwrap();
        assert_eq!((weight.first.transposed, weight.second.transposed), (false, true));
        assert_eq!((weight.out.rows, weight.out.columns), (input, output));
        assert_eq!(Problem::new(&x, &w), None, "inner sizes differ");
        assert_ne!(forward, weight);
    }

    #[test]
    fn results_go_to_rows_with_gaps() {
        let (x, w) = (Matrices::dense(2, 3, 4), Matrices { batch: 0, ..Matrices::dense(2, 5, 4) }.transposed());
        let problem = Problem::new(&x, &w).unwrap();
        assert_eq!((problem.first.batch, problem.out.batch), (0, 15));
        // Rows 3 to 5 of each half of 12 rows.
        let out = Matrices::batched(&[2, 3, 5], &[30, 5, 1]).unwrap();
        let there = problem.onto(&out).unwrap();
        assert_eq!(there.out, Stored { batch: 30, ..problem.out });
        assert_eq!((there.first, there.second), (problem.first, problem.second));
        assert_eq!(problem.onto(&Matrices::dense(2, 3, 5)), Some(problem));
        assert_eq!(problem.onto(&Matrices::dense(2, 5, 3)), None);
        assert_eq!(problem.onto(&Matrices::dense(1, 6, 5)), None);
        assert_eq!(problem.onto(&Matrices::batched(&[2, 3, 5], &[30, 1, 3]).unwrap()), None);
    }

    #[test]
    fn thin_results_are_not_transposed() {
        let column = Problem::new(&Matrices::dense(3, 7, 4), &Matrices::dense(3, 4, 1)).unwrap();
        assert_eq!(column.out, Stored { transposed: false, rows: 1, columns: 7, ld: 1, batch: 7 });
        let row = Problem::new(&Matrices::dense(1, 1, 4), &Matrices::dense(1, 4, 7)).unwrap();
        assert_eq!(row.out, Stored { transposed: false, rows: 7, columns: 1, ld: 7, batch: 0 });
    }

    #[test]
    fn a_view_spans_its_first_to_its_last_element() {
        assert_eq!(Matrices::dense(2, 3, 4).span(), 24);
        assert_eq!(Matrices::flat(&[3, 4], &[10, 1]).unwrap().span(), 24);
        assert_eq!(Matrices::dense(2, 0, 4).span(), 0);
    }

    #[test]
    fn alignments_end_at_a_cache_line_pair() {
        assert_eq!([0x1000, 0x100, 0x80, 0x1012, 0x3].map(alignment), [256, 256, 128, 2, 1]);
    }
}
