//! `burn/fusion` must be off: a program that turns it on does not compile, and reads why.
//!
//! With fusion, CubeCL's tensors are operations in a queue. Collectives and kernels here take the buffers of tensors,
//! and fusion may order two queued collectives differently on two ranks (it orders by data, and they have none in
//! common). Cargo turns features on for the whole program, so that any crate with Burn's default features, or with
//! `fusion` among them, turns it on for this one.

/// Takes precedence over a constant of the same name in a trait.
#[allow(dead_code)]
mod fusion {
    pub struct FuserStatus;

    impl FuserStatus {
        pub const IS_ON: bool = false;
    }
}

#[allow(dead_code)]
trait Fusion {
    const IS_ON: bool = true;
}

impl<T> Fusion for T {}

/// Burn has `burn::backend::fusion` only with the feature. In this block it hides the module above.
const IS_ON: bool = {
    #[allow(unused_imports, clippy::wildcard_imports)]
    use burn::backend::*;
    fusion::FuserStatus::IS_ON
};

const _: () = assert!(
    !IS_ON,
    "burn-megatron needs Burn without its feature `fusion`, which some crate of this program turns on: collectives \
     take the buffers of tensors, and fusion would queue and reorder them. Depend on Burn with `default-features = \
     false`; `cargo tree -e features -i burn-fusion` names the crate that does not."
);

#[cfg(feature = "cuda")]
const _: () = assert!(!burn_cubecl::FUSED, "burn-megatron needs `burn-cubecl` without its feature `fusion`");
