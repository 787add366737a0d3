//! What the extension operations of all families have in common.

/// The operations of an extension trait on every concrete backend: Flex, and Cube on GPUs.
macro_rules! on_backends {
    (impl $operations:ident { $($functions:tt)* }) => {
        impl $operations for burn::backend::Flex { $($functions)* }

        #[cfg(feature = "cuda")]
        impl $operations for burn::backend::Cube { $($functions)* }
    };
}

pub(crate) use on_backends;
