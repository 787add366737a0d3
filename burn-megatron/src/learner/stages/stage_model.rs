//! The model of one rank of a pipeline: the parameters of other stages are stand-ins of one element.

use backend_dist::launch::Rank;
use backend_dist::parallelize::{Plan, PlanError, parallelize_part};
use burn::module::{Module, ModuleDisplay, Param, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};

use super::groups::Groups;
use super::{Division, Part};
use crate::learner::devices::has_checkpointing;
use crate::learner::dp_rank::constants::with_plain_constants;
use crate::learner::states::with_own_states;
use crate::learner::zero::running_states;

/// `model`, with states of its own, on the logical device `device` as `plan` places it over tensor-parallel ranks, with stand-ins
/// for the parameters that the pipeline rank does not hold. Fails if the plan does not fit it.
pub(super) fn stage_model<M: Module + ModuleDisplay>(
    model: M,
    division: &Division,
    device: &Device,
    (rank, plan): (&Rank, &Plan),
) -> Result<M, PlanError> {
    let Groups { pp, tp, .. } = Groups::of(rank);
    let whole = if has_checkpointing(device) {
        with_plain_constants(&model)
    } else if !running_states(&model).is_empty() {
        with_own_states(&model)
    } else {
        model
    };
    let part = whole.clone().apply_reparameterization(StandIns { division, rank: pp.rank() });
    let of_one = Plan::default();
    let plan = if tp.size() == 1 { &of_one } else { plan };
    parallelize_part((&whole, part), device, rank, plan, |path| division.is_path_on(path, pp.rank()))
}

struct StandIns<'a> {
    division: &'a Division,
    rank: usize,
}

impl Reparameterizer for StandIns<'_> {
    type Reparam = Elsewhere;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Elsewhere>) {
        let Some(part) = self.division.part(path).filter(|_| !self.division.is_path_on(path, self.rank)) else {
            return (param, None);
        };
        let value = param.base().without_autodiff();
        let one = Tensor::zeros([1; D], (&value.device(), value.dtype()));
        // Frozen, so that no optimizer and no gradient meets it.
        (Param::initialized(param.id, Tensor::from_inner(one)), Some(Elsewhere { path: path.into(), part }))
    }
}

/// Marks a parameter of another stage: whoever uses it learns so.
#[derive(Module, Debug)]
pub(super) struct Elsewhere {
    #[module(skip)]
    path: String,
    #[module(skip)]
    part: Part,
}

impl Reparameterization for Elsewhere {
    const NAME: &'static str = "elsewhere";

    fn apply<const D: usize>(&self, _: Tensor<D>) -> Tensor<D> {
        panic!(
            "a stage uses parameter `{}`, which `Stages::owner` gives to {}, and that is on another rank; nearest legal: the \
             part that uses it, or Part::Tied if the first and the last do, or Part::Shared",
            self.path, self.part
        )
    }
}
