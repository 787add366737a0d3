//! burn-train's files of metrics, `SPLIT/epoch-N/METRIC.log`, as its own logger writes them, which panics where the disk
//! refuses. They are for Burn's tools: a run that cannot write them says so once and continues.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricEntry, MetricId, NumericEntry};

use super::logs::say;
use crate::metrics::named;

/// Those of a run.
pub(super) struct MetricFiles {
    directory: PathBuf,
    names: HashMap<MetricId, String>,
    /// Of this epoch.
    open: HashMap<PathBuf, File>,
    epoch: usize,
    has_failed: bool,
}

impl MetricFiles {
    /// In the run's folder.
    pub fn new(directory: &Path) -> Self {
        Self { directory: directory.into(), names: HashMap::new(), open: HashMap::new(), epoch: 0, has_failed: false }
    }

    fn path(&self, name: &str, epoch: usize, split: &Split) -> PathBuf {
        let folder = self.directory.join(split.to_string()).join(format!("epoch-{epoch}"));
        folder.join(format!("{}.log", name.replace(' ', "_")))
    }

    fn write(&mut self, entry: &MetricEntry, split: &Split) -> io::Result<()> {
        let Some(name) = self.names.get(&entry.metric_id) else { return Ok(()) };
        let path = self.path(name, self.epoch, split);
        let mut write = || -> io::Result<()> {
            if !self.open.contains_key(&path) {
                path.parent().map_or(Ok(()), fs::create_dir_all)?;
                self.open.insert(path.clone(), File::create(&path)?);
            }
            let line = format!("{}\n", entry.serialized_entry.serialized);
            self.open.get_mut(&path).map_or(Ok(()), |file| file.write_all(line.as_bytes()))
        };
        write().map_err(|error| named(&path, &error))
    }
}

impl MetricLogger for MetricFiles {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        if self.epoch != epoch {
            self.open.clear();
            self.epoch = epoch;
        }
        let numeric = update.entries_numeric.iter().map(|numeric| &numeric.entry);
        for entry in update.entries.iter().chain(numeric).filter(|entry| !entry.serialized_entry.is_not_available()) {
            match self.write(entry, split) {
                Err(error) if !self.has_failed => {
                    self.has_failed = true;
                    say(&format!("burn-train's files of metrics are not whole: {error}"));
                }
                _ => {}
            }
        }
    }

    fn read_numeric(&mut self, name: &str, epoch: usize, split: &Split) -> Result<Vec<NumericEntry>, String> {
        let text = fs::read_to_string(self.path(name, epoch, split)).unwrap_or_default();
        text.lines().filter(|line| !line.is_empty()).map(NumericEntry::deserialize).collect()
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }

    fn log_epoch_summary(&mut self, _: EpochSummary) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::train::metric::store::NumericMetricUpdate;
    use burn::train::metric::{NumericAttributes, SerializedEntry};

    use super::*;

    fn update(value: f64) -> MetricsUpdate {
        let text = format!("{value},1");
        let entry =
            MetricEntry::new(MetricId::new(Arc::new("Loss Of".into())), SerializedEntry::new(text.clone(), text));
        let numeric = NumericEntry::Value(value);
        MetricsUpdate::new(
            vec![],
            vec![NumericMetricUpdate { entry, numeric_entry: Some(numeric.clone()), running_entry: Some(numeric) }],
        )
    }

    fn files(folder: &Path) -> MetricFiles {
        let mut files = MetricFiles::new(folder);
        let attributes = NumericAttributes { unit: None, higher_is_better: false }.into();
        let name = Arc::new("Loss Of".to_string());
        let metric_id = MetricId::new(name.clone());
        files.log_metric_definition(MetricDefinition { metric_id, name, description: None, attributes });
        files
    }

    #[test]
    fn an_epoch_has_a_file_of_each_metric_which_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path());
        for (epoch, value) in [(1, 4.0), (1, 3.5), (2, 3.0)] {
            files.log(update(value), epoch, &Split::Train);
        }
        assert_eq!(fs::read_to_string(folder.path().join("train/epoch-1/Loss_Of.log")).unwrap(), "4,1\n3.5,1\n");
        let read = |files: &mut MetricFiles, epoch| files.read_numeric("Loss Of", epoch, &Split::Train).unwrap().len();
        assert_eq!([1, 2, 3].map(|epoch| read(&mut files, epoch)), [2, 1, 0]);
        // An epoch that is done again.
        files.log(update(5.0), 1, &Split::Train);
        assert_eq!(read(&mut files, 1), 1);
    }

    #[test]
    fn a_disk_that_refuses_does_not_end_the_run() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut files = files(file.path());
        (1..3).for_each(|epoch| files.log(update(1.0), epoch, &Split::Valid));
        assert!(files.has_failed);
    }
}
