//! Processes that fail are started again by their launcher, all of them, as torchrun and Slurm do it, and continue with the
//! bits of a run that was left alone.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::train::{folder, steps, succeed, tensors, train};
use super::{Ended, Process, all, command, ended};

/// How torchrun's agent of one host runs processes (torch/distributed/elastic/agent/server/api.py): when one has failed, the
/// others get SIGTERM and after 30 seconds SIGKILL, and all are started again, with the same port where they are as many as
/// before. `worlds` are the numbers of processes, which change where nodes come and go (`--nnodes min:max`). Returns how the
/// last ones have ended, and how often they were started again.
fn torchrun(folder: &Path, arguments: &str, worlds: &[usize]) -> (Vec<Ended>, usize) {
    let max_restarts = worlds.len() - 1;
    let mut world = all(worlds[0]);
    for (restart, &processes) in worlds.iter().enumerate() {
        if world.len() != processes {
            world = all(processes);
        }
        let start = |process: &Process| {
            let mut command = command(folder, arguments, Some(process));
            command.env("TORCHELASTIC_RUN_ID", "run").env("TORCHELASTIC_MAX_RESTARTS", max_restarts.to_string());
            command.env("TORCHELASTIC_RESTART_COUNT", restart.to_string()).spawn().unwrap()
        };
        let mut children: Vec<Child> = world.iter().map(start).collect();
        let failed = watch(&mut children);
        if failed {
            stop(&mut children);
        }
        if !failed || restart == max_restarts {
            return (children.into_iter().map(|child| ended(child, Duration::from_secs(10))).collect(), restart);
        }
    }
    unreachable!("the last restart returns")
}

/// Waits until one has failed, or all have ended well.
fn watch(children: &mut [Child]) -> bool {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(240), "the processes neither end nor fail");
        let ended: Vec<_> = children.iter_mut().map(|child| child.try_wait().unwrap()).collect();
        if ended.iter().flatten().any(|status| !status.success()) {
            return true;
        }
        if ended.iter().all(Option::is_some) {
            return false;
        }
        sleep(Duration::from_millis(100));
    }
}

fn stop(children: &mut [Child]) {
    for child in children.iter_mut() {
        if child.try_wait().unwrap().is_none() {
            // SAFETY: a signal to a process that has not been waited for.
            unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        }
    }
    let start = Instant::now();
    for child in children {
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(30) {
                child.kill().unwrap();
            }
            sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn processes_that_torchrun_starts_again_resume_with_the_bits_of_a_run_that_was_left_alone() {
    let folder = folder();
    let folder = folder.path();
    succeed(folder, &train("alone"), 1);
    // The first process and another one, of two ranks each; a failure and a hang besides the kills.
    let faults = "kill:rank3@step5,kill:rank0@step7,error:rank2@step9,hang:rank1@step11";
    let flags = format!("{} --training.distributed-timeout-minutes 0.2 --inject {faults}", train("again"));
    let (all, restarts) = torchrun(folder, &flags, &[2; 6]);
    for Ended { status, stdout, stderr } in &all {
        assert!(status.success(), "after {restarts} restarts: {stdout}{stderr}");
    }
    assert_eq!(restarts, 4, "{}", all[0].stdout);
    assert!(all[0].stdout.contains("resuming from again/checkpoints/step_00000009"), "{}", all[0].stdout);
    assert_eq!(steps(folder, "again"), steps(folder, "alone"));
    assert!(tensors(folder, "again") == tensors(folder, "alone"));

    // A fault for which no restart is left ends the run, and says which.
    let (all, restarts) = torchrun(folder, &format!("{} --inject error:rank2@step4", train("ends")), &[2]);
    assert_eq!(restarts, 0);
    let named = |ended: &Ended| !ended.status.success() && ended.stderr.contains("rank 2 (dp 1, tp 0)");
    assert!(all.iter().any(named), "{}{}", all[0].stderr, all[1].stderr);
}

/// The copy in the host's memory is newer than the last checkpoint; one that is not whole is none.
#[test]
fn processes_continue_from_copies_that_outlive_them() {
    let folder = folder();
    let folder = folder.path();
    // Without threads that write, what is saved is complete a step later.
    let flags = "--checkpoint.every 5 --checkpoint.async false";
    succeed(folder, &format!("{} {flags}", train("alone")), 1);
    let copies = "--checkpoint.non-persistent-every 2 --checkpoint.non-persistent-local-dir shm";
    let again = format!("{} {flags} {copies}", train("again"));
    let (all, restarts) = torchrun(folder, &format!("{again} --inject kill:rank3@step4,kill:rank0@step10"), &[2; 3]);
    for Ended { status, stdout, stderr } in &all {
        assert!(status.success(), "after {restarts} restarts: {stdout}{stderr}");
    }
    assert_eq!(restarts, 2);
    let resumed = all[0].stdout.lines().find(|line| line.contains("resuming from ")).unwrap();
    assert!(resumed.contains("shm/burn-megatron-") && resumed.contains("/step_00000008"), "{resumed}");
    assert_eq!(steps(folder, "again"), steps(folder, "alone"));
    assert!(tensors(folder, "again") == tensors(folder, "alone"));
    let left = || fs::read_dir(folder.join("shm")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(left().count(), 0, "the run has ended");

    let damaged = format!("{} {flags} {copies}", train("damaged"));
    torchrun(folder, &format!("{damaged} --inject kill:rank2@step10"), &[2]);
    let copy = left().next().unwrap().join("step_00000008");
    fs::remove_file(fs::read_dir(&copy).unwrap().map(|file| file.unwrap().path()).find(|path| is_shard(path)).unwrap())
        .unwrap();
    let said = &super::run(folder, &damaged, 2)[0].stdout;
    assert!(said.contains("resuming from damaged/checkpoints/step_00000005"), "{said}");
    assert!(tensors(folder, "damaged") == tensors(folder, "alone"));

    // Of a run whose folder was deleted nothing is taken.
    let gone = format!("{} {flags} {copies}", train("gone"));
    torchrun(folder, &format!("{gone} --inject kill:rank2@step4"), &[2]);
    assert_eq!(left().count(), 1);
    fs::remove_dir_all(folder.join("gone")).unwrap();
    let said = &super::run(folder, &gone, 2)[0].stdout;
    assert!(!said.contains("resuming from"), "{said}");
    assert!(tensors(folder, "gone") == tensors(folder, "alone"));
}

fn is_shard(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// `torchrun --nnodes 1:2`: a node is lost and comes back, and the run is that of one process up to rounding.
#[test]
fn a_run_goes_on_with_as_many_processes_as_torchrun_starts() {
    let folder = folder();
    let folder = folder.path();
    let flags = "--tensor-parallel 1 --sequence-parallel=false --training.dtype f64 --checkpoint.async false";
    succeed(folder, &format!("{} {flags} --data-parallel 1 --zero 0", train("alone")), 1);
    let faults = "kill:rank1@step5,kill:rank0@step9";
    for (name, zero, worlds) in [("fewer", 1, [2, 1, 2]), ("more", 3, [2, 4, 1])] {
        let flags = format!("{} {flags} --data-parallel auto --zero {zero} --inject {faults}", train(name));
        let (all, restarts) = torchrun(folder, &flags, &worlds);
        for Ended { status, stdout, stderr } in &all {
            assert!(status.success(), "{name} after {restarts} restarts: {stdout}{stderr}");
        }
        assert_eq!((restarts, all.len()), (2, worlds[2]));
        let layout = |ranks: usize| match ranks {
            1 => format!("ZeRO{zero}"),
            _ => format!("DP{ranks} ZeRO{zero}"),
        };
        let resumed = format!("resuming from {name}/checkpoints/step_00000006 (saved with {})", layout(worlds[1]));
        assert!(all[0].stdout.contains(&resumed), "{}", all[0].stdout);
        for (step, (ours, theirs)) in steps(folder, name).iter().zip(steps(folder, "alone")).enumerate() {
            for (ours, theirs) in ours.iter().zip(theirs) {
                let [ours, theirs] = [ours, &theirs].map(|value| value.parse::<f64>().unwrap());
                assert!((ours - theirs).abs() < 1e-10 * theirs, "{name}: step {}: {ours}, {theirs}", step + 1);
            }
        }
    }

    // A world that does not divide the batch of four is refused by all, and leaves what is there.
    for Ended { status, stderr, .. } in
        super::run(folder, &format!("{} {flags} --data-parallel auto --zero 1", train("fewer")), 3)
    {
        let said = "parallel.data-parallel = auto: of 3 ranks, `global-batch 4` is not a multiple";
        assert!(!status.success() && stderr.contains(said), "{stderr}");
        says!(stderr, "nearest legal numbers of ranks: 2, 4");
    }
}

#[test]
fn restarts_within_a_process_are_refused_where_there_are_several() {
    let folder = folder();
    for Ended { status, stderr, .. } in
        super::run(folder.path(), &format!("{} --training.max-restarts 2", train("no")), 2)
    {
        let why =
            "training.max-restarts = 2 begins again in a process whose rank has failed, and there are 2 processes";
        assert!(!status.success() && stderr.contains(why) && stderr.contains("nearest legal: 0"), "{stderr}");
    }
}
