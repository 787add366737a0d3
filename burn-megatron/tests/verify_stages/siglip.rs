//! SigLIP's classifier and pooling head train over ranks as on one device, in double precision.

use std::ops::Range;

use burn::prelude::*;
use burn_megatron::prelude::*;
use models::images::{Siglip, SiglipConfig};

use crate::images::pixels;
use crate::{layouts, no_fallback, proven};

fn siglip(device: &Device) -> Siglip {
    let mut config = SiglipConfig { num_labels: Some(7), ..SiglipConfig::tiny() };
    config.vision_config.initializer_range = 0.1;
    Siglip::new(&config, device)
}

/// Of the classes, and of the mean square of the pooling head's output, which the classifier does not use.
fn loss(model: &Siglip, items: Range<usize>, device: &Device) -> Tensor<1> {
    let classes: Vec<i64> = items.clone().map(|item| (item % 7) as i64).collect();
    let states = model.states(pixels(items, device));
    let pooled = model.pool(states.clone()).unwrap();
    Siglip::loss(model.classify(states).unwrap(), Tensor::from_data(classes.as_slice(), device))
        + pooled.square().mean()
}

#[test]
fn siglip_trains_over_ranks_as_on_one_device() {
    let layouts = layouts("TP2, TP4, TP2 SP, DP2, TP2 DP2 ZeRO3, TP2 SP DP2 ZeRO1");
    let proof = Proof::default().plan(Siglip::plan());
    proven(verify_module_as(siglip, loss, &layouts, &proof), 6);
}

#[test]
fn every_operation_has_a_rule() {
    no_fallback(siglip, Siglip::plan(), loss, &["TP2"]);
}
