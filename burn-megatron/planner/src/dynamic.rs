//! Dynamic context parallelism (schedule/dynamic_context.rs), as the planner sees it: every packed sequence is on
//! one rank, and all ranks are equally loaded. The communication of documents that several ranks share is not counted.

use std::borrow::Cow;

use super::Job;

impl Job {
    /// The job with a sequence length that loads all ranks equally; the job itself without dynamic context
    /// parallelism.
    pub fn with_dynamic_context(&self) -> Cow<'_, Self> {
        let Some(most) = self.dynamic else { return Cow::Borrowed(self) };
        let mut job = self.clone();
        let (each, most) = (self.tokens_of_a_rank(), most.max(1));
        let unit = if job.layout.vpp > 1 { job.layout.pp } else { 1 };
        job.schedule.micro_batches = each.div_ceil(most).next_multiple_of(unit);
        job.seq = each.div_ceil(job.schedule.micro_batches);
        job.micro_batch = 1;
        (job.layout.dp, job.layout.cp) = (job.layout.dp * job.layout.cp, 1);
        Cow::Owned(job)
    }

    /// The same with the maximum sequence length.
    pub fn longest_sequences(&self) -> Cow<'_, Self> {
        let mut job = self.with_dynamic_context();
        if let Some(most) = self.dynamic {
            job.to_mut().seq = most.min(self.tokens_of_a_rank());
        }
        job
    }

    fn tokens_of_a_rank(&self) -> usize {
        (self.global_batch() * self.seq).div_ceil(self.layout.dp * self.layout.cp)
    }
}
