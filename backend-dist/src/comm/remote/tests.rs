//! Who is let in, and what becomes of whoever else connects to the port.

use super::introduction::{Introduction, LIMIT, MAGIC, RunToken};
use super::rendezvous::{listen_addresses, rendezvous};
use crate::process::{JoinError, ProcessWorld};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

fn world(process: usize, processes: usize, port: u16) -> ProcessWorld {
    let patience = Duration::from_secs(30);
    ProcessWorld { patience, ..ProcessWorld::on_one_host(process, processes, port) }
}

fn introduction(process: usize, processes: usize) -> Introduction {
    let agreement = vec![("configuration".to_string(), "lr = 1".to_string())];
    Introduction { process, processes, host: format!("host{process}"), agreement }
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
    let first = thread::spawn(move || rendezvous(&world(0, 2, port), &introduction(0, 2)).map(|(_, hosts)| hosts));
    let connected = strangers(port);
    let second = rendezvous(&world(1, 2, port), &introduction(1, 2)).map(|(_, hosts)| hosts);
    let hosts = ["host0", "host1"].map(String::from).to_vec();
    assert_eq!([first.join().unwrap(), second], [Ok(hosts.clone()), Ok(hosts)]);
    connected
}

/// An introduction of this text under this token.
fn introduced(token: &[u8], length: u32, text: &[u8]) -> Vec<u8> {
    [&MAGIC[..], token, &length.to_le_bytes(), text].concat()
}

#[test]
fn nothing_that_a_stranger_sends_ends_the_start() {
    let text = |introduction: &Introduction| crate::comm::to_bytes(introduction);
    let bogus =
        [introduction(1, 2), introduction(7, 2), introduction(usize::MAX, 2), introduction(0, 2), introduction(1, 9)];
    start_with(|port| {
        let token = &introduction(1, 2).to_bytes(RunToken::of(&world(1, 2, port)))[16..48];
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
        sent.extend(bogus.iter().map(text).map(|text| introduced(&[7; 32], text.len() as u32, &text)));
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
        matches!(&error, JoinError::Refused(text) if text.contains("(configuration) has 262226 bytes, more than 262144")),
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
