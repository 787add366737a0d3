//! A server's models, one for each adapter, over one base.

use backend_dist::launch::{BoxError, Rank};
use models::lora::Adapter;
use models::{CausalLm, WeightSource};

use crate::cli::device::DeviceKind;
use crate::cli::forward::Precision;
use crate::forward::{Settings, build_over};

/// One model for each adapter. What they have in common is read once, and held once.
pub(super) fn build_all<M: CausalLm>(
    rank: &Rank,
    config: &M::Config,
    source: &dyn WeightSource,
    settings: &Settings,
    adapters: &[Option<Adapter>],
) -> Result<Vec<M>, BoxError> {
    let mut models: Vec<M> = Vec::with_capacity(adapters.len());
    for adapter in adapters {
        let settings = Settings { adapter: adapter.clone(), ..settings.clone() };
        models.push(build_over(rank, config, source, &settings, models.first())?);
    }
    Ok(models)
}

/// Bytes of adapters in the memory that one rank or, on the CPU, all ranks have, at most: a rank has one of an adapter's two
/// matrices whole, and its part of the other. What was read from their files stays in the host's memory.
pub(super) fn of_adapters(adapters: &[Option<Adapter>], device: DeviceKind, dtype: Precision, tp: usize) -> u64 {
    let tensors = adapters.iter().flatten().flat_map(|adapter| adapter.tensors.values());
    let elements: usize = tensors.map(|tensor| tensor.data.len()).sum();
    let each = if device == DeviceKind::Cuda { dtype.bytes() } else { tp.max(1) * dtype.bytes() + size_of::<f64>() };
    (elements * each) as u64
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::path::Path;
    use std::sync::Arc;

    use backend_dist::launch::launch;
    use backend_dist::mesh::Mesh;
    use backend_dist::shard::{HostFloats, HostTensor};
    use burn::tensor::{Device, FloatDType, Int, Tensor};
    use models::lora::LoraConfig;
    use models::{FamilyConfig, Llama, LlamaConfig, ModelConfig};
    use parking_lot::Mutex;

    use super::*;
    use crate::forward::build;
    use crate::hf::{HfFolder, read_adapter};

    /// A folder, and how often each of its tensors is read.
    struct Counting {
        folder: HfFolder,
        reads: Mutex<BTreeMap<String, usize>>,
    }

    impl WeightSource for Counting {
        fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
            *self.reads.lock().entry(name.into()).or_default() += 1;
            self.folder.read(name, shape, ranges)
        }

        fn read_stored(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<HostFloats, BoxError> {
            *self.reads.lock().entry(name.into()).or_default() += 1;
            self.folder.read_stored(name, shape, ranges)
        }
    }

    /// One of so many elements.
    pub fn adapter(config: &FamilyConfig, elements: usize) -> Option<Adapter> {
        let plan = Arc::new(LoraConfig::default().plan(&config.hf_names()).unwrap());
        let tensor = HostTensor { shape: vec![elements], data: vec![0.0; elements] };
        Some(Adapter { plan, tensors: [("a".into(), tensor)].into() })
    }

    #[test]
    fn adapters_take_memory_of_every_rank() {
        let adapters =
            [None, Some(1000), Some(500)].map(|elements| adapter(&FamilyConfig::Llama(LlamaConfig::tiny()), elements?));
        for (device, bytes) in [(DeviceKind::Cuda, 1500 * 2), (DeviceKind::Cpu, 1500 * (2 * 2 + 8))] {
            assert_eq!(of_adapters(&adapters, device, Precision::Bf16, 2), bytes);
        }
    }

    fn logits(rank: &Rank, model: &Llama) -> Vec<f64> {
        let tokens = Tensor::<2, Int>::from_data([[3, 1, 4, 1, 5, 9]], &rank.device);
        model.logits(tokens).into_data().iter::<f64>().collect()
    }

    #[test]
    fn the_base_of_several_adapters_is_read_once_and_they_answer_as_models_loaded_apart() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/lora");
        let open = || Counting { folder: HfFolder::open(golden.join("base")).unwrap(), reads: Mutex::default() };
        let [source, apart] = [open(), open()];
        let family = source.folder.config().clone();
        let FamilyConfig::Llama(config) = &family else { panic!("{family:?}") };
        let adapter = |kind: &str| Some(read_adapter(&golden.join(kind).join("adapter"), &family).unwrap());
        let adapters = [None, adapter("lora_all"), adapter("dora")];
        for layout in ["TP1", "TP2", "TP2 SP"] {
            let settings = Settings::new([Device::flex()], layout.parse().unwrap(), FloatDType::F64);
            let mesh = Mesh::new(settings.layout.clone()).unwrap();
            launch(&mesh, &[Device::flex()], |rank| {
                let models = build_all::<Llama>(&rank, config, &source, &settings, &adapters)?;
                let answers: Vec<_> = models.iter().map(|model| logits(&rank, model)).collect();
                assert!(answers[0] != answers[1] && answers[0] != answers[2] && answers[1] != answers[2]);
                for (adapter, answer) in adapters.iter().zip(&answers) {
                    let settings = Settings { adapter: adapter.clone(), ..settings.clone() };
                    let alone = build::<Llama>(&rank, config, &apart, &settings)?;
                    assert_eq!(&logits(&rank, &alone), answer, "{layout}");
                }
                Ok(())
            })
            .unwrap();
            let [once, again] = [&source, &apart].map(|source| std::mem::take(&mut *source.reads.lock()));
            assert!(!once.is_empty() && once.values().all(|reads| *reads == settings.layout.tp), "{layout}: {once:?}");
            assert_eq!(again, once.into_iter().map(|(name, reads)| (name, 3 * reads)).collect(), "{layout}");
        }
    }
}
