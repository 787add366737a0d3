//! A save that fails, is killed or loses power at every operation in turn.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

use super::super::disk::{Fault, Files, Loss, SimDisk, Tree};
use super::super::{Checkpoint, CheckpointError, Result, Saver, SaverOptions};
use super::round_trip::{contents, expected, slices, state};

/// A history of saves that went well, then the one that is disturbed.
struct Scenario {
    name: &'static str,
    /// Steps that were saved before, with a number that makes their values different.
    before: &'static [(u64, u32)],
    save: (u64, u32),
    keep_last: Option<usize>,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario { name: "first", before: &[], save: (100, 1), keep_last: None },
    Scenario { name: "second", before: &[(100, 1)], save: (200, 2), keep_last: None },
    Scenario { name: "the same step again", before: &[(100, 1)], save: (100, 2), keep_last: None },
    Scenario {
        name: "with old ones to delete",
        before: &[(100, 1), (200, 2), (300, 3)],
        save: (400, 4),
        keep_last: Some(1),
    },
];

const ROOT: &str = "/runs/checkpoints";

fn save(disk: &SimDisk, (step, salt): (u64, u32), keep_last: Option<usize>) -> Result<()> {
    let options = SaverOptions { keep_last, ..SaverOptions::default() };
    let saver = Saver::on(Files::new(disk.clone()), Path::new(ROOT), 2, options)?;
    saver.rehearse(1000, None)?;
    let results: Vec<_> = (0..2).map(|writer| saver.submit(writer, slices(writer, salt), &state(step))).collect();
    let mut ended = saver.finished();
    assert_eq!(ended.len(), 1);
    let report = ended.pop().unwrap();
    assert_eq!(report.is_err(), results.iter().any(Result::is_err), "submit and finished say the same");
    report?.not_deleted.map_or(Ok(()), Err)
}

impl Scenario {
    /// The disk before the disturbed save, and the number of operations of the save.
    fn prepare(&self) -> (SimDisk, usize) {
        let disk = SimDisk::new();
        self.before.iter().for_each(|&before| save(&disk, before, None).unwrap());
        let trial = disk.fork(None);
        save(&trial, self.save, self.keep_last).unwrap();
        (disk, trial.operations())
    }

    /// Checks a state of the disk, unless an equal one has been checked before.
    fn check_once(&self, disk: &SimDisk, checked: &mut BTreeSet<Tree>, when: &str) {
        if checked.insert(disk.tree()) {
            self.check(disk, when);
            self.check_next(disk, when);
        }
    }

    /// Checks that the disk holds the checkpoint from before or the new one, completely, and no incomplete one by name.
    fn check(&self, disk: &SimDisk, when: &str) {
        let folder = tempfile::tempdir().unwrap();
        disk.export(folder.path());
        let opened = Checkpoint::open(folder.path().join(&ROOT[1..]));
        for entry in std::fs::read_dir(folder.path().join(&ROOT[1..])).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str().unwrap().starts_with("step_") {
                let whole = Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verify(0, 1));
                whole.unwrap_or_else(|error| panic!("{}, {when}: {error}", self.name));
            }
        }
        let found = match (&opened, self.before.last()) {
            (Err(CheckpointError::NotFound { .. }), None) => return,
            (Err(error), _) => panic!("{}, {when}: {error}", self.name),
            (Ok(checkpoint), _) => checkpoint,
        };
        let warning = found.warning().filter(|_| !self.before.is_empty());
        assert_eq!(warning, None, "{}, {when}: `latest` always leads to a checkpoint", self.name);
        found.verify(0, 1).unwrap_or_else(|error| panic!("{}, {when}: {error}", self.name));
        let candidates: Vec<_> =
            self.before.last().into_iter().chain([&self.save]).map(|&(step, salt)| expected(step, salt)).collect();
        assert!(candidates.contains(&contents(found)), "{}, {when}: neither the old one nor the new one", self.name);
    }

    /// Checks that the next run's save succeeds and leaves nothing but checkpoints.
    fn check_next(&self, disk: &SimDisk, when: &str) {
        save(disk, self.save, self.keep_last).unwrap_or_else(|error| panic!("{}, {when}: {error}", self.name));
        let folder = tempfile::tempdir().unwrap();
        disk.export(folder.path());
        let root = folder.path().join(&ROOT[1..]);
        assert_eq!(contents(&Checkpoint::open(&root).unwrap()), expected(self.save.0, self.save.1));
        let mut names: Vec<String> =
            std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names.retain(|name| !name.starts_with("step_"));
        assert_eq!(names, [".lock", "latest"], "{}, {when}", self.name);
    }
}

#[test]
fn an_operation_that_fails_is_reported_and_harms_nothing() {
    for scenario in &SCENARIOS {
        let (disk, operations) = scenario.prepare();
        let (mut checked, mut unreported) = (BTreeSet::new(), 0);
        for at in 0..operations {
            for kind in [ErrorKind::PermissionDenied, ErrorKind::StorageFull] {
                let when = format!("operation {at} of {operations}: {kind}");
                let disk = disk.fork(Some(Fault::Fail(at, kind)));
                let result = save(&disk, scenario.save, scenario.keep_last);
                scenario.check_once(&disk, &mut checked, &when);
                let Err(error) = result else {
                    unreported += 1;
                    continue;
                };
                let error = error.to_string();
                assert!(error.contains("/runs") || error.contains("sync /:"), "{when}: names the file: {error}");
                assert!(error.contains(&kind.to_string()) || error.contains("is full"), "{when}: the cause: {error}");
            }
        }
        // Leftovers that cannot be looked for at the start of a save are the next run's business.
        assert_eq!(unreported, 2, "{}: the search for leftovers, with either error", scenario.name);
        println!("{}: {operations} operations failed in turn, {} states", scenario.name, checked.len());
    }
}

#[test]
fn a_kill_or_power_cut_at_any_operation_leaves_the_old_or_the_new_checkpoint() {
    let losses: Vec<Loss> =
        [Loss::Nothing, Loss::Everything, Loss::Contents].into_iter().chain((0..8).map(Loss::Some)).collect();
    for scenario in &SCENARIOS {
        let (disk, operations) = scenario.prepare();
        let mut checked = BTreeSet::new();
        for at in 0..operations {
            let killed = disk.fork(Some(Fault::Kill(at)));
            save(&killed, scenario.save, scenario.keep_last).expect_err("killed");
            for &loss in &losses {
                let when = format!("killed at operation {at} of {operations}, {loss:?} lost");
                let disk = killed.restart(loss);
                scenario.check_once(&disk, &mut checked, &when);
            }
        }
        println!("{}: {operations} kill points, {} states", scenario.name, checked.len());
    }
}

#[test]
fn being_killed_again_while_cleaning_up_harms_nothing() {
    for scenario in &SCENARIOS {
        let (disk, operations) = scenario.prepare();
        let mut checked = BTreeSet::new();
        let mut points = 0;
        for at in 0..operations {
            let killed = disk.fork(Some(Fault::Kill(at)));
            save(&killed, scenario.save, scenario.keep_last).expect_err("killed");
            for loss in [Loss::Nothing, Loss::Some(at as u64)] {
                let disk = killed.restart(loss);
                for again in 0.. {
                    let disk = disk.fork(Some(Fault::Kill(again)));
                    let options = SaverOptions { keep_last: scenario.keep_last, ..SaverOptions::default() };
                    let opened = Saver::on(Files::new(disk.clone()), Path::new(ROOT), 2, options);
                    let when = format!("killed at operation {at}, {loss:?} lost, and at {again} of the next start");
                    for loss in [Loss::Some(again as u64), Loss::Everything] {
                        scenario.check_once(&disk.restart(loss), &mut checked, &when);
                    }
                    points += 1;
                    if opened.is_ok() {
                        break;
                    }
                }
            }
        }
        println!("{}: {points} second kill points, {} states", scenario.name, checked.len());
    }
}
