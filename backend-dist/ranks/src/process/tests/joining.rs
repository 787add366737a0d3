//! Who may join, who is refused, and what those hear who wait.

use super::*;
use crate::process::JoinError;
use std::io::{Read, Write};
use std::net::TcpStream;

fn joined(worlds: &[(ProcessWorld, Mesh, &str)]) -> Vec<Result<usize, JoinError>> {
    thread::scope(|scope| {
        let join = |(world, mesh, text): &(ProcessWorld, Mesh, &str)| {
            let (world, mesh, text) = (world.clone(), mesh.clone(), text.to_string());
            scope.spawn(move || Processes::join(&world, &mesh, &[("configuration", text)]).map(|it| it.process()))
        };
        let threads: Vec<_> = worlds.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn processes_that_differ_hear_how_in_the_same_words() {
    let port = free_port();
    let case = |first: (Mesh, &'static str), second: (Mesh, &'static str)| {
        let worlds = [(world(0, 2, port), first.0, first.1), (world(1, 2, port), second.0, second.1)];
        let texts: Vec<String> = joined(&worlds).into_iter().map(|result| result.unwrap_err().to_string()).collect();
        assert_eq!(texts[0], texts[1]);
        texts[0].clone()
    };
    let text = case((mesh(2, 1), "a"), (mesh(1, 2), "a"));
    assert!(text.contains("has layout TP2, but process 1 on") && text.contains("has layout DP2"), "{text}");
    let text = case((mesh(2, 1), "same\nlr = 1\nend"), (mesh(2, 1), "same\nlr = 2\nend"));
    assert!(text.contains("has configuration lr = 1, but") && text.contains("has configuration lr = 2;"), "{text}");
}

/// Whoever comes after the one that differs hears of it too, instead of calling until its patience ends.
#[test]
fn who_comes_late_hears_why_nothing_comes_of_it() {
    let port = free_port();
    let first = thread::spawn(move || joined(&[(world(0, 3, port), mesh(1, 3), "a")]).remove(0));
    let other = thread::spawn(move || joined(&[(world(1, 3, port), mesh(1, 3), "b")]).remove(0));
    thread::sleep(Duration::from_millis(500));
    let late = joined(&[(world(2, 3, port), mesh(1, 3), "a")]).remove(0);
    let texts = [first.join().unwrap(), other.join().unwrap(), late].map(|result| result.unwrap_err().to_string());
    assert!(texts[0].contains("has configuration a, but process 1 on"), "{}", texts[0]);
    assert_eq!((&texts[1], &texts[2]), (&texts[0], &texts[0]));
}

#[test]
fn two_processes_of_one_number_are_refused() {
    let port = free_port();
    let worlds = [0, 1, 1].map(|process| (world(process, 3, port), mesh(1, 3), ""));
    for result in joined(&worlds) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("two processes say that they are process 1 of 3"), "{error}");
    }
}

#[test]
fn who_does_not_come_is_named() {
    let soon = |process, port| ProcessWorld { patience: Duration::from_secs(1), ..world(process, 3, port) };
    let port = free_port();
    let late = joined(&[(soon(0, port), mesh(1, 3), ""), (world(2, 3, port), mesh(1, 3), "")]);
    for result in late {
        let error = result.unwrap_err().to_string();
        let words = format!("waited 1 s on 127.0.0.1 port {port}: process 1 of 3 did not come (there: 0 on ");
        assert!(error.starts_with(&words) && error.contains(", 2 on "), "{error}");
    }
    let error = joined(&[(soon(1, port), mesh(1, 3), "")]).remove(0).unwrap_err().to_string();
    assert!(error.starts_with("process 1 tried for 1 s to reach process 0 on 127.0.0.1"), "{error}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = joined(&[(soon(0, taken.local_addr().unwrap().port()), mesh(1, 3), "")]).remove(0).unwrap_err();
    assert!(error.to_string().contains("BURN_MEGATRON_PORT"), "{error}");
}

#[test]
fn strangers_on_the_port_do_not_matter() {
    let port = free_port();
    let server = thread::spawn(move || joined(&[(world(0, 2, port), mesh(1, 2), "")]).remove(0));
    let mut stranger = loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            break stream;
        }
        thread::sleep(Duration::from_millis(10));
    };
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mute = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(joined(&[(world(1, 2, port), mesh(1, 2), "")]), [Ok(1)]);
    assert_eq!(server.join().unwrap(), Ok(0));
    let mut answer = Vec::new();
    // However the connection ends, the stranger has learnt what it reached.
    let _ = stranger.read_to_end(&mut answer);
    assert!(answer.starts_with(b"burn-megatron"));
    drop(mute);
}

#[test]
fn ranks_that_cannot_be_shared_out_are_refused() {
    let error = Processes::join(&world(0, 4, 1), &mesh(2, 3), &[]).err().unwrap().to_string();
    assert!(error.starts_with("6 ranks (TP2 DP3) cannot be shared out over 4 processes"), "{error}");
    assert!(error.contains("nearest legal: 3 processes"), "{error}");
}
