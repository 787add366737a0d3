//! Training outputs of ranks in other processes, on their way to the metrics of the first.

use std::any::{Any, TypeId};
use std::mem;

use backend_dist::comm::Group;
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput, TrainingItem,
};

use super::devices::host;
use super::stages::Sendable;

/// Elements of scores above which outputs stay in their process: they would take longer than a step, as the logits of a language
/// model.
const MOST: usize = 1 << 18;

/// Brings outputs of one type to the first rank of a group.
pub(super) struct GatherOutputs<O> {
    scores: fn(&O) -> usize,
    send: fn(O, &Group),
    receive: fn(usize, &Group) -> O,
}

impl<O: 'static> GatherOutputs<O> {
    /// Between so many processes; the log says if that cannot be.
    pub fn between(processes: usize) -> Option<Self> {
        let gather = if processes > 1 { Self::new() } else { return None };
        if gather.is_none() {
            warn("outputs are of the model's own type; nearest legal: those of burn-train");
        }
        gather
    }

    /// Of outputs of this type, if it is one of burn-train's own.
    fn new() -> Option<Self> {
        Self::of::<ClassificationOutput>()
            .or_else(Self::of::<MultiLabelClassificationOutput>)
            .or_else(Self::of::<RegressionOutput>)
            .or_else(Self::of::<SequenceOutput>)
    }

    fn of<K: Scored>() -> Option<Self> {
        (TypeId::of::<O>() == TypeId::of::<K>()).then_some(Self {
            scores: scores::<O, K>,
            send: send::<O, K>,
            receive: receive::<O, K>,
        })
    }

    /// Whether outputs go to the first rank, as these of all ranks of the group tell: the log says if they are too large. Every rank
    /// must call it.
    fn agree(&self, outputs: &[TrainingItem<O>], group: &Group) -> bool {
        let are_small = outputs.iter().all(|output| (self.scores)(&output.item) <= MOST);
        let all_are = !group.all_gather_host(are_small).contains(&false);
        if !all_are && group.rank() == 0 {
            warn(&format!("the first outputs have more than {MOST} scores"));
        }
        all_are
    }

    /// Sends an output to the first rank, which must call [`receive`](Self::receive): waits for what computes it.
    pub fn send(&self, output: O, group: &Group) {
        (self.send)(output, group);
    }

    /// What rank `from` has sent, in host memory.
    pub fn receive(&self, from: usize, group: &Group) -> O {
        (self.receive)(from, group)
    }
}

/// Says in the log that the training metrics are not those of all processes.
fn warn(why: &str) {
    log::warn!("training metrics are those of the ranks of the first process, because {why}");
}

/// A rank's outputs before they go to the metrics.
pub(super) struct Outbox<O> {
    /// Whether they go to another process, once the first ones have decided it: metrics of an epoch are of the same ranks.
    travel: Option<bool>,
    /// Those that go when the step after them computes: who reads them waits for them.
    late: Vec<TrainingItem<O>>,
}

impl<O> Default for Outbox<O> {
    fn default() -> Self {
        Self { travel: None, late: Vec::new() }
    }
}

impl<O: 'static> Outbox<O> {
    /// Takes the outputs of a step. Which go now: at once if they stay in their process, or nobody may read them `late`. Every rank
    /// of the group must call it with as many.
    pub fn pass(
        &mut self,
        outputs: Vec<TrainingItem<O>>,
        gather: Option<&GatherOutputs<O>>,
        late: bool,
        group: &Group,
    ) -> Vec<TrainingItem<O>> {
        let Some(gather) = gather else { return outputs };
        let travel = *self.travel.get_or_insert_with(|| gather.agree(&outputs, group));
        if travel && late { mem::replace(&mut self.late, outputs) } else { outputs }
    }

    /// Whether outputs go to another process.
    pub fn travels(&self) -> bool {
        self.travel == Some(true)
    }

    /// Those that have not gone yet.
    pub fn take(&mut self) -> Vec<TrainingItem<O>> {
        mem::take(&mut self.late)
    }
}

/// An output whose size tells whether it travels.
pub(super) trait Scored: Sendable + 'static {
    fn scores(&self) -> usize;
}

macro_rules! scored {
    ($($output:ty: $scores:ident),+) => {
        $(impl Scored for $output {
            fn scores(&self) -> usize {
                self.$scores.shape().num_elements()
            }
        })+
    };
}

scored!(ClassificationOutput: output, MultiLabelClassificationOutput: output, RegressionOutput: output, SequenceOutput: logits);

fn scores<O: 'static, K: Scored>(output: &O) -> usize {
    (output as &dyn Any).downcast_ref::<K>().expect(SAME).scores()
}

fn send<O: 'static, K: Scored>(output: O, group: &Group) {
    group.send_host(same_type::<O, K>(output).to_host(), 0);
}

fn receive<O: 'static, K: Scored>(from: usize, group: &Group) -> O {
    same_type(K::from_host(group.receive_host::<K::Host>(from), &host().inner()))
}

const SAME: &str = "a gather of a type brings outputs of that type";

/// `x` as what it is.
fn same_type<A: 'static, B: 'static>(x: A) -> B {
    (&mut Some(x) as &mut dyn Any).downcast_mut::<Option<B>>().and_then(Option::take).expect(SAME)
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Axis, Mesh};
    use burn::data::dataloader::Progress;
    use burn::tensor::{Device, Tensor};

    use super::*;

    type Item = TrainingItem<RegressionOutput>;

    fn output(scores: usize, loss: f32) -> Item {
        let (loss, y) = (Tensor::full([1], loss, &Device::flex()), Tensor::zeros([1, scores], &Device::flex()));
        TrainingItem::new(RegressionOutput::new(loss, y.clone(), y), Progress::new(0, None, None), None, None)
    }

    fn losses(items: Vec<Item>) -> Vec<f32> {
        items.into_iter().map(|item| item.item.loss.into_scalar()).collect()
    }

    /// What both ranks of a group find.
    fn on_two<T: Send>(find: impl Fn(&Group, &GatherOutputs<RegressionOutput>) -> T + Sync) -> Vec<T> {
        let ranks = launch(&Mesh::new("DP2".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let gather = GatherOutputs::<RegressionOutput>::new().expect("it is burn-train's own");
            Ok(find(&rank.group(Axis::Dp), &gather))
        });
        ranks.unwrap()
    }

    #[test]
    fn outputs_of_burn_train_come_to_the_first_rank() {
        assert!(GatherOutputs::<Tensor<1>>::new().is_none());
        let found = on_two(|group, gather| {
            if group.rank() > 0 {
                gather.send(output(3, 0.5).item, group);
                return None;
            }
            let output = gather.receive(1, group);
            Some((output.loss.into_scalar::<f32>(), output.output.dims()))
        });
        assert_eq!(found, [Some((0.5, [1, 3])), None]);
    }

    #[test]
    fn only_outputs_that_travel_are_kept_until_the_next_step() {
        // One rank's first output decides for all ranks and steps.
        for (first, travel) in [(MOST, true), (MOST + 1, false)] {
            let found = on_two(|group, gather| {
                let mut outbox = Outbox::default();
                let sizes = if group.rank() == 0 { [MOST, 3, MOST + 1] } else { [first, 3, 3] };
                let steps = sizes.into_iter().zip([1.0, 2.0, 3.0]);
                let gone = steps
                    .map(|(scores, loss)| losses(outbox.pass(vec![output(scores, loss)], Some(gather), true, group)));
                (gone.collect::<Vec<_>>(), losses(outbox.take()), outbox.travels())
            });
            let expected = match travel {
                true => (vec![vec![], vec![1.0], vec![2.0]], vec![3.0], true),
                false => (vec![vec![1.0], vec![2.0], vec![3.0]], vec![], false),
            };
            assert_eq!(found, [expected.clone(), expected]);
        }
    }
}
