//! What the cache of a model holds is what was planned for it.

use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::{Device, FloatDType};
use models::layers::paged::{Chunk, Outputs, Step};
use models::{CausalLm, FamilyConfig, ModelConfig, PagedKvCache, ParamBuilder, WithModel};

use super::*;

const BLOCKS: usize = 3;
const BLOCK: usize = 4;

/// The bytes of every rank's cache.
struct Bytes(usize);

impl WithModel for Bytes {
    type Output = Vec<usize>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Vec<usize> {
        let mesh = Mesh::new(ParallelLayout { tp: self.0, ..ParallelLayout::default() }).unwrap();
        let on_rank = |rank: Rank| -> Result<usize, BoxError> {
            let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F32, 0).without_autodiff())?;
            let mut cache = PagedKvCache::new(BLOCKS, BLOCK);
            let chunk = Chunk { tokens: vec![1; 5], positions: 0..5, blocks: vec![2, 0], outputs: Outputs::Last };
            model.extend(&Step::new(vec![chunk]), &mut cache);
            Ok(cache.bytes())
        };
        launch(&mesh, &[Device::flex()], on_rank).unwrap()
    }
}

#[test]
fn caches_have_the_planned_bytes() {
    let small = FamilyConfig::presets().into_iter().filter(|(name, _)| name.ends_with("tiny"));
    let mut families = 0;
    for (name, config) in small {
        let decoder = decoder_of(&config);
        let layers = (0..decoder.layers).filter(|layer| decoder.has_keys(*layer)).count();
        for tp in [1, 2] {
            let planned = 4 * BLOCKS * BLOCK * layers * decoder.cached_features(tp);
            assert_eq!(config.visit(Bytes(tp)), vec![planned; tp], "{name}, TP{tp}");
        }
        families += 1;
    }
    assert!(families >= 6, "{families} families");
}
