//! What FP8 layers of any module need: types of numbers, and GPUs.

use super::devices::first;
use super::mesh::MeshStrategy;
use backend_dist::gpu::{self, GpuInfo, model::FP8_BLOCKS};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

/// The first parameter that is wider than half precision.
#[derive(Default)]
struct Wide(Option<(DType, Vec<usize>)>);

impl ModuleVisitor for Wide {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if self.0.is_none() && matches!(value.dtype(), DType::F32 | DType::F64) {
            self.0 = Some((value.dtype(), value.dims().to_vec()));
        }
    }
}

impl MeshStrategy {
    /// Refuses FP8 of what is not multiplied in half precision, but for the emulation in f64, and on GPUs that do not have it.
    pub(super) fn check_types<M: Module>(&self, model: &M) -> Result<(), String> {
        if !self.fp8 {
            return Ok(());
        }
        let mut wide = Wide::default();
        if self.autocast.is_none() {
            model.visit(&mut wide);
        }
        let is_gpu = gpu::index(&first(&self.devices, model).inner()).is_some();
        let gpus = if is_gpu { gpu::gpus().map_err(|error| error.to_string())? } else { vec![] };
        possible(wide.0, &gpus)
    }
}

/// `gpus` are those that the ranks have, none on CPU ranks.
fn possible(wide: Option<(DType, Vec<usize>)>, gpus: &[GpuInfo]) -> Result<(), String> {
    if let Some((dtype, shape)) = wide.filter(|(dtype, _)| *dtype == DType::F32 || !gpus.is_empty()) {
        return Err(format!(
            "fp8() and a parameter {shape:?} of {}: FP8 layers lie between others in half precision; nearest legal: \
             .autocast(FloatDType::BF16).fp8()",
            format!("{dtype:?}").to_lowercase()
        ));
    }
    match gpus.iter().find(|gpu| gpu.capability != FP8_BLOCKS) {
        Some(GpuInfo { index, name, capability: (major, minor), .. }) => Err(format!(
            "fp8(): GPU {index} ({name}) has compute capability {major}.{minor}, cuBLASLt multiplies blocks with scales of their \
             own on {}.{} (Hopper); nearest legal: without it",
            FP8_BLOCKS.0, FP8_BLOCKS.1
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_is_refused_where_a_gpu_would_leave_it_out_or_fail() {
        let gpu = |capability| GpuInfo {
            index: 1,
            name: "NVIDIA B200".into(),
            total: 0,
            capability,
            processors: 148,
            bus: String::new(),
        };
        let of = |dtype| Some((dtype, vec![4, 2]));
        assert_eq!((possible(None, &[gpu((9, 0))]), possible(of(DType::F64), &[])), (Ok(()), Ok(())));
        says!(possible(of(DType::F64), &[gpu((9, 0))]).unwrap_err(), "a parameter [4, 2] of f64", ".autocast(");
        says!(possible(None, &[gpu((10, 0))]).unwrap_err(), "GPU 1 (NVIDIA B200) has compute capability 10.0");
    }
}
