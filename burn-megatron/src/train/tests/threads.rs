//! Threads that the system does not give.

use std::io;

use super::super::threads_started;

#[test]
fn a_pool_of_threads_that_cannot_be_started_is_an_error_and_one_that_is_there_is_none() {
    let refusing = rayon::ThreadPoolBuilder::new().spawn_handler(|_| Err(io::ErrorKind::WouldBlock.into()));
    let said = threads_started(refusing.build().map(drop)).unwrap_err().to_string();
    assert!(said.starts_with("the system does not give enough threads (") && said.contains("`ulimit -u`"), "{said}");
    says!(said, "RAYON_NUM_THREADS");
    // The first of these or another test has started them; the second finds them started.
    for _ in 0..2 {
        threads_started(rayon::ThreadPoolBuilder::new().build_global()).unwrap();
    }
}
