//! What the operations of all families are written with: a backend extension, and an autograd node.
//!
//! Every node is compute-bound: its inputs are saved and nothing is replayed, so a checkpointing strategy never repeats
//! a forward pass, or a collective without the other ranks.

/// The operations of an extension trait on every concrete backend: Flex, and Cube on GPUs.
macro_rules! on_backends {
    (impl $operations:ident { $($functions:tt)* }) => {
        impl $operations for burn::backend::Flex { $($functions)* }

        #[cfg(feature = "cuda")]
        impl $operations for burn::backend::Cube { $($functions)* }
    };
}

/// An extension trait, with the bodies of its operations on every concrete backend. What takes
/// [`Extras`](crate::extras::Extras) or returns something else than a tensor is written with [`on_backends`].
macro_rules! operations {
    ($(#[$doc:meta])* $visibility:vis trait $operations:ident {
        $($(#[$note:meta])* fn $name:ident($($argument:tt)*) -> FloatTensor<Self> $body:block)*
    }) => {
        $(#[$doc])*
        #[burn::backend::backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
        $visibility trait $operations: burn::backend::Backend {
            $($(#[$note])* fn $name($($argument)*) -> FloatTensor<Self>;)*
        }

        $crate::extension::on_backends! {
            impl $operations {
                $(fn $name($($argument)*) -> FloatTensor<Self> $body)*
            }
        }
    };
}

/// A node: its name, the kernels that its backward pass needs, its number of parents, what it saves, and the backward
/// pass from the gradient of its output.
macro_rules! node {
    (
        $visibility:vis $name:ident: $kernels:ident $(+ $more:ident)*, $parents:literal, $state:ty,
        |$ops:ident, $grad:ident, $grads:ident| $body:block
    ) => {
        #[derive(Debug)]
        $visibility struct $name;

        impl<B: $kernels $(+ $more)*> burn::backend::autodiff::ops::Backward<B, $parents> for $name {
            type State = $state;

            fn backward(
                self,
                $ops: burn::backend::autodiff::ops::Ops<Self::State, $parents>,
                $grads: &mut burn::backend::autodiff::grads::Gradients,
                _: &mut burn::backend::autodiff::checkpoint::base::Checkpointer,
            ) {
                let $grad = $grads.consume::<B>(&$ops.node);
                $body
            }
        }
    };
}

/// The output of a node, which saves `state` if a parent is tracked. `state` comes before the `output`.
macro_rules! finish {
    ($node:expr, $parents:expr, $state:expr, $output:expr $(,)?) => {{
        use burn::backend::autodiff::ops::{Backward, OpsKind};

        match $node.prepare::<C>($parents).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish($state, $output),
            OpsKind::UnTracked(prep) => prep.finish($output),
        }
    }};
}

pub(crate) use {finish, node, on_backends, operations};
