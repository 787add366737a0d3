//! GPTQ block by block: each block's inputs are those behind rounded blocks, each expert's those of its tokens.

use std::collections::BTreeMap;
use std::sync::Arc;

use backend_dist::launch::BoxError;
use burn::tensor::{Device, FloatDType};
use burn_megatron::calibrate::{Calibration, InputSums, SequentialHessians};
use burn_megatron::element::Element;
use burn_megatron::forward::{Input, Settings, forward};
use burn_megatron::hf::{Export, Format, HfFolder, Nearest, Rounding, export_compressed};
use burn_megatron::quantise::{Factor, Grid, Scheme, quantise};
use models::WeightSource;
use models::observer::Moments;
use tempfile::TempDir;

use super::quantise::{calibration, weights};
use super::{gap, golden};

const SCHEME: Scheme = Scheme { grid: Grid::Int { bits: 4 }, group: Some(8) };

fn sequences() -> Vec<Vec<i64>> {
    (0..24).map(|row| (0..32).map(|at| (at * at * 7 + row * 31 + at) % 150).collect()).collect()
}

/// Writes a folder in four bits; the gap of its logits to those of `base`.
fn exported(folder: &TempDir, (name, base): (&str, &HfFolder), rounding: &mut dyn Rounding) -> (HfFolder, f64) {
    let what = Export {
        config: base.config(),
        companions: base.companions(),
        tokenizer: None,
        element: Some(Element::F32),
        shard_bytes: u64::MAX,
        format: Format::Safetensors,
    };
    let to = folder.path().join(name);
    let written = export_compressed(&to, &what, base, SCHEME, rounding).unwrap();
    assert!(written.calibrated == 0 || written.calibrated == written.matrices, "{name}: {written:?}");
    let logits = |source: &dyn WeightSource| {
        let settings = Settings::new([Device::flex()], "TP1".parse().unwrap(), FloatDType::F32);
        let input = Input { sequences: 24, seq: 32, ids: sequences().concat(), labels: None };
        forward(base.config(), source, &input, &settings).unwrap().logits
    };
    let rounded = HfFolder::open(&to).unwrap();
    let gap = gap(&logits(&rounded), &logits(base));
    (rounded, gap)
}

#[test]
fn blocks_make_up_for_the_blocks_before_and_experts_for_their_tokens() {
    let (folder, sequences, device) = (TempDir::new().unwrap(), sequences(), Device::flex());
    for family in ["lora/base", "hf/mixtral", "hf/qwen3_moe"] {
        let (base, name) = (HfFolder::open(golden(family)).unwrap(), family.replace('/', "-"));
        let calibration = calibration(&base, &sequences, &device);
        let (_, nearest) = exported(&folder, (&format!("{name}-nearest"), &base), &mut Nearest);
        let to = format!("{name}-gptq");
        let (rounded, gptq) = exported(&folder, (&to, &base), &mut SequentialHessians::new(calibration));
        assert!(gptq < 0.9 * nearest, "{family}: GPTQ {gptq}, nearest {nearest}");

        // What goes into the last block follows from the blocks before it alone.
        let sums =
            |source: &dyn WeightSource| Calibration { source, ..calibration }.observe(Moments::All, 3..4).unwrap();
        let [original, found] = [golden(family), folder.path().join(&to)].map(|folder| weights(&folder));
        let with = |sums: &InputSums, layer: &str| {
            let size = sums[layer].shape[0];
            let factor = Factor::new(sums[layer].data.clone(), size).unwrap();
            let weight = &original[&format!("{layer}.weight")];
            quantise(weight, size, SCHEME, |scale| f64::from(scale as f32), Some(&factor)).values(SCHEME, size)
        };
        let (behind_rounded, behind_original) = (sums(&rounded), sums(&base));
        for layer in ["layers.3.attention.q_proj", "layers.3.attention.v_proj"] {
            let found = &found[&format!("{layer}.weight")];
            assert!(gap(found, &with(&behind_rounded, layer)) < 1e-6, "{family}: {layer}");
            assert!(gap(found, &with(&behind_original, layer)) > 1e-3, "{family}: {layer}");
        }
    }
}

/// Knows no inputs, and notes what weights have become.
#[derive(Default)]
struct Noted(BTreeMap<String, Vec<f64>>);

impl Rounding for Noted {
    fn factor(&mut self, _: &str) -> Result<Option<Arc<Factor>>, BoxError> {
        Ok(None)
    }

    fn rounded(&mut self, weight: &str, values: &dyn Fn() -> Vec<f64>) {
        self.0.insert(weight.into(), values());
    }
}

/// Such as those of an expert that no token has reached.
#[test]
fn weights_without_a_factor_are_rounded_for_later_blocks_too() {
    let folder = TempDir::new().unwrap();
    let (base, mut noted) = (HfFolder::open(golden("hf/mixtral")).unwrap(), Noted::default());
    exported(&folder, ("noted", &base), &mut noted);
    let [original, found] = [golden("hf/mixtral"), folder.path().join("noted")].map(|folder| weights(&folder));
    assert_eq!(noted.0.len(), 4 * (4 + 8 * 3), "attention and experts of four layers");
    for (name, values) in &noted.0 {
        assert!(gap(values, &found[name]) < 1e-6 && gap(values, &original[name]) > 1e-3, "{name}");
    }
}
