//! Gradients of parameters that are accumulated in place, in f32 or bf16, instead of being returned by the backward pass.
//!
//! As Megatron-LM's `main_grad` (`LinearWithGradAccumulationAndAsyncCommunication` in
//! `megatron/core/tensor_parallel/layers.py`): the weight gradient of one micro-batch is never materialised, its GEMM
//! adds to the sum over micro-batches. Only on CUDA; elsewhere gradients are returned in
//! [`Gradients`](burn::tensor::Gradients).

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{
    Autodiff, Backend, Dispatch,
    autodiff::{NodeId, checkpoint::strategy::CheckpointStrategy, grads::Gradients},
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{DType, Device, Tensor};

use super::{kernels::LocalKernels, operation::on_backends};

thread_local! {
    /// The main gradients of this rank's parameters, by the node of the leaf.
    static MAIN_GRADS: RefCell<HashMap<NodeId, MainGrad>> = RefCell::new(HashMap::new());
}

/// The accumulator of a parameter's gradient: elements of a flat f32 or bf16 buffer on a CUDA device. Clones share it.
#[derive(Clone, Debug)]
pub struct MainGrad {
    view: Tensor<1>,
    written: Arc<AtomicBool>,
}

impl MainGrad {
    /// Accumulates in the elements of `view`, in place. Their present values are ignored: the first contribution
    /// replaces them.
    ///
    /// # Panics
    ///
    /// If `view` is not f32 or bf16 on a CUDA device.
    pub fn new(view: Tensor<1>) -> Self {
        let view = view.inner();
        let dtype = view.dtype();
        assert!(
            matches!(dtype, DType::F32 | DType::BF16),
            "main gradients are accumulated in f32 or bf16, not {dtype:?}"
        );
        assert!(
            can_write(&view),
            "main gradients are accumulated in place on CUDA devices only, not on {:?}",
            view.device()
        );
        Self { view, written: Arc::default() }
    }

    /// The next contribution overwrites the elements.
    pub fn reset(&self) {
        self.written.store(false, Ordering::Relaxed);
    }

    /// Whether there was a contribution since [`reset`](Self::reset).
    pub fn is_written(&self) -> bool {
        self.written.load(Ordering::Relaxed)
    }

    /// The next contribution adds to the elements, which were written elsewhere.
    pub fn mark_written(&self) {
        self.written.store(true, Ordering::Relaxed);
    }
}

/// Whether gradients of parameters on `device` can be accumulated in place.
pub fn is_available(device: &Device) -> bool {
    can_write(&Tensor::zeros([1], (&device.clone().inner(), DType::F32)))
}

#[cfg(feature = "cuda")]
fn can_write(view: &Tensor<1>) -> bool {
    <burn::backend::Cube as LocalKernels>::in_place(view).is_some()
}

#[cfg(not(feature = "cuda"))]
fn can_write(_: &Tensor<1>) -> bool {
    false
}

/// From now on, on this thread, the gradients of the leaf `w` that operations of this crate compute go to `main_grad`.
/// Gradients that other operations compute for it are registered in [`Gradients`](burn::tensor::Gradients) as usual. A
/// second call for the same leaf replaces its main gradient.
///
/// # Panics
///
/// If `w` is not a leaf that requires a gradient, has another number of elements than `main_grad`, or is f64.
pub fn attach<const D: usize>(w: &Tensor<D>, main_grad: MainGrad) {
    let (shape, [elements]) = (w.dims(), main_grad.view.dims());
    assert!(w.is_require_grad(), "a main gradient is for a parameter that wants a gradient, not for one of {shape:?}");
    assert_ne!(w.dtype(), DType::F64, "a main gradient is f32, too coarse for a parameter in f64");
    assert_eq!(
        w.shape().num_elements(),
        elements,
        "a main gradient of {elements} elements for a parameter of {shape:?}"
    );
    let node = <Dispatch as LeafOps>::op_node(w.clone().into_dispatch()).expect("a leaf has a node");
    MAIN_GRADS.with_borrow_mut(|main_grads| main_grads.insert(node, main_grad));
}

/// Detaches these main gradients from this thread.
pub fn detach(main_grads: &[MainGrad]) {
    let is_one = |main_grad: &MainGrad| main_grads.iter().any(|other| Arc::ptr_eq(&other.written, &main_grad.written));
    if !main_grads.is_empty() {
        MAIN_GRADS.with_borrow_mut(|all| all.retain(|_, main_grad| !is_one(main_grad)));
    }
}

/// Detaches all main gradients of this thread.
pub fn detach_all() {
    MAIN_GRADS.with_borrow_mut(HashMap::clear);
}

/// The elements to write to if the leaf `id` has a main gradient, and whether to add to them.
pub(super) fn main_grad<B: LocalKernels>(id: NodeId) -> Option<(FloatTensor<B>, bool)> {
    MAIN_GRADS.with_borrow(|main_grads| {
        let main_grad = main_grads.get(&id)?;
        let view = B::in_place(&main_grad.view).expect("a parameter and its main gradient are on one device");
        Some((view, main_grad.written.swap(true, Ordering::Relaxed)))
    })
}

/// Delivers a gradient of the leaf or inner node `id` to its main gradient, if it has one, else to `grads`.
pub(super) fn deliver<B: LocalKernels>(grads: &mut Gradients, id: NodeId, value: FloatTensor<B>) {
    match main_grad::<B>(id) {
        Some((sum, add)) => B::accumulate(value, &sum, add),
        None => grads.register::<B>(id, value),
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait LeafOps: Backend {
    /// The tensor's node in the graph.
    fn op_node(w: FloatTensor<Self>) -> Option<NodeId>;
}

on_backends! {
    impl LeafOps {
        fn op_node(_: FloatTensor<Self>) -> Option<NodeId> {
            None
        }
    }
}

impl<B: Backend + LeafOps, C: CheckpointStrategy> LeafOps for Autodiff<B, C> {
    fn op_node(w: FloatTensor<Self>) -> Option<NodeId> {
        Some(w.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "in place on CUDA devices only")]
    fn flex_has_no_main_grads() {
        MainGrad::new(Tensor::zeros([4], &Device::flex()));
    }

    #[test]
    fn the_node_of_a_leaf_is_that_of_its_clones() {
        let w = Tensor::<2>::zeros([2, 2], &Device::flex().autodiff()).require_grad();
        let node = |w: &Tensor<2>| <Dispatch as LeafOps>::op_node(w.clone().into_dispatch());
        assert!(node(&w).is_some());
        assert_eq!(node(&w), node(&w.clone()));
        assert_ne!(node(&w), node(&w.clone().detach().require_grad()));
        assert_eq!(node(&w.clone().inner()), None);
    }
}
