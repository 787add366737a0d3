//! Who is let in, and what becomes of whoever else connects to the port.

use super::Remote;
use super::gate::{End, Gate};
use super::introduction::{Introduction, LIMIT, MAGIC};
use super::links::Neighbours;
use super::rendezvous::{listen_addresses, rendezvous};
use crate::process::{JoinError, ProcessWorld};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

fn world(process: usize, processes: usize, port: u16) -> ProcessWorld {
    let patience = Duration::from_secs(30);
    ProcessWorld { patience, ..ProcessWorld::on_one_host(process, processes, port) }
}

fn introduction(process: usize, processes: usize) -> Introduction {
    let agreement = vec![("configuration".to_string(), "lr = 1".to_string())];
    Introduction { process, processes, host: format!("host{process}"), agreement, port: None }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn connect(port: u16) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(10), "nobody listens: {error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Process 0 of two; `strangers` connect, and only then process 1 comes. Both must find each other.
fn start_with<T>(strangers: impl FnOnce(u16) -> T) -> T {
    let port = free_port();
    let first = thread::spawn(move || rendezvous(&world(0, 2, port), &introduction(0, 2)).map(|(_, hosts, _)| hosts));
    let connected = strangers(port);
    let second = rendezvous(&world(1, 2, port), &introduction(1, 2)).map(|(_, hosts, _)| hosts);
    let hosts = ["host0", "host1"].map(String::from).to_vec();
    assert_eq!([first.join().unwrap(), second], [Ok(hosts.clone()), Ok(hosts)]);
    connected
}

/// An introduction of this text under this token, with a proof that anybody could have made.
fn introduced(token: &[u8], length: u32, text: &[u8]) -> Vec<u8> {
    [&MAGIC[..], token, &[4; 32], &[5; 32], &length.to_le_bytes(), text].concat()
}

#[test]
fn nothing_that_a_stranger_sends_ends_the_start() {
    let text = |introduction: &Introduction| crate::comm::to_bytes(introduction);
    let bogus =
        [introduction(1, 2), introduction(7, 2), introduction(usize::MAX, 2), introduction(0, 2), introduction(1, 9)];
    start_with(|port| {
        let token = &Gate::of(&world(1, 2, port)).token;
        let mut sent: Vec<Vec<u8>> = vec![
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            b"\x1b[2J\x1b[31m\0\0\0".to_vec(),
            b"burn-megatron 01".to_vec(),
            MAGIC.to_vec(),
            [&MAGIC[..], &[0xff; 4096]].concat(),
            vec![0; 1 << 16],
            introduced(token, u32::MAX, b""),
            introduced(token, LIMIT as u32 + 1, &[0x92; 64]),
            introduced(token, 4, b"\xc1\xc1\xc1\xc1"),
            introduced(token, 3, b"\xdd\xff\xff"),
            introduced(token, 5, b"\xdd\xff\xff\xff\xff"),
            introduced(token, 2, b"more than two bytes"),
        ];
        for token in [&[7; 32], token] {
            sent.extend(bogus.iter().map(text).map(|text| introduced(token, text.len() as u32, &text)));
        }
        let send = |bytes: Vec<u8>| {
            let mut stream = connect(port);
            // It may have been hung up on before all is sent.
            let _ = stream.write_all(&bytes);
            stream
        };
        sent.into_iter().map(send).collect::<Vec<_>>()
    });
}

#[test]
fn a_stranger_that_sends_a_byte_now_and_then_does_not_stay() {
    start_with(|port| {
        let (mut stream, start) = (connect(port), Instant::now());
        let mut bytes = MAGIC.iter().cycle();
        while stream.write_all(&[*bytes.next().unwrap()]).is_ok() && start.elapsed() < Duration::from_secs(3) {
            thread::sleep(Duration::from_millis(300));
        }
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let end = stream.read_to_end(&mut Vec::new());
        let waits = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!end.is_err_and(|error| waits(&error)), "process 0 has not hung up");
    });
}

#[test]
fn a_crowd_of_silent_connections_does_not_keep_the_processes_out() {
    let crowd = start_with(|port| (0..200).map(|_| connect(port)).collect::<Vec<_>>());
    // More than two for each process and 32 were closed at once, with or without a greeting.
    let mut closed = 0;
    for mut stream in crowd {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        closed += usize::from(stream.read_to_end(&mut Vec::new()).is_ok());
    }
    assert!(closed > 0);
}

#[test]
fn a_process_of_another_run_is_told_so_and_the_run_starts() {
    let told = start_with(|port| {
        let other = ProcessWorld { run: "TORCHELASTIC_RUN_ID=other".into(), ..world(1, 2, port) };
        rendezvous(&other, &introduction(1, 2)).map(drop).unwrap_err().to_string()
    });
    assert!(told.contains("is of another run") && told.contains("TORCHELASTIC_RUN_ID"), "{told}");
}

/// Reads what process 0 begins a connection with.
fn nonce(stream: &mut TcpStream) -> [u8; 32] {
    let mut begin = [0; 48];
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.read_exact(&mut begin).unwrap();
    begin[16..].try_into().unwrap()
}

/// Processes 0 and 1 of two with these secrets, while `stranger` does what it likes.
fn with_secrets(secrets: [&str; 2], stranger: impl FnOnce(u16)) -> [Result<Vec<String>, String>; 2] {
    let port = free_port();
    let world = |process: usize, secret: &str| ProcessWorld {
        secret: secret.into(),
        patience: Duration::from_secs(3),
        ..world(process, 2, port)
    };
    let join = |world: ProcessWorld| {
        let process = world.process;
        thread::spawn(move || rendezvous(&world, &introduction(process, 2)).map(|(_, hosts, _)| hosts))
    };
    let first = join(world(0, secrets[0]));
    stranger(port);
    let second = join(world(1, secrets[1]));
    [first, second].map(|thread| thread.join().unwrap().map_err(|error| error.to_string()))
}

#[test]
fn only_who_knows_the_secret_joins_or_ends_a_run() {
    let hosts = Ok(["host0", "host1"].map(String::from).to_vec());
    assert_eq!(with_secrets(["s3cret", "s3cret"], |_| ()), [hosts.clone(), hosts.clone()]);
    for secrets in [["s3cret", "guess"], ["s3cret", ""], ["", "guess"]] {
        let [first, second] = with_secrets(secrets, |_| ());
        assert!(first.is_err());
        let told = second.unwrap_err();
        assert!(told.contains("has another BURN_MEGATRON_SECRET"), "{told}");
    }
    // One that would end the run, were it of the run: it has another WORLD_SIZE, or says that it is process 0.
    let introductions =
        [introduction(1, 3), introduction(0, 2)].map(|introduction| crate::comm::to_bytes(&introduction));
    let found = with_secrets(["s3cret", "s3cret"], |port| {
        let guess = Gate::of(&ProcessWorld { secret: "guess".into(), ..world(1, 2, port) });
        for text in &introductions {
            let mut stream = connect(port);
            let (first, own) = (nonce(&mut stream), [4; 32]);
            let proof = guess.proof(End::Caller, [&first, &own], text);
            let bytes = [&MAGIC[..], &guess.token, &own, &proof, &(text.len() as u32).to_le_bytes(), text].concat();
            stream.write_all(&bytes).unwrap();
        }
    });
    assert_eq!(found, [hosts.clone(), hosts]);
}

#[test]
fn what_was_overheard_opens_no_other_connection() {
    let secret = |port| Gate::of(&ProcessWorld { secret: "s3cret".into(), ..world(1, 2, port) });
    let hosts = Ok(["host0", "host1"].map(String::from).to_vec());
    let found = with_secrets(["s3cret", "s3cret"], |port| {
        // What process 1 said to a nonce of before, word for word.
        let overheard = introduction(1, 3).to_bytes(&secret(port), [&[1; 32], &[2; 32]]);
        let mut stream = connect(port);
        nonce(&mut stream);
        stream.write_all(&overheard).unwrap();
        // And what process 0 says itself.
        let (mut stream, text) = (connect(port), crate::comm::to_bytes(&introduction(1, 3)));
        let first = nonce(&mut stream);
        let mirrored = secret(port).proof(End::First, [&first, &[4; 32]], &text);
        let length = (text.len() as u32).to_le_bytes();
        stream.write_all(&[&MAGIC[..], &secret(port).token, &[4; 32], &mirrored, &length, &text].concat()).unwrap();
    });
    assert_eq!(found, [hosts.clone(), hosts]);
}

#[test]
fn processes_of_the_run_that_differ_end_it_and_their_text_is_printable() {
    for (other, said) in [
        (Introduction { host: "\x1b[31mred\n\u{202e}".into(), ..introduction(1, 3) }, "has WORLD_SIZE 3"),
        (
            Introduction { agreement: vec![("configuration".into(), "\x1b[2J\r".repeat(999))], ..introduction(1, 2) },
            "…",
        ),
    ] {
        let port = free_port();
        let first = thread::spawn(move || rendezvous(&world(0, 2, port), &introduction(0, 2)).map(drop));
        let second = rendezvous(&world(1, 2, port), &other).map(drop);
        for error in [first.join().unwrap(), second] {
            let text = error.unwrap_err().to_string();
            assert!(text.contains(said) && text.contains("process 1 on"), "{text:?}");
            assert!(text.len() < 2000 && !text.contains(char::is_control) && !text.contains('\u{202e}'), "{text:?}");
        }
    }
}

#[test]
fn strangers_are_counted_when_a_process_does_not_come() {
    let port = free_port();
    let soon = ProcessWorld { patience: Duration::from_secs(1), ..world(0, 2, port) };
    let first = thread::spawn(move || rendezvous(&soon, &introduction(0, 2)).map(drop));
    for _ in 0..3 {
        connect(port).write_all(b"SSH-2.0-scanner\r\n").unwrap();
    }
    let error = first.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("; 3 connections that are not of this run were closed"), "{error}");
}

#[test]
fn an_agreement_that_is_too_long_is_refused_before_anybody_waits() {
    let long = Introduction { agreement: vec![("configuration".into(), "x".repeat(LIMIT))], ..introduction(1, 2) };
    let error = rendezvous(&world(1, 2, 1), &long).map(drop).unwrap_err();
    assert!(
        matches!(&error, JoinError::Refused(text) if text.contains("(configuration) has 262175 bytes, more than 262144")),
        "{error}"
    );
}

#[test]
fn a_host_whose_own_name_is_a_loopback_address_listens_for_other_hosts() {
    let of = |address: &str, one_host: bool, behind: &str| {
        let world = ProcessWorld { address: address.into(), one_host, ..world(0, 2, 7000) };
        let behind: SocketAddr = behind.parse().unwrap();
        listen_addresses(&world, &[behind]).iter().all(|address| address.ip().is_loopback())
    };
    assert!(!of("node0", false, "127.0.1.1:7000"), "others come from elsewhere");
    assert!(of("node0", true, "127.0.1.1:7000"), "all are on this host");
    for address in ["127.0.0.1", "::1", "localhost"] {
        assert!(of(address, false, "127.0.0.1:7000"), "{address} is nobody else's");
    }
    assert!(!of("node0", true, "10.0.0.1:7000") && !of("10.0.0.1", true, "10.0.0.1:7000"));
}

#[test]
fn a_process_in_the_middle_takes_in_those_below_it_and_nobody_else() {
    let world = |process, secret: &str| ProcessWorld { secret: secret.into(), ..world(process, 20, 29500) };
    let remote = |world: &ProcessWorld| Remote::new(world, 1, vec![String::new(); 20], (0..20).map(|_| None).collect());
    let middle = world(1, "s3cret");
    let (neighbours, connected, is_over) = (Neighbours::of(&middle), remote(&middle), AtomicBool::new(false));
    let port = neighbours.port().unwrap();
    let call = |process, secret: &str| {
        let world = world(process, secret);
        Neighbours::of(&world).call(&remote(&world), ([127, 0, 0, 1], port).into()).is_ok()
    };
    thread::scope(|scope| {
        scope.spawn(|| neighbours.take_in(&connected, || is_over.load(Ordering::Acquire)));
        let silent = connect(port);
        connect(port).write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // Process 17 is below process 2, and process 9 calls once.
        let called = [call(9, "guess"), call(9, ""), call(17, "s3cret"), call(9, "s3cret"), call(9, "s3cret")];
        is_over.store(true, Ordering::Release);
        assert_eq!(called, [false, false, false, true, false]);
        drop(silent);
    });
    assert_eq!(connected.links().below.keys().copied().collect::<Vec<_>>(), [9]);
}
