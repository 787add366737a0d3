//! How important layers, heads, neurons and features are for calibration texts.

use backend_dist::launch::BoxError;
use models::observer::Moments;
use models::{FamilyConfig, ModelConfig};

use super::keep::{Importance, Kept};
use super::weights::Pruned;
use crate::calibrate::Calibration;
use crate::hf::HfFolder;

/// The loss of a model on the calibration texts.
pub type Loss<'a> = dyn FnMut(&Pruned) -> Result<f64, BoxError> + 'a;

/// The importance of all parts of a model whose weights are `folder`'s; that of layers by `loss`, if
/// it is given, which gets the weights of a model without one of them. Fails if the model cannot compute.
pub fn importance(
    calibration: &Calibration,
    (model, folder): (&FamilyConfig, &HfFolder),
    loss: Option<&mut Loss>,
) -> Result<Importance, BoxError> {
    let dims = model.dims();
    let sums = calibration.observe(Moments::Squares, 0..dims.layers)?;
    let of = |layer: usize, name: &str| -> Result<&[f64], BoxError> {
        let name = format!("layers.{layer}.{name}");
        let sum = sums.get(&name).ok_or_else(|| format!("{name} records no inputs"))?;
        Ok(&sum.data)
    };
    let mut importance = Importance { hidden: vec![0.0; dims.hidden], ..Importance::default() };
    for layer in 0..dims.layers {
        for name in ["attention.q_proj", "mlp.gate_proj"] {
            importance.hidden.iter_mut().zip(of(layer, name)?).for_each(|(sum, squares)| *sum += squares);
        }
        importance.intermediate.push(of(layer, "mlp.down_proj")?.to_vec());
        let heads = of(layer, "attention.o_proj")?;
        importance
            .groups
            .push(heads.chunks_exact(heads.len() / dims.kv_heads).map(|squares| squares.iter().sum()).collect());
    }
    if let Some(loss) = loss {
        for layer in 0..dims.layers {
            importance.layers.push(loss(&Pruned::new(folder, model, Kept::without_layer(model, layer))?)?);
        }
    }
    Ok(importance)
}
