//! Models from records, where Burn by itself refuses its own.
//!
//! A parameter may be saved in another shape than it has: `LinearLayout::Col` of `nn::Linear` saves the transposed weight.
//! Burn compares the shape in a record with that of the value as it is, so only a parameter without a value can be loaded.
//! Loading the value as it is brings it into the shape that it is saved in, and the record fits.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::Tensor;
use burn::train::{Learner, LearnerModel};

/// `model` with the values and ids of a record of such a model. Running states keep their ids.
pub(super) fn loaded<M: Module>(model: M, record: ModuleRecord) -> Result<M, RecordError> {
    let model = match in_saved_shapes(&model) {
        Some(values) => model.try_load_record(values)?,
        None => model,
    };
    model.try_load_record(record)
}

/// [`loaded`] of the model of `learner`, which burn-train sets from a record only. Panics if the record is not one of such a
/// model.
pub(super) fn load<M: LearnerModel>(learner: &mut Learner<M>, record: ModuleRecord) {
    if let Some(values) = in_saved_shapes(&learner.model()) {
        learner.load_model(values);
    }
    learner.load_model(record);
}

/// What brings `model` into the shapes that it is saved in, if it has others.
fn in_saved_shapes<M: Module>(model: &M) -> Option<ModuleRecord> {
    let mut found = OtherShapes(Vec::new());
    model.visit(&mut found);
    let OtherShapes(ids) = found;
    if ids.is_empty() {
        return None;
    }
    let values = model.clone().map(&mut WithoutMappers).into_record_group(ParamGroup::from_ids(ids));
    Some(values.allow_partial(true))
}

/// The parameters that have a value, in another shape than they are saved in.
struct OtherShapes(Vec<ParamId>);

impl ModuleVisitor for OtherShapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_initialized() && param.transform_for_save().base().shape() != param.base().shape() {
            self.0.push(param.id);
        }
    }
}

struct WithoutMappers;

impl ModuleMapper for WithoutMappers {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, value, _) = param.consume();
        Param::initialized(id, value)
    }
}
