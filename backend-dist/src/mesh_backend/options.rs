//! What a program may choose about a logical device.

use burn::tensor::{DType, FloatDType};

/// How a [logical device](crate::mesh_backend::LogicalDevice::logical_device_with) computes.
///
/// ```
/// use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::{LogicalDevice, LogicalOptions}};
/// use burn::tensor::{Device, FloatDType, Tensor};
///
/// launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
///     let mixed = LogicalOptions { autocast: Some(FloatDType::BF16), ..Default::default() };
///     let device = rank.logical_device_with(&[Axis::Tp], mixed);
///     // f32 for the program, whatever the GEMM reads and writes.
///     let x = Tensor::<2>::ones([2, 2], &device);
///     assert_eq!(x.clone().matmul(x).into_data().to_vec::<f32>()?, [2.0; 4]);
///     Ok(())
/// })?;
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogicalOptions {
    /// Mixed precision for f32 tensors, as under PyTorch's `torch.autocast`: GEMMs read and write this type, bf16 or f16,
    /// and what is computed from their outputs alone is stored in it. Parameters, their gradients, optimizer states and
    /// sums over rows are f32. It is part of [`fusion`](Self::fusion): without that, as on CPU ranks by default, all
    /// is f32.
    pub autocast: Option<FloatDType>,
    /// Linear layers multiply in FP8 (e4m3): outputs, and gradients of inputs and weights, of layers whose rows, inputs and
    /// outputs are multiples of 128 on every rank, and whose inputs have at most three dimensions. Every 128 consecutive
    /// numbers that a GEMM adds up have a scale, a power of two, and every 128 × 128 of a weight (Transformer Engine's
    /// `Float8BlockScaling`). On GPUs it needs [`autocast`](Self::autocast), or a model in bf16 or f16, compute capability
    /// 9.0 and cuBLASLt 12.9; on CPU ranks it is emulated in any type, so that layouts can be compared in f64. It is part of
    /// [`fusion`](Self::fusion) too.
    pub fp8: bool,
    /// Whether elementwise operations and reductions over rows run together as one kernel. `None`: on GPUs. On CPU ranks
    /// it is slower, and there to find out what a GPU does; it covers f32 with autocast, else f64.
    pub fusion: Option<bool>,
    /// Whether operations are planned and launched by a thread of their own, while the program issues the next ones.
    /// `None`: on GPUs, where the host is what limits small models. An error in an operation then stops the program at a
    /// later one; with `Some(false)` at that operation, whose backtrace says where it was issued.
    pub run_ahead: Option<bool>,
}

impl LogicalOptions {
    /// # Panics
    /// If the autocast type is neither bf16 nor f16, or fusion, which it and FP8 need, is off.
    pub(crate) fn check(self) {
        let without = self.fusion == Some(false);
        assert!(
            !(self.autocast.is_some() && without),
            "logical device: autocast needs fusion; leave fusion at None, or choose Some(true)"
        );
        assert!(!(self.fp8 && without), "logical device: FP8 needs fusion; leave fusion at None, or choose Some(true)");
        let is_half = |half: FloatDType| matches!(half, FloatDType::BF16 | FloatDType::F16);
        if let Some(half) = self.autocast.filter(|half| !is_half(*half)) {
            panic!("logical device: autocast to {half:?} is not possible; to BF16 and F16 it is");
        }
    }

    pub(super) fn half(self) -> Option<DType> {
        self.autocast.map(DType::from)
    }
}
