//! Gradients leave during the backward pass.

use std::sync::atomic::Ordering::SeqCst;

use burn_megatron::prelude::*;

use crate::classifier::Trap;
use crate::passes::Passes;
use crate::setup::Setup;

/// A CPU rank waits in a reduction for its peer. Where that has failed, a rank comes past the last layer only if gradients
/// of that layer have not left yet.
#[test]
fn gradients_of_the_last_layer_leave_before_the_step_of_the_layer_below() {
    for layout in ["DP2", "DP2 ZeRO1", "DP2 ZeRO2"] {
        let usual = || MegatronStrategy::mesh(layout.parse().unwrap());
        // Of the second step one rank begins its pass, and the other does not.
        let past_head = |strategy: MeshStrategy| {
            let passes = Passes { panic_at: 4, ..Passes::default() };
            let trap = Trap { passes: Some(passes.clone()), ..Trap::default() };
            let result = Setup { trap, ..Setup::default() }.run(tempfile::tempdir().unwrap().path(), strategy.into());
            says!(result.error.expect("a rank fails"), "the pass ran into a wall");
            passes.past_head.load(SeqCst)
        };
        assert_eq!(past_head(usual().overlap_grad_reduce().bucket_size(1)), 2, "{layout}");
        // After the pass, and in one bucket of all parameters.
        assert_eq!(past_head(usual()), 3, "{layout}");
        assert_eq!(past_head(usual().overlap_grad_reduce()), 3, "{layout}");
    }
}
