//! Row maps that copy ranges of rows.

use burn::tensor::{Device, Int, Tensor};

use super::super::row_map::RowMap;
use super::tables::{Run, table};

/// A row map that copies ranges: rows of its input, rows of its output, and the copied ranges.
pub type Runs = ([usize; 2], Vec<Run>);

impl RowMap {
    /// Maps that copy ranges of rows; all other output rows are zero. The ranges of a map are disjoint. All tables are
    /// computed at once.
    ///
    /// # Panics
    /// If a range is outside, or ranges overlap.
    pub fn of_runs(maps: &[Runs], device: &Device) -> Vec<Self> {
        let turned = |run: &Run| Run { to: run.from, from: run.to, len: run.len };
        let both_ways = |([inputs, outputs], runs): &Runs| {
            [([*inputs, *outputs], runs.clone()), ([*outputs, *inputs], runs.iter().map(turned).collect())]
        };
        let mut tables = numbers(maps.iter().flat_map(both_ways), device).into_iter();
        let mut next = || tables.next().expect("two tables for each map");
        maps.iter().map(|_| Self::of_tables(next(), next())).collect()
    }
}

/// `[outputs, 1]` of each: the input row of each output row.
fn numbers(tables: impl Iterator<Item = Runs>, device: &Device) -> Vec<Tensor<2, Int>> {
    let checked = |([inputs, outputs], mut runs): Runs| {
        runs.retain(|run| run.len > 0);
        runs.sort_unstable_by_key(|run| run.to);
        let apart = runs.windows(2).all(|pair| pair[0].to + pair[0].len <= pair[1].to);
        let inside = runs.iter().all(|run| run.to + run.len <= outputs && run.from + run.len <= inputs);
        let legal = apart && inside && inputs.max(outputs) <= i32::MAX as usize;
        assert!(legal, "runs {runs:?} of {inputs} to {outputs} rows");
        (runs, outputs)
    };
    let tables: Vec<(Vec<Run>, usize)> = tables.map(checked).collect();
    #[cfg(feature = "cuda")]
    if let Some(found) = crate::cuda::routing::runs(&tables, device) {
        return found;
    }
    let on_host = |(runs, outputs): (Vec<Run>, usize)| {
        let mut out = vec![-1; outputs];
        for run in runs {
            out[run.to..run.to + run.len].iter_mut().zip(run.from..).for_each(|(out, row)| *out = row as i32);
        }
        table(out, [outputs, 1], device)
    };
    tables.into_iter().map(on_host).collect()
}
