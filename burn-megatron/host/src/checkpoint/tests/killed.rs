//! A process that saves in a loop and is killed at any time.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::super::{Checkpoint, Saver, SaverOptions};
use super::round_trip::{contents, expected};
use super::saving::submit;

/// Names the folder for the process that is killed.
const FOLDER: &str = "BURN_MEGATRON_TEST_CHECKPOINTS";
/// How often it is killed.
const KILLS: u64 = 20;

/// Saves until the process is killed; every third save is of a step that exists.
fn save_in_a_loop(folder: &str) {
    let options = SaverOptions { keep_last: Some(2), keep_every: Some(7), background: true, ..SaverOptions::default() };
    let saver = Saver::new(Path::new(folder), 2, options).unwrap();
    let start = Checkpoint::open(folder).map_or(0, |checkpoint| checkpoint.state().step);
    println!("saving");
    for save in 1.. {
        let step = start + save - save / 3;
        submit(&saver, step);
        saver.finished().into_iter().for_each(|save| drop(save.unwrap()));
    }
}

#[test]
fn a_killed_process_leaves_a_checkpoint_to_resume_from() {
    // The process that is killed is this test once more.
    if let Ok(folder) = std::env::var(FOLDER) {
        return save_in_a_loop(&folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut reached = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("checkpoint::tests::killed::a_killed_process_leaves_a_checkpoint_to_resume_from")
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("saving")), "the process saves");
        // Not in step with the saves, and sometimes before the first one.
        std::thread::sleep(Duration::from_micros(997 * (kill * 7919 % 101)));
        child.kill().unwrap();
        child.wait().unwrap();
        let checkpoint = match Checkpoint::open(folder.path()) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                assert_eq!(reached, 0, "a checkpoint was there before kill {kill}: {error}");
                continue;
            }
        };
        checkpoint.verify(0, 1).unwrap();
        let step = checkpoint.state().step;
        assert_eq!(contents(&checkpoint), expected(step, step as u32));
        assert!(step >= reached, "kill {kill}: step {step} after step {reached}");
        reached = step;
    }
    assert!(reached > 0, "the process never came to save");
    println!("{KILLS} kills, the last at step {reached}");
}
