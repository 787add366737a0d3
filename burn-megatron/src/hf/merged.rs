//! Weights with what adapters add to them.

use std::ops::Range;

use backend_dist::launch::BoxError;
use backend_dist::shard::HostTensor;
use models::WeightSource;
use models::lora::Adapter;
use rayon::prelude::*;

use super::folder::HfFolder;
use super::outputs::TensorReader;
use crate::element::Element;

/// The weights of a folder with those of adapters added.
pub struct Merged<'a> {
    /// The base model.
    pub base: &'a HfFolder,
    /// Its adapters, each with the factor of what it adds to the weights.
    pub adapters: &'a [(Adapter, f64)],
    /// Type that weights with an adapter are rounded to once; `None` is the base's own.
    pub element: Option<Element>,
}

impl Merged<'_> {
    /// Our name of the layer and its adapters, if its weight has this name and it has some.
    fn layer<'n>(&self, name: &'n str) -> Option<(&'n str, Vec<&(Adapter, f64)>)> {
        let layer = name.strip_suffix(".weight")?;
        let own: Vec<&(Adapter, f64)> = self.adapters.iter().filter(|(adapter, _)| adapter.plan.has(layer)).collect();
        (!own.is_empty()).then_some((layer, own))
    }
}

impl TensorReader for Merged<'_> {
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError> {
        let own = self.base.element(name, shape)?;
        Ok(self.layer(name).and(self.element).unwrap_or(own))
    }

    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError> {
        let Some((layer, adapters)) = self.layer(name) else { return self.base.read_bytes(name, shape, ranges) };
        let (rows, columns) = (ranges[0].clone(), ranges[1].clone());
        let base = self.base.read(name, shape, &[rows.clone(), 0..shape[1]])?;
        let mut sum = base.clone();
        for (adapter, factor) in adapters {
            let tensor = |name: &str| -> Result<HostTensor, BoxError> {
                Ok(adapter.tensors.get(name).ok_or_else(|| format!("the adapter has no {name}"))?.clone())
            };
            let merged = adapter.plan.merge(layer, rows.clone(), base.clone(), tensor)?;
            let added = |(sum, (merged, base)): (&mut f64, (&f64, &f64))| *sum += factor * (merged - base);
            sum.par_iter_mut().zip(merged.par_iter().zip(&base)).for_each(added);
        }
        if columns != (0..shape[1]) {
            sum = sum.chunks_exact(shape[1]).flat_map(|row| &row[columns.clone()]).copied().collect();
        }
        let mut bytes = Vec::new();
        self.element(name, shape)?.encode_finite(&sum, &mut bytes)?;
        Ok(bytes)
    }
}
