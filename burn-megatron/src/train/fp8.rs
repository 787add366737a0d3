//! Whether a device can do what `[fp8]` asks for.

use backend_dist::gpu::GpuInfo;
use backend_dist::gpu::model::{FP8, FP8_BLOCKS};
use backend_dist::ops::fp8::Fp8Scaling;
use models::Fp8Config;

use crate::config::Precision;

/// A GPU's name in messages, and its compute capability.
pub(crate) type Gpu = (String, (u32, u32));

/// As messages name a GPU of this host.
pub(super) fn of_host(GpuInfo { index, name, capability, .. }: &GpuInfo) -> Gpu {
    (format!("GPU {index} ({name})"), *capability)
}

/// `gpus` are those that the ranks have, none on CPU ranks. Fails on GPUs with a precision other than bf16 and f16, or
/// a GPU without FP8 tensor cores, or without scales of blocks that the recipe has.
pub(crate) fn possible(fp8: &Fp8Config, dtype: Precision, gpus: &[Gpu]) -> Result<(), String> {
    let Some(recipe) = fp8.recipe().filter(|_| !gpus.is_empty()) else { return Ok(()) };
    let format = format!("fp8.format = {:?}", recipe.format).to_lowercase();
    if !matches!(dtype, Precision::Bf16 | Precision::F16) {
        let dtype = format!("{dtype:?}").to_lowercase();
        return Err(format!(
            "{format} with training.dtype = {dtype}: FP8 layers lie between others in bf16 or f16; nearest legal: \
             training.dtype = bf16"
        ));
    }
    if let Some((gpu, (major, minor))) = gpus.iter().find(|(_, capability)| *capability < FP8) {
        return Err(format!(
            "{format}: {gpu} has compute capability {major}.{minor}, FP8 GEMMs need {}.{} or more (Hopper: 9.0); leave \
             fp8.format out",
            FP8.0, FP8.1
        ));
    }
    let blocks = recipe.scaling == Fp8Scaling::Blockwise;
    match gpus.iter().find(|(_, capability)| blocks && *capability != FP8_BLOCKS) {
        Some((gpu, (major, minor))) => Err(format!(
            "fp8.recipe = blockwise: {gpu} has compute capability {major}.{minor}, cuBLASLt multiplies blocks with scales of \
             their own on {}.{} (Hopper); nearest legal: fp8.recipe = tensorwise",
            FP8_BLOCKS.0, FP8_BLOCKS.1
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::ops::fp8::Fp8Format;

    #[test]
    fn what_a_gpu_cannot_do_is_refused() {
        let gpu = |capability| {
            let (index, name, bus) = (1, "NVIDIA A100".into(), String::new());
            of_host(&GpuInfo { index, name, total: 0, capability, processors: 108, bus })
        };
        let hybrid = Fp8Config { format: Some(Fp8Format::Hybrid), ..Fp8Config::default() };
        let refused = |dtype, capability| possible(&hybrid, dtype, &[gpu(capability)]).unwrap_err();
        assert!(refused(Precision::F32, (9, 0)).starts_with("fp8.format = hybrid with training.dtype = f32: "));
        assert!(refused(Precision::Bf16, (8, 0)).contains("GPU 1 (NVIDIA A100) has compute capability 8.0"));
        assert_eq!(possible(&hybrid, Precision::Bf16, &[gpu((9, 0))]), Ok(()));
        assert_eq!(possible(&hybrid, Precision::F64, &[]), Ok(()));
        let blockwise = Fp8Config { recipe: Fp8Scaling::Blockwise, ..hybrid };
        let newer = possible(&blockwise, Precision::Bf16, &[gpu((10, 0))]).unwrap_err();
        assert!(newer.starts_with("fp8.recipe = blockwise: GPU 1") && newer.contains("capability 10.0"), "{newer}");
        assert_eq!(possible(&blockwise, Precision::Bf16, &[gpu((9, 0))]), Ok(()));
        assert_eq!(possible(&Fp8Config::default(), Precision::F64, &[gpu((8, 0))]), Ok(()));
    }
}
