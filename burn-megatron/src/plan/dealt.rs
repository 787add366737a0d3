//! Steps whose documents are dealt out over the replicas one by one (schedule/dynamic_context.rs), as planning sees
//! them: rows of one rank each, all ranks equally loaded. The few documents that several ranks share exchange keys that
//! are not counted.

use std::borrow::Cow;

use super::Job;

impl Job {
    /// The job with rows for single ranks, as long as equally loaded ranks have them; itself where documents are not
    /// dealt out.
    pub fn dealt_out(&self) -> Cow<'_, Self> {
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

    /// The same with rows as long as they may be.
    pub fn fullest_rows(&self) -> Cow<'_, Self> {
        let mut job = self.dealt_out();
        if let Some(most) = self.dynamic {
            job.to_mut().seq = most.min(self.tokens_of_a_rank());
        }
        job
    }

    fn tokens_of_a_rank(&self) -> usize {
        (self.global_batch() * self.seq).div_ceil(self.layout.dp * self.layout.cp)
    }
}
