//! The model of one rank of a pipeline: the parameters of other stages are stand-ins of one element.

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;

use super::{Division, Part};

/// `model` with stand-ins for the parameters that pipeline rank `rank` does not hold.
pub(super) fn stage_model<M: Module>(model: M, division: &Division, rank: usize) -> M {
    model.apply_reparameterization(StandIns { division, rank })
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
