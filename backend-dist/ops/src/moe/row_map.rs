//! Permutations and sums of rows.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// A linear map of matrix rows with coefficients 0 and 1: each output row is a sum of input rows. The map and its
/// transpose are index tables; `-1` is padding.
#[derive(Clone, Debug)]
pub struct RowMap {
    /// `[outputs, terms]`: rows of the input.
    to: Tensor<2, Int>,
    /// `[inputs, terms]`: rows of the output.
    back: Tensor<2, Int>,
}

impl RowMap {
    /// Output row `i` is a copy of input row `sources[i]`, or zero for `None`.
    ///
    /// # Panics
    /// If a source is not one of `inputs` rows, or there are no rows.
    pub fn picking(inputs: usize, sources: &[Option<usize>], device: &Device) -> Self {
        let back = transposed(inputs, sources);
        let to = sources.iter().map(|source| source.map_or(-1, |row| row as i32)).collect();
        Self { to: table(to, sources.len(), device), back: table(back, inputs, device) }
    }

    /// The map of two tables that are each other's transposes: `to [outputs, terms]` and `back [inputs, terms]`.
    pub(crate) fn of_tables(to: Tensor<2, Int>, back: Tensor<2, Int>) -> Self {
        Self { to, back }
    }

    /// The transpose: its output rows are sums over the rows that were copies of the same row, in ascending order.
    pub fn reversed(&self) -> Self {
        Self { to: self.back.clone(), back: self.to.clone() }
    }

    /// Number of input rows.
    pub fn inputs(&self) -> usize {
        self.back.dims()[0]
    }

    /// Number of output rows.
    pub fn outputs(&self) -> usize {
        self.to.dims()[0]
    }

    /// The input rows that are summed for each output row, `[outputs, terms]`, and the same of the transpose, `[inputs,
    /// terms]`; -1 is padding.
    pub fn tables(&self) -> (Tensor<2, Int>, Tensor<2, Int>) {
        (self.to.clone(), self.back.clone())
    }
}

/// For each input the outputs that copy it, ascending, padded with -1 to the longest list.
fn transposed(inputs: usize, sources: &[Option<usize>]) -> Vec<i32> {
    assert!(inputs > 0 && !sources.is_empty(), "a map of rows from {inputs} to {} rows", sources.len());
    assert!(inputs.max(sources.len()) <= i32::MAX as usize, "rows are numbered in 32 bits");
    let mut uses = vec![0usize; inputs];
    for &row in sources.iter().flatten() {
        assert!(row < inputs, "row {row} of {inputs}");
        uses[row] += 1;
    }
    let terms = uses.iter().copied().max().unwrap_or(0).max(1);
    let mut back = vec![-1; inputs * terms];
    uses.fill(0);
    for (output, &row) in sources.iter().enumerate().filter_map(|(output, row)| Some((output, row.as_ref()?))) {
        back[row * terms + uses[row]] = output as i32;
        uses[row] += 1;
    }
    back
}

fn table(rows: Vec<i32>, count: usize, device: &Device) -> Tensor<2, Int> {
    let (terms, device) = (rows.len() / count, device.clone().without_autodiff());
    Tensor::from_data(TensorData::new(rows, [count, terms]), (&device, DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transpose_lists_outputs_in_order() {
        assert_eq!(transposed(3, &[Some(2), None, Some(0), Some(2)]), [2, -1, -1, -1, 0, 3]);
        assert_eq!(transposed(2, &[None]), [-1, -1]);
    }

    #[test]
    #[should_panic(expected = "row 3 of 3")]
    fn rows_that_are_not_there_are_refused() {
        transposed(3, &[Some(3)]);
    }
}
