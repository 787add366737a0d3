//! How the processes of a world find each other: process 0 listens, the others come, and all hear whether they agree.

use super::frame::Frame;
use crate::comm::codec;
use crate::process::{JoinError, ProcessWorld};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Begins every connection; the last bytes are the version of what follows.
const MAGIC: &[u8; 16] = b"burn-megatron 01";
/// How long a caller may take to say who it is.
const MANNERS: Duration = Duration::from_secs(10);
/// How long those who have not called yet may still hear why nothing comes of it.
const GRACE: Duration = Duration::from_secs(5);
/// Between two attempts to reach process 0, and between two looks for callers.
const PAUSE: Duration = Duration::from_millis(50);

/// Who a process is, and what all must agree on: names with values, in one order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub process: usize,
    pub processes: usize,
    pub host: String,
    pub agreement: Vec<(String, String)>,
}

/// What process 0 answers: the hosts of all, or why not.
type Answer = Result<Vec<String>, String>;

/// Brings the processes together. Returns the connections by process, and the hosts.
///
/// # Errors
/// If somebody does not come in time, or the processes do not agree.
pub(crate) fn meet_at(
    world: &ProcessWorld,
    me: &Introduction,
) -> Result<(Vec<Option<TcpStream>>, Vec<String>), JoinError> {
    let addresses: Vec<SocketAddr> = match (world.address.as_str(), world.port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(cause) => return Err(JoinError::Address { address: world.address.clone(), cause: cause.to_string() }),
    };
    if world.process == 0 { gather(world, me, &addresses) } else { call(world, me, &addresses) }
}

/// Process 0: waits for all others.
fn gather(
    world: &ProcessWorld,
    me: &Introduction,
    addresses: &[SocketAddr],
) -> Result<(Vec<Option<TcpStream>>, Vec<String>), JoinError> {
    let (address, port) = (world.address.clone(), world.port);
    let listener =
        listen(addresses, port).map_err(|cause| JoinError::Listen { address, port, cause: cause.to_string() })?;
    let start = Instant::now();
    let mut streams: Vec<Option<TcpStream>> = (0..world.processes).map(|_| None).collect();
    let mut there = vec![(0, me.host.clone())];
    let (sender, callers) = mpsc::channel();
    let (mut called, mut refused) = (1, None::<(String, Instant)>);
    while there.len() < world.processes || refused.is_some() {
        if let Some((reason, _)) = refused.take_if(|(_, since)| called == world.processes || since.elapsed() > GRACE) {
            refuse(streams.iter_mut().flatten(), &reason);
            return Err(JoinError::Refused(reason));
        }
        match listener.accept() {
            Ok((stream, _)) => {
                let sender = sender.clone();
                // A caller that says nothing must not keep the others waiting.
                thread::spawn(move || {
                    if let Ok(introduction) = introduced(&stream) {
                        // Nobody listens any more once the world is complete or given up.
                        let _ = sender.send((stream, introduction));
                    }
                });
            }
            Err(_) => thread::sleep(PAUSE),
        }
        while let Ok((stream, introduction)) = callers.try_recv() {
            let process = introduction.process;
            let second = there.iter().find(|(other, _)| *other == process);
            let second = second.map(|(_, host)| {
                format!("two processes say that they are process {process} of {}: one on {host}, one on {}; RANK must differ", world.processes, introduction.host)
            });
            called += 1;
            match second.or_else(|| disagreement(me, &introduction)) {
                None => {
                    there.push((process, introduction.host));
                    streams[process] = Some(stream);
                }
                Some(reason) => {
                    streams.push(Some(stream));
                    refused.get_or_insert((reason, Instant::now()));
                }
            }
        }
        if refused.is_none() && start.elapsed() > world.patience {
            let missing = (0..world.processes).filter(|process| there.iter().all(|(other, _)| other != process));
            let (missing, waited) = (missing.collect(), world.patience);
            there.sort();
            let error = JoinError::Missing {
                address: world.address.clone(),
                port,
                waited,
                processes: world.processes,
                missing,
                there,
            };
            refuse(streams.iter_mut().flatten(), &error.to_string());
            return Err(error);
        }
    }
    there.sort();
    let hosts: Vec<String> = there.into_iter().map(|(_, host)| host).collect();
    // Who is gone by now is missed by its reading thread.
    streams.iter_mut().flatten().for_each(|stream| drop(say(stream, &Answer::Ok(hosts.clone()))));
    Ok((streams, hosts))
}

/// The other processes: call process 0 until it answers.
fn call(
    world: &ProcessWorld,
    me: &Introduction,
    addresses: &[SocketAddr],
) -> Result<(Vec<Option<TcpStream>>, Vec<String>), JoinError> {
    let start = Instant::now();
    let left = || world.patience.saturating_sub(start.elapsed());
    let mut cause = "nobody answered".to_string();
    while !left().is_zero() {
        for address in addresses {
            let wait = left().clamp(PAUSE, MANNERS);
            match TcpStream::connect_timeout(address, wait).and_then(|stream| introduce(stream, me, left() + MANNERS)) {
                Ok((stream, Ok(hosts))) => {
                    let mut streams: Vec<Option<TcpStream>> = (0..world.processes).map(|_| None).collect();
                    streams[0] = Some(stream);
                    return Ok((streams, hosts));
                }
                Ok((_, Err(reason))) => return Err(JoinError::Refused(reason)),
                Err(error) => cause = error.to_string(),
            }
        }
        thread::sleep(PAUSE);
    }
    let (process, address, port, waited) = (world.process, world.address.clone(), world.port, world.patience);
    Err(JoinError::Unreachable { process, address, port, tried: addresses.to_vec(), waited, cause })
}

/// Listens where the others will call: only within the host if `MASTER_ADDR` is within it, otherwise on all its
/// addresses, since a host need not know the name that others call it by.
fn listen(addresses: &[SocketAddr], port: u16) -> io::Result<TcpListener> {
    let local: Vec<SocketAddr> = addresses.iter().copied().filter(|address| address.ip().is_loopback()).collect();
    let everywhere = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))];
    let places = if local.is_empty() { &everywhere[..] } else { &local[..] };
    // Also on a host without IPv6.
    let listener = TcpListener::bind(places)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn introduce(mut stream: TcpStream, me: &Introduction, patience: Duration) -> io::Result<(TcpStream, Answer)> {
    stream.write_all(MAGIC)?;
    say(&mut stream, me)?;
    stream.set_read_timeout(Some(patience))?;
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).map_err(|error| io::Error::new(error.kind(), format!("no answer came ({error})")))?;
    if magic != *MAGIC {
        let what = "what answers is not this version of burn-megatron; another program may have the port";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let answer = hear(&mut stream)?;
    Ok((stream, answer))
}

fn introduced(mut stream: &TcpStream) -> io::Result<Introduction> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(MANNERS))?;
    stream.set_write_timeout(Some(MANNERS))?;
    // A caller of another version reads this and knows.
    stream.write_all(MAGIC)?;
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    hear(&mut stream)
}

fn refuse<'a>(streams: impl Iterator<Item = &'a mut TcpStream>, reason: &str) {
    for stream in streams {
        // One that is gone need not hear it.
        let _ = say(stream, &Answer::Err(reason.to_string()));
    }
}

fn say(stream: &mut TcpStream, value: &impl Serialize) -> io::Result<()> {
    let bytes = codec::to_bytes(value);
    stream.write_all(&[&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat())
}

fn hear<T: serde::de::DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > Frame::SANE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    codec::from_bytes(&bytes).map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))
}

/// In what a process differs from process 0.
fn disagreement(first: &Introduction, other: &Introduction) -> Option<String> {
    let name = |of: &Introduction| format!("process {} on {}", of.process, of.host);
    let processes = |of: &Introduction| vec![("WORLD_SIZE".to_string(), of.processes.to_string())];
    let all = |of: &Introduction| [processes(of), of.agreement.clone()].concat();
    let (ours, theirs) = (all(first), all(other));
    let differs = |(ours, theirs): &(&(String, String), &(String, String))| ours != theirs;
    let says = |of: &Introduction, what: &str, value: &str| format!("{} has {what} {value}", name(of));
    let different = ours.iter().zip(&theirs).find(differs);
    let (what, ours, theirs) = match different {
        Some(((what, ours), (_, theirs))) => (what.as_str(), ours.as_str(), theirs.as_str()),
        None if ours.len() != theirs.len() => ("so many things to agree on:", "", ""),
        None if other.process >= first.processes => {
            return Some(format!("{} is none of the {} processes", name(other), first.processes));
        }
        None => return None,
    };
    // Of a long text, the first line that differs.
    let lines = |a: &str, b: &str| {
        a.lines().find(|line| !b.lines().any(|other| other == *line)).unwrap_or("(nothing more)").trim().to_string()
    };
    let [ours, theirs] = match ours.contains('\n') || theirs.contains('\n') {
        true => [lines(ours, theirs), lines(theirs, ours)],
        false => [ours, theirs].map(str::to_string),
    };
    Some(format!(
        "{}, but {}; all processes must be started alike",
        says(first, what, &ours),
        says(other, what, &theirs)
    ))
}
