//! `burn-megatron inspect`

mod checkpoint;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{anyhow, bail};
use indicatif::HumanCount;
use strsim::damerau_levenshtein;
use tokenizers::Tokenizer;

use super::{print, refused};
use crate::checkpoint::Checkpoint;
use crate::data::indexed::{IndexedDataset, paths};
use crate::data::{
    Blend, DataError, EpochPlan, GptDataConfig, GptSplit, GptSplits, Sample, Split, SplitRatios, TokenDataset, npy,
    read_tokenizer,
};
use crate::refusal::Access;

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prefix of a .bin/.idx pair, or the folder of a checkpoint or of checkpoints
    #[arg(required_unless_present = "blend", conflicts_with = "blend")]
    prefix: Option<PathBuf>,
    /// Several datasets and their weights, or their prefixes alone
    #[arg(long, value_name = "W P W P", num_args = 1..)]
    blend: Vec<String>,
    /// Tokens per sample; without it only the files are described
    #[arg(long, value_name = "S")]
    seq_length: Option<usize>,
    /// Seed of document and sample order
    #[arg(long, value_name = "N", default_value_t = 1234, allow_negative_numbers = true)]
    seed: u32,
    /// Shares of training, validation and test
    #[arg(long, value_name = "A,B,C", default_value = "1,0,0")]
    split: SplitRatios,
    /// Samples wanted for training, validation and test; by default those of one epoch
    #[arg(long, value_name = "T,V,E", value_delimiter = ',')]
    num_samples: Vec<usize>,
    /// Whose samples to show and write
    #[arg(long, value_enum, default_value = "train")]
    dataset: SplitName,
    /// Show and write the first K samples; by default 4 are shown, and all are written
    #[arg(long, value_name = "K")]
    samples: Option<usize>,
    /// Write the input tokens as an int64 array of shape (K, S)
    #[arg(long, value_name = "FILE.npy")]
    out: Option<PathBuf>,
    /// Decode samples with this tokenizer.json
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Leave out of the loss what is predicted at this end-of-document id
    #[arg(long, value_name = "ID")]
    eod_mask_loss: Option<i64>,
    /// Keep the last partial validation sample, padded
    #[arg(long)]
    keep_partial_validation: bool,
    /// Keep sample orders in this folder
    #[arg(long, value_name = "DIR")]
    data_cache_path: Option<PathBuf>,
    /// Compare the files of a checkpoint with their hashes
    #[arg(long)]
    verify: bool,
}

impl Args {
    /// Whether a flag other than --seq-length asks for samples.
    fn is_for_samples(&self) -> bool {
        self.samples.is_some() || self.out.is_some() || self.tokenizer.is_some()
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum SplitName {
    Train,
    Valid,
    Test,
}

/// Samples shown when no number is given.
const SHOWN: usize = 4;

/// Describes a checkpoint, or the files and samples of a data set.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let is_folder = |prefix: &&Path| prefix.is_dir() && !prefix.with_added_extension("idx").is_file();
    if let Some(folder) = args.prefix.as_deref().filter(is_folder) {
        if args.seq_length.is_some() || args.is_for_samples() {
            bail!("{} is a folder; samples are in the .bin/.idx files of a PREFIX", folder.display());
        }
        if is_of_hugging_face(folder) {
            bail!(
                "{0} is a Hugging Face folder, not a checkpoint of a run; `burn-megatron plan RUN.toml --model.hf {0}` plans a run of it, \
                 `burn-megatron generate --hf {0}` runs it",
                folder.display()
            );
        }
        checkpoint::run(folder, args.verify)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.verify {
        bail!("--verify compares the hashes of a checkpoint{}", instead(args.prefix.as_deref()));
    }
    let blend: Blend = match (&args.blend[..], &args.prefix) {
        (words @ [_, ..], _) => words.join(" ").parse().map_err(|error| anyhow!("--{error}"))?,
        ([], Some(prefix)) => Blend::single(prefix),
        ([], None) => bail!("a PREFIX or --blend is needed"),
    };
    if let Some(out) = &args.out {
        let files = blend.prefixes.iter().flat_map(|prefix| <[PathBuf; 2]>::from(paths(prefix)));
        super::is_no_input("--out", out, &files.chain(args.tokenizer.clone()).collect::<Vec<_>>())?;
    }
    let open = |prefix: &PathBuf| {
        let opened = IndexedDataset::open(prefix).map(Arc::new);
        opened.map_err(|error| match nearest(prefix).filter(|_| !prefix.with_added_extension("idx").exists()) {
            Some(nearest) => anyhow!("{error}; did you mean {}?", nearest.display()),
            None => error.into(),
        })
    };
    let datasets = blend.prefixes.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    for (prefix, data) in blend.prefixes.iter().zip(&datasets) {
        print(&describe_files(prefix, data))?;
    }
    let Some(seq_length) = args.seq_length else {
        if args.is_for_samples() {
            bail!("samples need a --seq-length");
        }
        return Ok(ExitCode::SUCCESS);
    };

    if args.num_samples.len() > Split::ALL.len() {
        bail!("--num-samples has {} numbers; at most train,valid,test", args.num_samples.len());
    }
    let mut num_samples = [None; 3];
    for (wanted, given) in num_samples.iter_mut().zip(&args.num_samples) {
        *wanted = Some(*given);
    }
    let config = GptDataConfig {
        seq_length,
        seed: args.seed,
        split: args.split.clone(),
        num_samples,
        eod_mask_loss: args.eod_mask_loss,
        eod_documents: None,
        keep_partial_validation: args.keep_partial_validation,
        cache: args.data_cache_path.clone(),
    };
    let splits = GptSplits::from_datasets(&datasets, &blend, &config).map_err(|error| match error {
        DataError::Order { .. } => anyhow!(error).context("--num-samples"),
        other => other.into(),
    })?;
    print(&format!("samples of {seq_length} tokens, seed {}, split {}\n", config.seed, config.split))?;
    for split in Split::ALL {
        let description = splits.get(split).map_or("none\n".into(), |data| describe_split(data, &blend));
        print(&format!("  {:5}  {description}", split.name()))?;
    }
    show(&args, &splits)?;
    Ok(ExitCode::SUCCESS)
}

/// Where to look for a checkpoint in place of what was given.
fn instead(given: Option<&Path>) -> String {
    let Some(path) = given.filter(|path| !path.exists() && !path.with_added_extension("idx").exists()) else {
        return "; give its folder".into();
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let newest = Checkpoint::open(parent).ok().map(|newest| format!("; the newest is {}", newest.path().display()));
    format!(", and {}: there is no such folder{}", path.display(), newest.unwrap_or_default())
}

/// Whether a folder has a model of Hugging Face, and nothing of a run.
fn is_of_hugging_face(folder: &Path) -> bool {
    folder.join("config.json").exists() && !["latest", "manifest.json"].iter().any(|file| folder.join(file).exists())
}

/// What has nearly the name of a prefix: a pair of files in the same folder, or a folder.
fn nearest(prefix: &Path) -> Option<PathBuf> {
    let folder = prefix.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = prefix.file_name()?.to_str()?;
    let written = written.strip_suffix(".idx").or(written.strip_suffix(".bin")).unwrap_or(written);
    let names = folder.read_dir().ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name().to_str()?.to_string();
        if entry.path().is_dir() { Some(name) } else { Some(name.strip_suffix(".idx")?.to_string()) }
    });
    let far = |name: &String| damerau_levenshtein(written, name);
    let name = names.min_by_key(far).filter(|name| far(name) <= written.len() / 3 + 1)?;
    Some(prefix.with_file_name(name))
}

fn describe_files(prefix: &Path, data: &IndexedDataset) -> String {
    let mut lengths: Vec<usize> = (0..data.num_sequences()).map(|i| data.sequence_length(i)).collect();
    lengths.sort_unstable();
    let empty = (0..data.num_documents()).filter(|&document| data.document(document).is_empty()).count();
    let mut text = format!(
        "{}\n  {} tokens of {} in {} sequences and {} documents ({} empty){}\n",
        prefix.display(),
        count(data.num_tokens()),
        data.dtype(),
        count(data.num_sequences()),
        count(data.num_documents()),
        count(empty),
        if data.is_multimodal() { ", with modes" } else { "" },
    );
    if let (Some(shortest), Some(longest)) = (lengths.first(), lengths.last()) {
        text += &format!(
            "  tokens per sequence: {} to {}, median {}, mean {:.1}\n",
            count(*shortest),
            count(*longest),
            count(lengths[lengths.len() / 2]),
            data.num_tokens() as f64 / lengths.len() as f64,
        );
    }
    text
}

fn describe_split(data: &GptSplit, blend: &Blend) -> String {
    let samples = count(data.len());
    let blended = match data {
        GptSplit::Single(single) => return format!("{samples} samples: {}\n", describe_plan(single.plan())),
        GptSplit::Blended(blended) => blended,
    };
    let mut text = format!("{samples} samples\n");
    for (i, (component, prefix)) in blended.datasets().iter().zip(&blend.prefixes).enumerate() {
        let used = blended.index().dataset.iter().filter(|&&dataset| usize::from(dataset) == i).count();
        text += &format!(
            "         {:5.2} % {} of {} samples of {}: {}\n",
            100.0 * used as f64 / data.len().max(1) as f64,
            count(used),
            count(component.len()),
            prefix.display(),
            describe_plan(component.plan()),
        );
    }
    text
}

fn describe_plan(plan: &EpochPlan) -> String {
    let apart = if plan.shuffled_apart.is_some() { ", the last one shuffled apart" } else { "" };
    let epochs = if plan.epochs == 1 { "epoch" } else { "epochs" };
    format!("{} {epochs} of {} tokens{apart}", plan.epochs, count(plan.tokens_per_epoch as usize))
}

fn show(args: &Args, splits: &GptSplits) -> anyhow::Result<()> {
    let split = Split::ALL[args.dataset as usize];
    let Some(data) = splits.get(split) else { bail!("split {} leaves no {} data to show", args.split, split.name()) };
    if let Some(samples) = args.samples.filter(|&samples| samples > data.len()) {
        bail!("{samples} {} samples are wanted, there are {}", split.name(), data.len());
    }
    let load = |path: &PathBuf| read_tokenizer(path).map_err(|error| anyhow!("{}: {error}", path.display()));
    let tokenizer = args.tokenizer.as_ref().map(load).transpose()?;
    for index in 0..args.samples.unwrap_or(SHOWN.min(data.len())) {
        let sample = describe_sample(&data.try_sample(index).map_err(anyhow::Error::from_boxed)?, tokenizer.as_ref())?;
        print(&format!("{}[{index}] {sample}\n", split.name()))?;
    }
    if let Some(out) = &args.out {
        let samples = args.samples.unwrap_or(data.len());
        let tokens = |index| data.try_sample(index).map(|sample| sample.tokens).map_err(io::Error::other);
        npy::write_i64(out, (0..samples).map(tokens), data.seq_length()).map_err(refused(Access::Write, out))?;
        print(&format!("wrote {}: int64 ({samples}, {})\n", out.display(), data.seq_length()))?;
    }
    Ok(())
}

fn describe_sample(sample: &Sample, tokenizer: Option<&Tokenizer>) -> anyhow::Result<String> {
    let masked = sample.tokens.len() - sample.counted();
    let mask = if masked > 0 { format!(" ({masked} not in the loss)") } else { String::new() };
    let text = match tokenizer {
        None => sample.tokens.iter().map(i64::to_string).collect::<Vec<_>>().join(" "),
        Some(tokenizer) => {
            let ids: Vec<u32> = sample.tokens.iter().map(|&id| u32::try_from(id)).collect::<Result<_, _>>()?;
            format!("{:?}", tokenizer.decode(&ids, false).map_err(|error| anyhow!("decoding: {error}"))?)
        }
    };
    Ok(text + &mask)
}

fn count(n: usize) -> HumanCount {
    HumanCount(n as u64)
}
