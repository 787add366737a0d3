//! ViT and LLaVA train over ranks as on one device, in double precision.

use std::ops::Range;

use burn::prelude::*;
use burn::train::RegressionOutput;
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;
use models::images::{Llava, LlavaConfig, Vit, VitConfig};

use crate::{adapted, layouts, no_fallback, proven};

const LAYOUTS: &str = "TP2, TP4, TP2 SP, DP2, TP2 DP2, DP2 ZeRO3, TP2 DP2 ZeRO3, TP2 SP DP2 ZeRO1, TP2 SP DP2 ZeRO3";
/// Of initial weights: attention is not uniform, and the gradient of a key's bias, which is nothing but rounding, is small.
const STD: f64 = 0.1;
/// Tokens of a sequence; the first ones after the second are an image.
const LENGTH: usize = 10;

/// `[items, 3, 8, 8]`, different for every item.
pub fn pixels(items: Range<usize>, device: &Device) -> Tensor<4> {
    let count = items.len();
    let value = |item: usize, at: usize| ((item * 31 + at * (item % 5 + 1)) as f64 * 0.37).sin();
    let values: Vec<f64> = items.flat_map(|item| (0..192).map(move |at| value(item, at))).collect();
    Tensor::from_data(TensorData::new(values, [count, 3, 8, 8]), device)
}

/// `[items, LENGTH]`: two tokens, the four of an image, the others.
fn tokens(items: Range<usize>, device: &Device) -> Tensor<2, Int> {
    let count = items.len();
    let token = |item: usize, at: usize| match at {
        2..6 => 255,
        _ => ((item * 7 + at * at) % 250) as i64,
    };
    let ids: Vec<i64> = items.flat_map(|item| (0..LENGTH).map(move |at| token(item, at))).collect();
    Tensor::from_data(TensorData::new(ids, [count, LENGTH]), device)
}

fn vit(device: &Device) -> Vit {
    Vit::new(&VitConfig { initializer_range: STD, num_labels: Some(7), ..VitConfig::tiny() }, device)
}

fn vit_loss(model: &Vit, items: Range<usize>, device: &Device) -> Tensor<1> {
    let classes: Vec<i64> = items.clone().map(|item| (item % 7) as i64).collect();
    Vit::loss(model.forward(pixels(items, device)), Tensor::from_data(classes.as_slice(), device))
}

fn config() -> LlavaConfig {
    let mut config = LlavaConfig::tiny();
    config.text_config.initializer_range = STD;
    config.vision_config.initializer_range = STD;
    config
}

fn llava_loss(model: &Llava, items: Range<usize>, device: &Device) -> Tensor<1> {
    let ids = tokens(items.clone(), device);
    let is_image = ids.clone().equal_elem(255);
    Llava::loss(model.forward(ids.clone(), pixels(items, device)), ids.mask_fill(is_image, -100))
}

#[test]
fn vit_trains_over_ranks_as_on_one_device() {
    let proof = Proof::default().plan(Vit::plan());
    proven(verify_module_as(vit, vit_loss, &layouts(LAYOUTS), &proof), 9);
}

#[test]
fn llava_trains_over_ranks_as_on_one_device() {
    let proof = Proof::default().plan(Llava::plan());
    let make_model = |device: &Device| Llava::new(&config(), device);
    proven(verify_module_as(make_model, llava_loss, &layouts(LAYOUTS), &proof), 9);
}

#[test]
fn llava_with_a_frozen_tower() {
    let proof = Proof::default().plan(Llava::plan());
    let make_model = |device: &Device| Llava::new(&config(), device).with_frozen_tower();
    let list = layouts("TP2, TP2 SP, TP2 DP2, DP2 ZeRO1");
    proven(verify_module_as(make_model, llava_loss, &list, &proof), list.len());
}

#[test]
fn adapters_of_vision_models_train_as_on_one_device() {
    let list = layouts("TP2, TP2 DP2 ZeRO1, DP2 ZeRO3");
    let proof = Proof::default().plan(Vit::plan());
    proven(verify_module_as(|device: &Device| adapted(vit(device)), vit_loss, &list, &proof), list.len());
    let proof = Proof::default().plan(Llava::plan());
    let make_model = |device: &Device| adapted(Llava::new(&config(), device));
    proven(verify_module_as(make_model, llava_loss, &list, &proof), list.len());
}

#[test]
fn every_operation_has_a_rule() {
    no_fallback(vit, Vit::plan(), vit_loss, &["TP2"]);
    no_fallback(|device| Llava::new(&config(), device), Llava::plan(), llava_loss, &["TP2"]);
    no_fallback(|device| adapted(vit(device)), Vit::plan(), vit_loss, &["TP2"]);
}

/// A chain of the tower's blocks and the decoder's. The first block of the decoder begins with the projector and the
/// embedding, so that a pipeline can have the tower on its own stage.
#[derive(Module, Debug)]
struct Chain {
    model: Llava,
}

/// Blocks of the tower that the decoder sees.
const TOWER: usize = 2;

#[derive(Module, Debug)]
struct Batch {
    tokens: Tensor<2, Int>,
    pixels: Tensor<4>,
}

impl Stages for Chain {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        TOWER + self.model.decoder().blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        let first = "model.tower.patches|model.tower.class|model.tower.positions|model.tower.first_norm";
        let tower = Part::by_path(path, first, "model.tower.blocks", "model.decoder.norm|model.decoder.head");
        match Part::by_path(path, "model.projector|model.decoder.embedding", "model.decoder.blocks", "") {
            Some(Part::First) => Some(Part::Block(TOWER)),
            Some(Part::Block(index)) => Some(Part::Block(TOWER + index)),
            // The tower's last block and last norm, which the decoder does not see.
            _ if path.starts_with("model.tower.last_norm") => Some(Part::First),
            _ if tower == Some(Part::Block(TOWER)) => Some(Part::First),
            _ => tower,
        }
    }

    fn first(&self, batch: &Batch) -> Tensor<3> {
        self.model.tower().embed(batch.pixels.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
        match index.checked_sub(TOWER) {
            None => self.model.tower().block(index, x),
            Some(0) => {
                let x = self.model.embed(batch.tokens.clone(), self.model.project(x));
                self.model.decoder().block(0, x)
            }
            Some(index) => self.model.decoder().block(index, x),
        }
    }

    fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, RegressionOutput) {
        let is_image = batch.tokens.clone().equal_elem(255);
        let loss = Llava::loss(self.model.decoder().logits(x), batch.tokens.clone().mask_fill(is_image, -100));
        let none = Tensor::zeros([1, 1], &loss.device());
        (loss.clone(), RegressionOutput::new(loss, none.clone(), none))
    }
}

steps_of_stages!(Chain, Batch, RegressionOutput);

#[test]
fn the_tower_on_its_own_stage() {
    let list = layouts("PP2, PP4, TP2 PP2, TP2 SP PP2, PP2 DP2 ZeRO1");
    let batch = |items: Range<usize>, device: &Device| Batch {
        tokens: tokens(items.clone(), device),
        pixels: pixels(items, device),
    };
    let proof = Proof::default().plan(Llava::plan());
    let make_model = |device: &Device| Chain { model: Llava::new(&config(), device) };
    proven(verify_stages_as(make_model, batch, &list, &proof), list.len());
}
