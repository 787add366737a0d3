//! A metric that panics while the first rank waits for it ends the run with its message.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::*;

#[path = "../../../../tests/support/panics.rs"]
mod panics;
use panics::Panics;

#[test]
fn a_metric_that_panics_ends_the_run_with_its_message() {
    // The last step of an epoch, after which the first rank waits, and one before; with a restart, which cannot help.
    for (layout, at, max_restarts) in [("TP2 DP2", 5, 0), ("PP2", 5, 1), ("DP2 ZeRO1", 3, 1)] {
        let (ended, until) = channel();
        thread::spawn(move || {
            let folder = tempfile::tempdir().unwrap();
            let restarts = RestartOptions { max_restarts, copy_every: Some(2), ..RestartOptions::default() };
            let (training, learner) = run(layout, folder.path()).restarts(restarts).supervised();
            let result = training.metric_train(Panics { at }).with_application_logger(None).launch(learner);
            ended.send(result.error.map(|error| error.to_string())).unwrap();
        });
        let error = until.recv_timeout(Duration::from_secs(60)).expect("the run ends");
        says!(error.expect(layout), "rank 0", "the metric ran into a wall");
    }
}
