//! The layout flags of every training command.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use anyhow::{Result, bail};
use backend_dist::mesh::ParallelLayout;
use clap::Args;

/// The parallel layout. Megatron's spellings are accepted too.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Layout")]
pub struct LayoutArgs {
    /// Tensor-parallel size: ranks that share each layer's weight matrices
    #[arg(long, alias = "tensor-model-parallel-size", value_name = "N")]
    pub tensor_parallel: Option<usize>,
    /// Sequence parallelism: shard the activations outside the tensor-parallel GEMMs along the sequence
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub sequence_parallel: Option<bool>,
    /// Pipeline-parallel size: ranks that the layers are split over
    #[arg(long, alias = "pipeline-model-parallel-size", value_name = "N")]
    pub pipeline_parallel: Option<usize>,
    /// Virtual pipeline size: model chunks per pipeline rank
    #[arg(long, alias = "num-virtual-stages-per-pipeline-rank", value_name = "N")]
    pub virtual_pipeline: Option<usize>,
    /// Context-parallel size: ranks that each sequence is split over
    #[arg(long, alias = "context-parallel-size", value_name = "N")]
    pub context_parallel: Option<usize>,
    /// Expert-parallel size: ranks that the experts of an MoE layer are distributed over
    #[arg(long, alias = "expert-model-parallel-size", value_name = "N")]
    pub expert_parallel: Option<usize>,
    /// Tensor-parallel size inside each expert
    #[arg(long, alias = "expert-tensor-parallel-size", value_name = "N")]
    pub expert_tensor_parallel: Option<usize>,
    /// Data-parallel size: groups of ranks that each train the whole model on their own share of the batch; auto (train,
    /// bench of a file, plan --gpus): what fills all ranks
    #[arg(long, alias = "data-parallel-size", value_name = "N")]
    pub data_parallel: Option<DataParallel>,
    /// ZeRO stage, what is sharded over the data-parallel ranks: 1 optimizer states, 2 also gradients, 3 also weights
    #[arg(long, value_name = "STAGE")]
    pub zero: Option<u8>,
    /// Hybrid sharding (HSDP): ZeRO shards inside groups of so many data-parallel ranks, and the groups hold the same
    #[arg(long, value_name = "N")]
    pub zero_group: Option<usize>,
}

/// A data-parallel size as it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataParallel {
    /// What fills all ranks.
    Auto,
    /// This one.
    Size(usize),
}

impl FromStr for DataParallel {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Size) }
    }
}

impl fmt::Display for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Size(size) => size.fmt(f),
        }
    }
}

impl LayoutArgs {
    /// The data-parallel size, if it is given and does not follow from the number of ranks.
    pub fn data_parallel_size(&self) -> Option<usize> {
        match self.data_parallel? {
            DataParallel::Auto => None,
            DataParallel::Size(size) => Some(size),
        }
    }

    /// The layout that the flags ask for, with the sizes of `default` for flags that are not given. Fails if the sizes
    /// do not make a legal layout, or the data-parallel size is `auto`.
    pub fn over(&self, default: ParallelLayout) -> Result<ParallelLayout> {
        if self.data_parallel == Some(DataParallel::Auto) {
            bail!(
                "--data-parallel auto is for train, bench of a file and plan --gpus; nearest legal: --data-parallel {}",
                default.dp
            );
        }
        let layout = ParallelLayout {
            tp: self.tensor_parallel.unwrap_or(default.tp),
            cp: self.context_parallel.unwrap_or(default.cp),
            ep: self.expert_parallel.unwrap_or(default.ep),
            etp: self.expert_tensor_parallel.or(default.etp),
            pp: self.pipeline_parallel.unwrap_or(default.pp),
            vpp: self.virtual_pipeline.unwrap_or(default.vpp),
            dp: self.data_parallel_size().unwrap_or(default.dp),
            sp: self.sequence_parallel.unwrap_or(default.sp),
            zero: self.zero.unwrap_or(default.zero),
            zero_group: self.zero_group.or(default.zero_group),
        };
        layout.check()?;
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        layout: LayoutArgs,
    }

    fn parse(flags: &str) -> Result<ParallelLayout> {
        let default = ParallelLayout { tp: 2, sp: true, dp: 2, ..Default::default() };
        Command::try_parse_from(["x"].into_iter().chain(flags.split_whitespace()))?.layout.over(default)
    }

    #[test]
    fn flags_override_the_default_in_both_spellings() {
        assert_eq!(parse("").unwrap().to_string(), "TP2 SP DP2");
        assert_eq!(parse("--tensor-parallel 4 --data-parallel 1").unwrap().to_string(), "TP4 SP");
        assert_eq!(parse("--tensor-model-parallel-size 4 --sequence-parallel=false").unwrap().to_string(), "TP4 DP2");
        let off = Command::try_parse_from(["x", "--sequence-parallel"]).unwrap().layout;
        assert!(off.over(ParallelLayout::default()).unwrap().sp);
    }

    #[test]
    fn what_does_not_run_is_refused() {
        for flags in
            ["--context-parallel-size 0", "--expert-parallel 3", "--zero 4", "--zero-group 2", "--data-parallel auto"]
        {
            let error = parse(flags).unwrap_err().to_string();
            let flag = flags.split_whitespace().next().unwrap().trim_start_matches("--").trim_end_matches("-size");
            says!(error, flag, "nearest legal");
        }
        assert_eq!(parse("--pipeline-parallel 2 --zero 1").unwrap().to_string(), "TP2 SP PP2 DP2 ZeRO1");
        let folded = parse("--expert-parallel 4 --expert-tensor-parallel 1").unwrap();
        assert_eq!(folded.to_string(), "TP2 SP EP4 ETP1 DP2");
        assert_eq!(parse("--data-parallel 4 --zero 3 --zero-group 2").unwrap().to_string(), "TP2 SP DP4 ZeRO3 Group2");
        assert!(parse("--tensor-parallel 0").is_err());
        assert!(parse("--virtual-pipeline 2").is_err());
    }
}
