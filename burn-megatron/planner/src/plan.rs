//! Everything that a step needs.

use host::schedule::{Costs, PipelineError, Schedule};

use crate::gpus::Hardware;
use crate::{DrawTime, Job, RankMemory, StepTime, Traffic, memory, step_time, time, traffic};

/// The needs of a step, rank by rank.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The run.
    pub job: Job,
    /// The actions of every pipeline rank.
    pub schedule: Schedule,
    /// Memory of each pipeline rank.
    pub memory: Vec<RankMemory>,
    /// Bytes that one rank of each pipeline stage sends.
    pub traffic: Vec<Traffic>,
    /// Durations of the passes of each stage, in nanoseconds.
    pub costs: Costs,
    /// Time of the step.
    pub time: StepTime,
    /// Time before a step, in GRPO.
    pub draws: Option<DrawTime>,
}

impl Plan {
    /// Plans a step.
    ///
    /// # Errors
    /// A schedule that does not exist.
    pub fn new(job: Job, hardware: &Hardware) -> Result<Self, PipelineError> {
        let job = Job { gpu_model: hardware.model, ..job };
        let dynamic = job.with_dynamic_context();
        let schedule = dynamic.lists()?;
        let (memory, traffic) = (memory(&job.longest_sequences(), &schedule), traffic(&dynamic, &schedule));
        let costs = time::costs(&dynamic, hardware);
        let time = step_time(&dynamic, &schedule, hardware).expect("schedules that are made do not deadlock");
        let draws = time::draw_time(&dynamic, hardware);
        Ok(Self { job, schedule, memory, traffic, costs, time, draws })
    }

    /// The pipeline rank that needs the most memory.
    pub fn fullest(&self) -> usize {
        (0..self.memory.len()).max_by_key(|&rank| (self.memory[rank].peak(), std::cmp::Reverse(rank))).unwrap_or(0)
    }
}
