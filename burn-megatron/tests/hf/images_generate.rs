//! LLaVA generates what its whole forward pass prefers.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_megatron::hf::ModuleFolder;
use models::hf::ModuleInputs;
use models::images::{Llava, LlavaConfig};

use crate::files::golden;
use crate::images::inputs;

/// Keys and values that are kept change nothing: each token is the one that the whole forward pass prefers.
#[test]
fn llava_generates_what_the_whole_forward_pass_prefers() {
    generates("llava", 160);
}

/// Greedy tokens are those of the whole forward pass.
pub fn generates(name: &str, vocabulary: usize) {
    let (folder, device) = (ModuleFolder::open(golden(name)).unwrap(), Device::flex());
    let model: Llava = folder.read(&folder.config::<Llava>().unwrap(), FloatDType::F64, &device).unwrap();
    let inputs = ModuleInputs { tensors: inputs(name), device: device.clone(), dtype: FloatDType::F64 };
    let pixels = inputs.floats::<4>("pixel_values").unwrap().narrow(0, 0, 1);
    let mut tokens = inputs.ids::<2>("input_ids", vocabulary).unwrap().narrow(0, 0, 1);
    let generated = model.generate(tokens.clone(), pixels.clone(), 12, vocabulary);
    assert_eq!(generated.len(), 12);
    for token in &generated {
        let last = tokens.dims()[1] - 1;
        let logits = model.forward(tokens.clone(), pixels.clone()).narrow(1, last, 1);
        assert_eq!(logits.argmax(2).into_scalar::<i64>(), *token as i64);
        tokens = Tensor::cat(vec![tokens, Tensor::from_data([[*token as i64]], &device)], 1);
    }
    // It ends where it is told to.
    let end = generated[3];
    let first = generated.iter().position(|token| *token == end).unwrap();
    let tokens = inputs.ids::<2>("input_ids", vocabulary).unwrap().narrow(0, 0, 1);
    assert_eq!(model.generate(tokens, pixels, 12, end), generated[..first]);
}

#[test]
#[should_panic(expected = "`tokens` has 2 sequences; legal: 1")]
fn llava_generates_for_one_sequence() {
    let model = Llava::new(&LlavaConfig::tiny(), &Device::flex());
    model.generate(
        Tensor::from_data([[255], [255]], &Device::flex()),
        Tensor::ones([1, 3, 8, 8], &Device::flex()),
        1,
        0,
    );
}

#[test]
#[should_panic(expected = "`tokens` has 3 image tokens; legal: 4")]
fn llava_generates_from_as_many_image_tokens_as_there_are() {
    let model = Llava::new(&LlavaConfig::tiny(), &Device::flex());
    model.generate(
        Tensor::from_data([[7, 255, 255, 255]], &Device::flex()),
        Tensor::ones([1, 3, 8, 8], &Device::flex()),
        1,
        0,
    );
}
